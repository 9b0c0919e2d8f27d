"""Executes what lint accuses: a function is cut out of its file and run on small tensors, in a process of its own that is bounded."""
