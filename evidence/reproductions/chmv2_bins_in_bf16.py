"""transformers 5.23.0, LT007: CHMv2's depth bins are fp32 in a bf16 model, and einsum refuses to mix them.

With `bins_strategy` and `norm_strategy` other than the default; with the default nothing happens.
"""

import torch
from transformers import CHMv2Config
from transformers.models.chmv2.modeling_chmv2 import CHMv2FeaturesToDepth

head = CHMv2FeaturesToDepth(CHMv2Config(bins_strategy="linear", norm_strategy="softmax"))
print("fp32:", head(torch.rand(1, 8, 4, 4)).dtype)
head.bfloat16()(torch.rand(1, 8, 4, 4).bfloat16())
