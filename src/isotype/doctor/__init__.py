"""The doctor finds dtype faults in the code and configuration of any training program. Each part of
the doctor can be used without the other parts.
"""
