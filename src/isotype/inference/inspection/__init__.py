"""Says what the files of a model or adapter hold, tensor by tensor, and what the programs that load
them make of it (`isotype inspect`).
"""
