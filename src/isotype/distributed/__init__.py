"""Runs one training on several processes. The modules find out which process this is, check that
all processes agree, exchange tensors between them, and name a process that has failed.
"""
