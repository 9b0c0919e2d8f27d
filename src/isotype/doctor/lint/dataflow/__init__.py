"""Follows dtypes through PyTorch functions by running them on dtypes instead of tensors.

A function is run under scenarios (fp32 inputs under bf16 autocast, bf16 inputs without autocast, ...), once for each way its
undecided branches can go. What torch would refuse, or what loses precision, becomes an event; rules turn events into findings.
An expression that is not understood has no dtype and causes no finding.
"""
