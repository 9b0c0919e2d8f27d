"""transformers 5.23.0, LT016: ESMFold2's per-atom confidences under autocast.

`_categorical_mean` ends in a matmul, which autocast computes in bf16; the sum over atoms scatters it times an fp32 mask.
"""

import torch
from transformers.models.esmfold2.modeling_esmfold2 import _categorical_mean

logits, mask = torch.randn(1, 6, 50), torch.ones(1, 6, dtype=torch.bool)
atom_to_token = torch.tensor([[0, 0, 1, 1, 2, 2]])
with torch.autocast("cpu", dtype=torch.bfloat16):
    per_atom = _categorical_mean(logits, start=0.0, end=1.0)
    print("per atom:", per_atom.dtype)
    total = torch.zeros(1, 3, dtype=per_atom.dtype)
    total.scatter_add_(1, atom_to_token, per_atom * mask.float())
