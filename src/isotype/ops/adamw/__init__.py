from .op import AdamwHyperparameters, adamw_, adamw_reference_, stochastic_round_

__all__ = ["AdamwHyperparameters", "adamw_", "adamw_reference_", "stochastic_round_"]
