"""Settings with which compiled layers cannot run are refused by name, each with its reason."""

from __future__ import annotations

import pytest

from isotype.config.kind import check_compile
from isotype.config.load import load
from isotype.errors import UsageError

CANNOT = [
    "model.trust_remote_code=true", "data.packing=true", "train.gradient_checkpointing=layers+offload", "train.keep_attention=true",
    "run.observe_every=1", "parallel.kind=shard", "parallel.kind=hybrid",
]  # fmt: skip


@pytest.mark.parametrize("setting", CANNOT)
def test_what_compiled_layers_cannot_run_with_is_refused(setting):
    with pytest.raises(UsageError, match=r"^model\.compile: layers cannot run with ") as caught:
        check_compile(load(None, ["model.compile=layers", setting]).config)
    assert setting.split("=")[0] in str(caught.value)
    assert caught.value.fix.startswith("model.compile: none, or ")
    check_compile(load(None, [setting]).config)


def test_compiled_layers_are_accepted_with_the_defaults_and_plain_recomputation():
    check_compile(load(None, ["model.compile=layers"]).config)
    check_compile(load(None, ["model.compile=layers", "train.gradient_checkpointing=layers"]).config)
