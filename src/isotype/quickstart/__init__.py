"""`isotype quickstart` runs one of two small examples. Each example trains twice with the
configuration files in this folder, in the same way as a user does, and needs no network.

text      trains a small model on the text of Python's documentation (pretrain.yaml), then LoRA on
          questions about it (tune.yaml)
pictures  trains a small Flux on drawn shapes (full.yaml), then LoRA that teaches it a new shape
          (lora.yaml)
stages    the code that both examples share, which creates the folder and runs the two stages
"""

from .pictures import quickstart_pictures
from .text import quickstart

__all__ = ["quickstart", "quickstart_pictures"]
