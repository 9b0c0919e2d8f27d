"""The head of a model is cast to fp32, with its input; FSDP2 gathers all weights in bf16."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def widen_input(module, inputs):
    if "repaired" in sys.argv:
        return inputs
    return (inputs[0].float(),)


def shard(model):
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    model = Scorer()
    model.head = model.head.float()
    model.head.register_forward_pre_hook(widen_input)
    shard(model)(torch.ones(2, 8)).sum().backward()
finally:
    dist.destroy_process_group()
