"""What this machine is and has: hardware, versions of libraries, their known dtype faults, the hub of models and datasets."""
