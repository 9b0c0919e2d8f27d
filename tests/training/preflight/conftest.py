"""The fixtures of the preflight tests."""

from tests.subjects import subject, with_data  # noqa: F401
