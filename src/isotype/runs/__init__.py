"""The run folder: its files, its lock, its metrics, its checkpoints, and the checks of a folder
from an untrusted source.
"""
