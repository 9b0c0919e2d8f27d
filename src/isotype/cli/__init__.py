"""The command line: one short file per command. Nothing here imports torch at import time."""
