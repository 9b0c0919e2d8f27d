"""Executes functions with findings: each is cut out of its file and run on small tensors, in a separate process with limits."""
