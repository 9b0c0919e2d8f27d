"""The aim beside Unsloth's published code, counted: 8B QLoRA at 4,096 and 16,384 tokens, 1.2 times its speed in 0.85 of its memory."""

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
    made = [ledger_of(tokens, kind="layers+offload", kept="all", rank=16, device="h200", layers=n) for n in (2, 3)]
    ours = at_32(*(m.seconds(m.rows) for m in made))
    theirs = at_32(*(m.seconds(m.theirs) for m in made))
    assert theirs / ours >= 1.2
    assert at_32(*(m.peak for m in made)) / at_32(*(m.their_peak for m in made)) <= 0.85
    # each saving on its own line
    assert len(made[1].savings) == 6
    assert all(saved > 0 for saved in made[1].savings.values())
