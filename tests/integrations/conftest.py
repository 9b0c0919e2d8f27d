"""Trainers talk a lot, and some models are saved to disk once for all tests of this folder."""

import pytest


@pytest.fixture(autouse=True)
def quiet():
    import datasets

    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("trainers")
