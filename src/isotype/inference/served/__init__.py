"""Sends the prompts of a run to a running server, and compares its answers with the answers of the
trained model.
"""
