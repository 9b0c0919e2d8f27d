"""Implements `isotype inspect`, which lists the tensors in the files of a model or adapter, and
tells how other programs would load these files.
"""
