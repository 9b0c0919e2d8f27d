"""The doctor finds dtype faults in the code and configuration of any training program. Each of its
parts can be used alone.
"""
