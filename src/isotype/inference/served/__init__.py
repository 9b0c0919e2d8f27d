"""Asks a running server the prompts of a run, and compares its answers with the trained model's."""
