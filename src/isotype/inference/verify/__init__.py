"""Compares a written file with the run that it was written from: its tensors, its settings, and the
loss of the model in the file.
"""
