"""`isotype import`: another tool's training configuration becomes one of Isotype, and each of its keys is accounted for. Imports no torch.

account      what became of each key, and the settings that came of them
source       a file's keys with their lines, and which tool they belong to
python_program  the same for a Python file or a notebook
secrets      tokens and passwords in a file, which are never shown
simpletuner_file, simpletuner_data  config.env and the dataset file of SimpleTuner
words        names of optimizers, schedules, attention: theirs and ours
precision    the preset that does what the other tool's flags do
translation  puts these together; the tools are `TOOLS`, one module each with `KEYS` and `refusal`
"""

from .translation import TOOLS, Translation, translate

__all__ = ["TOOLS", "Translation", "translate"]
