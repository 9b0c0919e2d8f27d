"""How the code reads: density, decisions and names of every room, as benchmarks/words.py counts them."""

import ast
from pathlib import Path

import pytest
from benchmarks import words

TESTS = Path(__file__).parent
ROOMS = sorted(
    path.name for path in words.SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))
)


@pytest.mark.parametrize("room", ROOMS)
def test_room_reads_in_the_fields_words(room):
    reading = words.read_folder(words.SOURCE / room)
    assert reading.private_per_1000_names <= 12, reading.private_names.most_common()
    assert reading.odd_percent <= 2, reading.odd_functions
    assert reading.heavy_functions == []
    assert reading.tokens_per_line <= 6.5
    assert reading.conditionals_per_1000_lines <= 28


def test_package_reads_in_the_fields_words():
    reading = words.read_folder(words.SOURCE)
    assert reading.tokens_per_line <= 6.0
    assert reading.conditionals_per_1000_lines <= 20
    assert reading.private_per_1000_names <= 12


def test_tests_import_few_inner_modules():
    """A module below Isotype's packages is imported through tests/api.py, so that it can move."""
    assert len(words.inner_modules_in_tests(TESTS)) <= 60


@pytest.mark.parametrize(
    ("source", "decisions"),
    [
        ("def f(): return 1", 1),
        ("def f(x):\n if x and x > 1 or x < 0:\n  return 1\n return [y for y in x]", 5),
        ("def f(x):\n match x:\n  case 1: pass\n  case _: pass", 3),
    ],
)
def test_decisions_are_branches_loops_and_operands(source, decisions):
    assert words.count_decisions(ast.parse(source).body[0]) == decisions


def test_private_and_odd_names():
    assert words.is_private("_found")
    assert words.is_private("WORDS")
    assert not words.is_private("found_path")
    assert words.is_oddly_named("kind_of")
    assert words.is_oddly_named("why_not_fused")
    assert words.is_oddly_named("of")
    assert not words.is_oddly_named("fusion_blocker")
    bound = list(
        words.bound_names(
            ast.walk(ast.parse("def f(given): made = self.kept = [one for one in x]"))
        )
    )
    assert sorted(bound) == ["f", "given", "kept", "made", "one"]
