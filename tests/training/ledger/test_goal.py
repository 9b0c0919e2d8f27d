"""The aim beside Unsloth's published code, counted: 8B QLoRA at 4,096 and 16,384 tokens, 1.2 times its speed in 0.85 of its memory.

Ours has its input embedding in host memory, which Unsloth's default has not. With both there, or both on the device, ours takes no more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts import script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "ledger.py"
LAYERS = 32


@pytest.fixture
def ledger_of():
    return script(SCRIPT).ledger_of


def at_32(two, three):
    """Every layer after the second costs what the third does, in time and in bytes held."""
    return two + (LAYERS - 2) * (three - two)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_8b_qlora_is_counted_a_fifth_faster_in_less_memory_than_the_peer(ledger_of, tokens):
    made = [ledger_of(tokens, kind="layers+offload", kept="all", rank=16, device="h200", layers=n, embedding="host") for n in (2, 3)]
    ours = at_32(*(m.seconds(m.rows) for m in made))
    theirs = at_32(*(m.seconds(m.theirs) for m in made))
    assert theirs / ours >= 1.2
    peak, their_peak = (at_32(*(getattr(m, side) for m in made)) for side in ("peak", "their_peak"))
    assert peak <= 0.85 * their_peak
    # both with their embeddings on the device, and both without
    assert peak + made[0].on_host <= their_peak
    assert peak <= their_peak - made[0].on_host
    # each saving on its own line
    assert len(made[1].savings) == 6
    assert all(saved > 0 for saved in made[1].savings.values())
