"""Compares a written file with the run that it was written from. The comparison covers the tensors,
the settings, and the loss of the model in the file.
"""
