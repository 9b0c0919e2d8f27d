"""The command line: one short file per command. Importing these files does not import torch."""
