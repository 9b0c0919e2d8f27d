"""Every text of every sheet can be said."""

from __future__ import annotations

import re

from tests.api import MESSAGE_TEMPLATES, Frame, RecognisedError, diagnose_error, read_situation
from tests.api import explainer_FAMILIES as FAMILIES


def test_every_text_can_be_said():
    """With what its wordings find in a text, and nothing else."""
    worded = {operator for operator, _ in MESSAGE_TEMPLATES}
    for operator, form in [
        *MESSAGE_TEMPLATES,
        *((operator, "") for operator in FAMILIES if operator not in worded),
    ]:
        if operator not in FAMILIES:
            continue
        names = set(re.findall(r"<(\w+)>", form))
        words = {
            name.strip("_").rstrip("2"): "torch.bfloat16" for name in names if name.startswith("_")
        }
        dtypes = {
            name: "bf16" if i % 2 else "fp32"
            for i, name in enumerate(sorted(n for n in names if not n.startswith("_")))
        }
        for frames in ((), [Frame("lora/moe.py", 3, "generate", "y = self.vae.encode(x) @ w")]):
            message, _, causes = diagnose_error(
                RecognisedError(
                    text="",
                    operator=operator,
                    dtypes=dtypes,
                    captures=words,
                    situation=read_situation(frames),
                )
            )
            assert message, operator
            assert causes, operator
            assert all(cause.name and cause.reason and cause.fix for cause in causes)
            assert "{" not in message
