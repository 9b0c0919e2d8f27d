"""`ampcheck` and what it is made of: gradcheck for mixed precision.

samples   the function under test, its inputs and the dtype combinations
attempt   one run of the function, and a record of its hand-written backwards
locate    finds the line of the user's code
rules     rules about dtypes, exceptions and memory: an outcome gives findings
numerics  the truth in fp64, the yardstick, and the rules about errors
check     the whole check, and its report
"""
