"""The memory of a training step: how much is available, how much a step needs, and which layers
recompute or offload their activations.
"""
