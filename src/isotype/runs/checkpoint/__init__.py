"""Checkpoints. Each checkpoint is written to a temporary folder, checksummed, synced and renamed,
so that the previous checkpoint is never damaged if the process is killed.
"""
