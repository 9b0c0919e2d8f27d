"""Runs a program unchanged. If the program raises an exception, its stack frames still contain
their variables. From these variables the doctor reads the operands of the failing line with their
dtypes, the modules, the autocast state, the optimizer and the settings of trainers. Rules then
determine the cause of the error, the location of the cause, and the smallest change that repairs
it.

program      runs the program as Python does
hook         exception hooks for programs and notebooks
frames       the frames of a traceback, and the expression that failed in each
expressions  reads values of expressions without running code
compiled     runs compiled code that failed once more without the compiler
modules      finds the model in the frames, and the paths of its modules and parameters
producers    finds the expression that gave a tensor its dtype, one module for each kind of expression
program_source  the calls and assignments of the user's files
bindings     the assignments in the source code of a function
arguments    the expressions that a call passes for the parameters of a function
casts        finds casts in the source code
graph        finds in autograd's graph the operation that changed the dtype of a tensor
hooks        finds hooks and callbacks, and the lines that register them
autocast     the autocast state at the line that failed
recomputation  what changed between forward and backward of a function under gradient checkpointing
storages     finds the code that creates a cache
settings     precision settings of trainers, optimizers and loss scalers
evidence     all of these facts for one exception
rules        the rules, whose texts are in `causes.txt`
"""
