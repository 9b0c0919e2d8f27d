"""`ampcheck` and what it is made of: gradcheck for mixed precision.

samples    what is run: the function itself, inputs, dtype combinations
attempt    running it once and seeing what really passed through
locate     the line of the user's code
rules      the rules: outcomes in, findings out
numerics   the truth at fp64, the yardstick, and the rules about errors
check      the whole check, and its findings
"""
