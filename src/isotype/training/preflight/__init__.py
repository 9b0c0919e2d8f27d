"""Contains the checks that happen after the preparation of a run and before its first step. The
first checks need no training step. Other checks examine the data or the memory. The last checks run
a trial step. This package does not import torch.
"""
