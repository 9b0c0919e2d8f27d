"""The rows of a JSON array, and the places of its errors."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.data.json_rows import read_json
from isotype.errors import UsageError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
# a half of a surrogate pair is refused by itself
ROWS = st.lists(VALUES, max_size=6).filter(lambda rows: "\\ud" not in json.dumps(rows))


def rows_of(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(record.line, record.value) for record in read_json(file, "a.json")]


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_rows_are_those_that_were_written(tmp_path_factory, rows, indent, ascii_only):
    found = rows_of(tmp_path_factory.mktemp("rows"), json.dumps(rows, indent=indent, ensure_ascii=ascii_only))
    assert [value for _, value in found] == rows
    assert [line for line, _ in found] == sorted(line for line, _ in found)


def test_lines_and_places(tmp_path):
    text = '[{"a":\n "é"},\n\n 12, true,\n{"b": "x\\n"}]'
    assert rows_of(tmp_path, text) == [(1, {"a": "é"}), (4, 12), (4, True), (5, {"b": "x\n"})]
    for broken, said in {
        '[{"a": 1},\n  {"b": }]': "a.json:2: broken JSON at column 9: Expecting value",
        '[{"a": 1}, {"b": }]': "a.json:1: broken JSON at column 18: Expecting value",
        "[1, 2,\n tru]": "a.json:2: broken JSON at column 2: Expecting value",
        '[{"a": "never closed}]': "a.json:1: broken JSON at column 8: Unterminated string",
        "[1\n,2": "a.json:2: broken JSON: ',' or ']' expected, the file ends here",
        "[1,\n2]\n\n[": "a.json:4: text after the end of the array",
        "[1,": "a.json:1: broken JSON at column 4: Expecting value",
    }.items():
        with pytest.raises(UsageError) as refused:
            rows_of(tmp_path, broken)
        assert str(refused.value).startswith(said), broken
    for raw, said in {
        b'["\xc3\xa9",\n"\xe9"]': "a.json:2: byte 8 (0xe9) is not UTF-8",
        b'["a", "\xc3': "a.json:1: byte 7 (0xc3) is not UTF-8",
    }.items():
        with pytest.raises(UsageError) as refused:
            rows_of(tmp_path, raw)
        assert str(refused.value).startswith(said), raw


@pytest.mark.parametrize(
    "text", ['{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n{"a": 3}\n', '[{"a": 1},\n {"a": 1, "b": {"c": 1, "c": 2}},\n {"a": 3}]']
)
def test_a_key_given_twice_makes_its_row_alone_a_bad_one(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    records = list(read_json(file, "a.json"))
    assert [record.value for record in records] == [{"a": 1}, None, {"a": 3}]
    assert (records[1].place, records[1].wrong) == ("a.json:2", "the key 'c' is given twice in one object")


def test_objects_written_over_several_lines_are_rows(tmp_path):
    rows = [{"a": 1, "b": [{"c": "x\n"}]}, {"a": 2}]
    text = "\n" + "\n".join(json.dumps(row, indent=2) for row in rows)
    assert rows_of(tmp_path, text) == [(2, rows[0]), (10, rows[1])]
    assert rows_of(tmp_path, '{"a": 1}\n{"a": 2}') == [(1, {"a": 1}), (2, {"a": 2})]
    with pytest.raises(UsageError, match=r"a\.json:2: broken JSON"):
        rows_of(tmp_path, "{\n")
