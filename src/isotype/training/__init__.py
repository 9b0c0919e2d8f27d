"""The training loop and its phases: setup, preflight, optimizer step, evaluation, saving."""
