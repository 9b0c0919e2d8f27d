"""`ampcheck` and what it is made of: gradcheck for mixed precision.

samples, settings, subjects   what is run: inputs, dtype combinations, the function itself
attempt, watch                running it once and seeing what really passed through
exact, twin                   the truth at fp64, and the same forward as plain, differentiable PyTorch
raising, dtype_rules, numerics, aliasing, relations, edges, contracts   the rules: outcomes in, findings out
check, report                 the whole check, and its findings
"""
