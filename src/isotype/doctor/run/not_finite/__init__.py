"""`isotype doctor run --nan` stops a program at the first step whose loss, gradients or update
contain NaN or inf. Then the command runs this step again, operator by operator, in the dtypes of
the run and in fp32. It names the first operator whose result contains NaN or inf.

step      the calls and losses of one step, as they were recorded
recorder  keeps the inputs of the current step, and checks loss, gradients and updates
shadows   computes each operator a second time, in fp32
replay    runs the recorded step, or an update of an optimizer, again and finds the operator from
          which NaN or inf came
report    the findings; their texts are in `causes.txt`
"""
