from .noise import stochastic_round_
from .op import AdamwHyperparameters, adamw_, adamw_reference_

__all__ = ["AdamwHyperparameters", "adamw_", "adamw_reference_", "stochastic_round_"]
