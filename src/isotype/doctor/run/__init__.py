"""Runs a program unchanged and, at an exception, reads the frames that are still alive: the
operands of the failing line with their dtypes, the modules, autocast, the optimizer and the
trainers' settings. Rules decide the cause, the place and the smallest change from these facts.

program      runs the program as Python does
hook         exception hooks for programs and notebooks
frames       the frames of a traceback, and the expression that failed in each
expressions  reads values of expressions without running code
modules      finds the model in the frames, and the paths of its modules and parameters
producers    finds the expression that gave a tensor its dtype
autocast     the autocast state at the line that failed
settings     precision settings of trainers, optimizers and loss scalers
evidence     all of these facts for one exception
rules        the rules, whose texts are in `causes.txt`
"""
