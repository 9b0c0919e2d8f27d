"""Writes and reads checkpoints. A checkpoint is first written to a temporary folder and synced to
the disk. Then the folder is renamed. So the previous checkpoint is never damaged if the process is
killed.
"""
