"""Threads sleep while they wait where cores are shared; what the user has set stays."""

import os

import pytest

from isotype.environment.hardware import wait_passively

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(("load", "always", "passive"), [(0.1, False, False), (0.1, True, True), (2.0, False, True)])
def test_threads_sleep_on_shared_cores(load, always, passive):
    environ = {"PATH": "/bin"}
    assert wait_passively(always=always, load=load * CORES, environ=environ, loaded=False) is passive
    assert environ.get("OMP_WAIT_POLICY") == ("PASSIVE" if passive else None)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_has_set_stays(name):
    environ = {name: "1"}
    assert not wait_passively(always=True, environ=environ, loaded=False)
    assert environ == {name: "1"}


def test_nothing_is_set_once_torch_is_loaded():
    environ = {}
    assert not wait_passively(always=True, environ=environ, loaded=True)
    assert environ == {}
