"""The fixtures of the checks' tests."""

from tests.subjects import subject, with_data  # noqa: F401
