"""Arrays of NumPy that PyTorch cannot convert: what they hold, and code that makes numbers of them."""

import datetime

import numpy as np
import pytest
import torch

from tests.api import collect_evidence, decide_cause


def convert_table(pandas):
    table = pandas.DataFrame({"age": [1, 2], "fare": [0.5, 1.5], "male": [True, False]})
    columns = ["age", "fare", "male"]
    return torch.tensor(table[columns].values, dtype=torch.float)


def convert_labels(pandas):
    table = pandas.DataFrame({"age": [1, 2], "male": [True, False]})
    rows = table.to_numpy()
    return torch.tensor(rows, dtype=torch.long)


def convert_texts(pandas):
    table = pandas.DataFrame({"age": [1, 2], "name": ["Ann", "Bo"]})
    return torch.from_numpy(table.values)


def convert_missing(pandas):
    table = pandas.DataFrame({"age": [1, pandas.NA]}, dtype=object)
    return make(table["age"].to_numpy())


def make(values):
    return torch.tensor(values)


def convert_rows(pandas):
    table = pandas.DataFrame({"vector": [[1.0, 2.0], [3.0, 4.0]]})
    return make(table["vector"].values)


def convert_ragged(pandas):
    rows = np.array([[1], [2, 3]], dtype=object)
    return make(rows)


def convert_times(pandas):
    times = np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[s]")
    return torch.from_numpy(times)


def convert_long_doubles(pandas):
    values = np.ones(2, dtype=np.longdouble)
    return torch.tensor(data=values)


@pytest.mark.parametrize(
    ("convert", "cause", "fix"),
    [
        (
            convert_table,
            "columns differ in dtype: int64 (age), float64 (fare), bool (male); all elements are",
            """`table[columns].to_numpy(dtype="float32")` at """,
        ),
        (convert_labels, "int64 (age), bool (male)", """`table.to_numpy(dtype="int64")` at """),
        (convert_texts, "'Ann' (str) stands in the column name", "leave name out, or replace"),
        (convert_missing, "<NA> stands in the column age", """, na_value=float("nan")) at """),
        (
            convert_rows,
            "rows of one length, such as a list",
            "numpy.stack(table['vector'].values).astype",
        ),
        (convert_ragged, "rows of several lengths", "torch.as_tensor(row) for row in "),
        (convert_times, "is an array of datetime64", "(times - times.min()) / numpy.timedelta64"),
        (convert_long_doubles, "is an array of longdouble", """.astype("float32")` at """),
    ],
)
def test_array_that_pytorch_cannot_convert(convert, cause, fix):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError) as failure:
        convert(pandas)
    finding = decide_cause(collect_evidence(failure.value))
    assert finding.code == "RN040"
    assert cause in finding.cause
    assert fix in finding.fix
    assert finding.place.symbol == convert.__name__


def test_timestamp_column_of_a_dataset():
    datasets = pytest.importorskip("datasets")
    rows = [{"time": datetime.datetime(2026, 1, day), "load": float(day)} for day in (1, 2)]
    table = datasets.Dataset.from_list(rows).with_format("torch")
    for read in (lambda: table[0], lambda: table[:2]):
        with pytest.raises(TypeError) as failure:
            read()
        finding = decide_cause(collect_evidence(failure.value))
        assert finding.code == "RN040"
        assert "the column time of the dataset holds datetime64" in finding.cause
        assert "with_format('torch', columns=['load'])` at " in finding.fix
    assert set(table.with_format("torch", columns=["load"])[0]) == {"load"}
