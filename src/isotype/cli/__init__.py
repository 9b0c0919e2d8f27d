"""The command line: one thin file a command. Nothing here imports torch at import time."""
