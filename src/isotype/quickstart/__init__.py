"""`isotype quickstart`: two small programs that train twice by configurations lying beside them, as
a user would, without a network.

text      a small model on the text of Python's documentation (pretrain.yaml), then LoRA on
          questions about it (tune.yaml)
pictures  a small Flux on drawn shapes (full.yaml), then LoRA that teaches it a new one (lora.yaml)
stages    what both share: the folder, two runs that end in time
"""

from .pictures import quickstart_pictures
from .text import quickstart

__all__ = ["quickstart", "quickstart_pictures"]
