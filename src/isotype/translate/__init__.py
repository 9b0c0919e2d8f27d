"""`isotype import`: another tool's training configuration becomes one of Isotype, and each of its
keys is accounted for. Imports no torch.

source       a file's keys with their lines, and the tool they belong to
TOOL         a module for each tool: `KEYS`, its table, `refusal_reason` and `add_defaults`
pictures     the files of the tools for pictures, and what their tables share
transforms   what the tables are made of: what became of each key, and the settings that came of
             them
translation  puts these together
"""

from .transforms import Fate
from .translation import TOOLS, Translation, translate

__all__ = ["TOOLS", "Fate", "Translation", "translate"]
