"""`isotype doctor run --nan` stops a program at the first step whose loss, gradient or update is
not finite, runs this step again operator by operator in the run's dtypes and in fp32, and names the
first operator whose result is not finite.

step      the recorded calls and losses of one step
recorder  keeps the inputs of the current step, and checks loss, gradients and updates
shadows   computes each operator once more in fp32
replay    runs the recorded step again and finds where a number that is not finite came from
update    runs an optimizer's update again
report    the findings; their texts are in `causes.txt`
"""
