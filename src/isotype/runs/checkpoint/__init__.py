"""Checkpoints. Each checkpoint is written to a temporary folder, checksummed, synced and renamed,
so that a kill never damages the previous checkpoint.
"""
