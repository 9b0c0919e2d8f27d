"""Translates the training configuration of another tool into a configuration of Isotype (`isotype
import`), and reports how each key was translated. Imports no torch.

source       reads a file: its keys with their lines, and the tool that it belongs to
TOOL         a module for each tool, with its table `HANDLERS`, `refusal_reason` and `add_defaults`
pictures     reads the files of tools for pictures, and has handlers that their tables share
transforms   the draft of the configuration, and the handlers from which the tables are built
translation  runs the whole translation
"""

from .transforms import Fate
from .translation import TOOLS, Translation, translate

__all__ = ["TOOLS", "Fate", "Translation", "translate"]
