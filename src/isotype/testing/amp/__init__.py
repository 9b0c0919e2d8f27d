"""`ampcheck` is a gradcheck for mixed precision. The package has these modules:

samples   the function that is checked, its inputs and the dtype combinations
attempt   one run of the function, which records calls of its hand-written backwards
locate    searches for the line of the user's code that has the fault
rules     rules about dtypes, exceptions and memory, which find faults in the result of a run
numerics  rules about numerical errors: the exact result in fp64 and the allowed error
check     `ampcheck` and its report
"""
