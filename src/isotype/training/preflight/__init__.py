"""Contains the checks that happen after the preparation of a run and before its first step. Some of
the checks need no step, some check the data or the memory, and the last ones run a trial step. This
package does not import torch.
"""
