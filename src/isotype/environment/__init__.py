"""Determines facts about this machine. These are its hardware, the versions of libraries and their
known dtype faults, and the connection to the Hugging Face hub.
"""
