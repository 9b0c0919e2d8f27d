"""PF018: a model that lets packed documents see each other is refused; one that does not passes, and unpacked rows are not tried."""

from __future__ import annotations

import importlib

import torch

from isotype.precision.apply import inner_model
from isotype.tasks.language.checks import packed_documents_apart, prompts_learnt

PACKED = {"packing": True, "max_length": 128}


class Running(torch.nn.Module):
    """A mean over everything before, as a recurrent state is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def test_a_state_along_the_row_is_found(subject):
    one = subject(data=PACKED)
    assert list(packed_documents_apart(one)) == []
    model = inner_model(one.prepared.model).model
    model.norm = torch.nn.Sequential(Running(), model.norm)
    (found,) = packed_documents_apart(one)
    assert found.code == "PF018"
    assert found.fix == "data.packing: false"
    plain = subject("plain")
    assert list(packed_documents_apart(plain)) == []


def test_a_mask_made_without_positions_is_found(subject, monkeypatch):
    one = subject(data=PACKED)
    family = importlib.import_module(type(inner_model(one.prepared.model)).__module__)
    made = family.create_causal_mask
    monkeypatch.setattr(family, "create_causal_mask", lambda **given: made(**given | {"position_ids": None}))  # as GPT-OSS does
    (found,) = packed_documents_apart(one)
    assert "a mask made without them" in found.cause


def test_learnt_prompts_are_seen_in_packed_rows_too(subject, tmp_path):
    template = tmp_path / "all.jinja"
    template.write_text("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}")
    one = subject(data={**PACKED, "chat_template": str(template)})
    assert [f.code for f in prompts_learnt(one)] == ["PF006"]
