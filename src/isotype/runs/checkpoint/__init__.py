"""Checkpoints: written aside, checksummed, synced and renamed, so that a kill at any moment leaves the previous one whole."""
