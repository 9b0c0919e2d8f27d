"""`ampcheck` and what it is made of: gradcheck for mixed precision.

samples, subjects   what is run: inputs, dtype combinations, the function itself
attempt             running it once and seeing what really passed through
numerics            the truth at fp64, the yardstick, and the errors
locate              the line of the user's code
rules, inexact      the rules: outcomes in, findings out
check               the whole check, and its findings
"""
