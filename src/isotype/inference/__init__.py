"""Uses the result of a run. This package chats with the model, draws samples, and evaluates, merges
and exports the result.
"""
