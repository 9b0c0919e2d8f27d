"""mambapy 1.2.0, LT007: the state of the sequential scan is made without a dtype, and a product with it refuses a bf16 model.

The parallel scan raises at the same product, there for `A_log.float()` alone.
"""

import torch
from mambapy.mamba import Mamba, MambaConfig

model = Mamba(MambaConfig(d_model=16, n_layers=1, pscan=False))
print("fp32:", model(torch.randn(2, 8, 16)).dtype)
model.bfloat16()(torch.randn(2, 8, 16).bfloat16())
