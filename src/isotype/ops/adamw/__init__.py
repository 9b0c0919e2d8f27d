from .function import adamw_
from .numbers import AdamwNumbers
from .reference import adamw_reference_, stochastic_round_

__all__ = ["AdamwNumbers", "adamw_", "adamw_reference_", "stochastic_round_"]
