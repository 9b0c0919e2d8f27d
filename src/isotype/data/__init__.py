"""Reads data files and turns them into rows of tokens with labels. This package imports nothing by
itself; import its modules by name.
"""
