"""The run folder: its files, its lock, its metrics, its checkpoints, and what is refused of a folder that a stranger made."""
