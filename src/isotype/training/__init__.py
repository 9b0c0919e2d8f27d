"""Contains the training loop and all phases of a run: the setup, the checks before the first step
(preflight), the optimizer steps, the evaluations, and the saving of checkpoints and results.
"""
