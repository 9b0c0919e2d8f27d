"""Reads files as they are, with the line of every value. Nothing read is ever executed."""
