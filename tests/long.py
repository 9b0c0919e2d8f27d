"""Tests of a whole matrix, of which `make test` runs a slice: `ISOTYPE_LONG_TESTS=1` runs them all."""

from __future__ import annotations

import os

import pytest

in_full = pytest.mark.skipif("ISOTYPE_LONG_TESTS" not in os.environ, reason="one of a long matrix: ISOTYPE_LONG_TESTS=1 runs it")
