"""`isotype proof` checks Isotype on a graphics card. It compares Isotype's results on this card
with fp64 references. It also compares the time of training steps with the time of PEFT's steps. It
runs on a GPU, or on a CPU with `--device cpu`.

card       the card, its versions and the dtypes that it supports
parts      the table of the parts, in the order in which they run
kernels    every op, forward and backward, beside its fp64 reference
adapters   the gradients of LoRA layers beside fp64 and PEFT
learning   runs of six presets, and a run that is interrupted and resumed
speed      the time and memory of training steps beside PEFT, Unsloth and Liger
runner     runs each part in a process of its own and stores its result
summary    the result as text, and as a row of the table in docs/cards.md
"""
