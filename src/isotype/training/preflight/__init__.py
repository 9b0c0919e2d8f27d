"""The checks between the preparation of a run and its first step: static facts, data, memory, and a
trial step. Imports no torch.
"""
