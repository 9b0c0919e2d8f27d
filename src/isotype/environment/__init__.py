"""Facts about this machine: hardware, library versions, their known dtype faults, and the
connection to the hub.
"""
