from .op import AdamwNumbers, adamw_, adamw_reference_, stochastic_round_

__all__ = ["AdamwNumbers", "adamw_", "adamw_reference_", "stochastic_round_"]
