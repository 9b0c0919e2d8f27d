"""Manages the folder of a run: its files, lock, metrics and checkpoints. Also checks a folder from
an untrusted source.
"""
