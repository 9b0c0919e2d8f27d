from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Card:
    """As much of a device as resolving needs."""

    name: str
    bf16: str
    kind: str = "cuda"


@pytest.fixture
def h100():
    return Card("NVIDIA H100", "native")


@pytest.fixture
def t4():
    return Card("Tesla T4", "none")


@pytest.fixture
def old_cpu():
    return Card("a CPU without AVX512-BF16", "emulated", "cpu")
