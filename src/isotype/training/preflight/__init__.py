"""Contains the checks that happen after the preparation of a run and before its first step. They
check facts that need no step, the data and the memory, and run a trial step. This package does not
import torch.
"""
