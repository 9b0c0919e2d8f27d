"""Every text of every sheet can be said."""

from __future__ import annotations

import re

import pytest

from isotype.doctor.explain.log import Frame
from isotype.doctor.explain.recognise import FORMS
from isotype.doctor.explain.sheets import FAMILIES
from isotype.doctor.explain.situation import Seen, read


@pytest.mark.parametrize("operator", sorted(FAMILIES))
def test_every_text_can_be_said(operator):
    """With what its wordings find in a text, and nothing else."""
    groups = [set(re.findall(r"<(\w+)>", form)) for known, form in FORMS if known == operator] or [set()]
    for names in groups:
        words = {name.strip("_").rstrip("2"): "torch.bfloat16" for name in names if name.startswith("_")}
        dtypes = {name: "bf16" if i % 2 else "fp32" for i, name in enumerate(sorted(n for n in names if not n.startswith("_")))}
        for frames in ((), [Frame("lora/moe.py", 3, "generate", "y = self.vae.encode(x) @ w")]):
            explained = FAMILIES[operator][1](Seen(text="", operator=operator, dtypes=dtypes, words=words, situation=read(frames)))
            assert explained.message
            assert all(cause.name and cause.why and cause.fix for cause in explained.causes)
            assert "{" not in explained.message
