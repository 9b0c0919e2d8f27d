"""Runs one training on several processes: which process this is, what all of them must agree on,
how they exchange tensors, and how a process that was lost is named.
"""
