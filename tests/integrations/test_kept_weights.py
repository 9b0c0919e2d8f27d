"""What `attach` keeps of narrowed weights: their last bits, so that with the bf16 weights no more
memory is held than before.
"""

from __future__ import annotations

import torch

from isotype.integrations import attach, detach
from tests.api import RoundingLoss
from tests.integrations.trainers import Setting, plain


def test_what_rounding_took_is_given_back_bit_for_bit():
    torch.manual_seed(0)
    wide = torch.randn(300, 64)
    bits = wide.view(-1).view(torch.int32)
    bits[:9000] = (bits[:9000] & ~0xFFFF) | 0x8000  # half-way between two bf16 numbers
    wide[-1, :5] = torch.tensor([0.0, -0.0, torch.inf, 3.4e38, -1e-40])
    assert RoundingLoss.from_cast(wide[:0], wide[:0].bfloat16()).nbytes == 0
    for scaled in (wide, -wide, wide * 1e-38, wide * 1e30):
        narrow = scaled.bfloat16()
        lost = RoundingLoss.from_cast(scaled, narrow)
        assert lost.nbytes < 0.6 * scaled.nbytes + 8 * 9000
        assert torch.equal(lost.restore(narrow).view(torch.int32), scaled.view(torch.int32))
        narrow[3, 3] *= 2
        assert lost.restore(narrow) is None


def test_a_frozen_base_is_as_large_attached_as_before_and_comes_back(models):
    trainer = plain(Setting(models, bf16=True))
    frozen = {name: p for name, p in trainer.model.named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in frozen.items()}
    attached = attach(trainer, "bf16-lora", quiet=True, preflight=False)
    narrow = sum(p.nbytes for p in frozen.values())
    (note,) = [note for note in attached.notes if "kept for detach" in note]
    assert (
        float(note.split()[0]) * 2**20 + narrow
        <= 1.1 * sum(p.nbytes for p in before.values()) + 2**19
    )
    assert detach(trainer) == []
    assert all(torch.equal(p, before[name]) for name, p in frozen.items())
