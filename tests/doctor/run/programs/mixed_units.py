"""FSDP takes the weights of a module together: the adapters of PEFT are fp32, their base is fp16."""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
config = LoraConfig(r=2, target_modules=["0"])
options = {"autocast_adapter_dtype": False} if "repaired" in sys.argv else {}
model = get_peft_model(base, config, **options)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
finally:
    dist.destroy_process_group()
