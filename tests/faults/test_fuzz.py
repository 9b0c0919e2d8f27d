"""The watch over hostile inputs sees what it is there for; inputs can be made again; JSON is changed in every way."""

import itertools
import os
import pickle
from collections import OrderedDict

import pytest

from isotype.errors import UsageError
from tests.faults import fuzz
from tests.faults.material import Material
from tests.faults.workshop import Workshop

pytestmark = pytest.mark.full


@pytest.fixture
def chunk(tmp_path):
    numbers = itertools.count()

    def run(target, count=3):
        return fuzz._chunk(Material(Workshop(tmp_path / str(next(numbers)))), "a target", target, 0, 10, count)

    return run


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (lambda m, folder, draw: {}["x"], "KeyError: 'x' at"),
        (lambda m, folder, draw: (folder / "../../../outside").write_text("x"), "outside"),
        (lambda m, folder, draw: os.symlink("x", folder.parent.parent / f"link{draw.random()}"), "os.symlink of"),
        (lambda m, folder, draw: os.system("true"), "os.system"),
        (lambda m, folder, draw: pickle.loads(pickle.dumps(OrderedDict())), "pickle.find_class"),
        (lambda m, folder, draw: (_ for _ in ()).throw(UsageError("x" * 30_000)), "a message of 30000 characters"),
    ],
)
def test_a_fault_is_reported_with_the_number_of_its_input(chunk, target, fault):
    done, _, faults = chunk(target, 1)
    assert done == 1
    assert [number for number, _ in faults] == [10]
    assert fault in faults[0][1]


def test_an_input_that_kills_its_process_is_named_and_the_next_begins_behind_it(chunk):
    def dies(material, folder, draw):
        os._exit(3)

    assert chunk(dies) == (1, 0, [(10, "the process died with 3")])
