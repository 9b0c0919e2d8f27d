"""The doctor: finds dtype faults in anyone's code and configuration. Each part is usable alone."""
