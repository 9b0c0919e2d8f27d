"""Uses a run: chat, sample, evaluate, merge."""
