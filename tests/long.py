"""Tests of a whole matrix, of which `make test` runs a slice and `make test-full` all."""

import pytest

in_full = pytest.mark.full
