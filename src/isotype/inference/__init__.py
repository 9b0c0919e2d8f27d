"""Implements what a user can do with the result of a run: chat with the model, draw samples, and
evaluate, merge and export the result.
"""
