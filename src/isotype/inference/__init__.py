"""What one does with a run: chat, sample, evaluate, merge."""
