"""transformers 5.23: norms that add 1 to a bf16 weight in bf16 (AC022). Column errors against fp64, averaged over rows, beside the same norm widened.

Prints, for a weight of 0.02 times a normal number, the deviation of the columns' relative errors: 2^-9 is half a bf16 step at 1.
"""

import torch
import torch.nn.functional as F
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextCenteredRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.videoprism.modeling_videoprism import VideoPrismLayerNorm

torch.manual_seed(0)
x = torch.randn(4096, 64).bfloat16()
w = (0.02 * torch.randn(64)).bfloat16()


def column_error(given: torch.Tensor, truth: torch.Tensor) -> float:
    error = given.double() - truth
    return float(((error * truth).sum(0) / truth.square().sum(0)).std())


for kind in (NemotronLayerNorm1P, VideoPrismLayerNorm, MuseSparkTextCenteredRMSNorm):
    norm = kind(64).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(w)
        if isinstance(norm, torch.nn.LayerNorm):
            truth = F.layer_norm(x.double(), (64,), 1 + w.double(), None, norm.eps)
            widened = F.layer_norm(x.float(), (64,), 1 + w.float(), None, norm.eps).bfloat16()
        else:
            truth = F.rms_norm(x.double(), (64,), 1 + w.double(), norm.eps)
            widened = F.rms_norm(x.float(), (64,), 1 + w.float(), norm.eps).bfloat16()
        print(f"{kind.__name__:30s} {column_error(norm(x), truth):.1e}   widened first {column_error(widened, truth):.1e}")
