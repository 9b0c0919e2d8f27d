"""Computes how much memory is available and how much a training step needs. Decides which layers
recompute their activations or move them to host memory.
"""
