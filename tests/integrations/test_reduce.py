"""The dtype in which a trainer's wrapper sums gradients across processes; of a hook that is not PyTorch's, that it is not known."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from isotype.integrations.watched import summed_in


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp(hook=None, **options):
    model = DistributedDataParallel(nn.Linear(4, 4), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def builtin():
    model = ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def own_hook(state, bucket):
    return default_hooks.fp16_compress_hook(None, bucket)


WRAPPED = {
    "DDP": (ddp, torch.float32),
    "DDP of bf16 weights": (lambda: DistributedDataParallel(nn.Linear(4, 4).bfloat16()), torch.bfloat16),
    "fp16 hook": (partial(ddp, default_hooks.fp16_compress_hook), torch.float16),
    "FSDP": (lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), torch.float32),
    "FSDP in bf16": (
        lambda: FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)
        ),
        torch.bfloat16,
    ),
    "fully_shard": (lambda: fully_shard(nn.Linear(4, 4)), torch.float32),
    "fully_shard in bf16": (
        lambda: fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        torch.bfloat16,
    ),
    "fully_shard, wide sums": (
        lambda: fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        torch.float32,
    ),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_the_dtype_of_the_sums_is_read(how):
    made, dtype = WRAPPED[how]
    assert summed_in(made()) == ([dtype], "")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (partial(ddp, own_hook), "communication hook own_hook"),
        (partial(ddp, default_hooks.fp16_compress_wrapper(own_hook)), "communication hook fp16_compress_wrapper"),
        (builtin, "communication hook BuiltinCommHookType.FP16_COMPRESS"),
        (lambda: nn.Linear(4, 4), "neither DDP nor FSDP wraps the model"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_told(made, words):
    sent, why = summed_in(made())
    assert sent == []
    assert words in why
