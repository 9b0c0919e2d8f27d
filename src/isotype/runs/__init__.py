"""The folder of a run: its files, lock, metrics and checkpoints, and the checks of a folder from an
untrusted source.
"""
