"""`ampcheck`, a gradcheck for mixed precision, and its modules.

samples   the function under test, its inputs and the dtype combinations
attempt   one run of the function, which records calls of its hand-written backwards
locate    the search for the faulty line of the user's code
rules     rules about dtypes, exceptions and memory, which turn an outcome into findings
numerics  rules about numerical errors: the exact result in fp64 and the allowed error
check     `ampcheck` and its report
"""
