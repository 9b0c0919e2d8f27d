"""Adapters besides plain LoRA: DoRA and starts on a denoiser."""

import json

import pytest

from isotype.tasks.choose import train


@pytest.mark.parametrize("adapter", [{"dora": True}, {"start": "pissa"}, {"start": "orthogonal"}])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_it_trains_and_diffusers_loads_it(drawn, studio, tmp_path, adapter, family):
    assert train(drawn(model=getattr(studio, family), adapter={"r": 4, **adapter})) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["check"]["trained_loss"] == pytest.approx(result["check"]["reloaded_loss"], abs=1e-6)
