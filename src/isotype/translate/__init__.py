"""`isotype import`: another tool's training configuration becomes one of Isotype, and each of its keys is accounted for. Imports no torch.

source       a file's keys with their lines, and the tool they belong to (simpletuner_files, simpletuner_datasets: SimpleTuner's files)
TOOL         a module for each tool: `KEYS`, its table, `refusal` and `finish`
transforms   what the tables are made of
draft        what became of each key, and the settings that came of them
translation  puts these together
"""

from .translation import TOOLS, Translation, translate

__all__ = ["TOOLS", "Translation", "translate"]
