"""Logs of any shape: ranks interleaved, chained exceptions, notebooks, megabytes of progress,
several errors.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from isotype.doctor.explain import explain
from tests.api import read_incidents

ONE = ["Traceback (most recent call last):", '  File "/home/me/a.py", line 3, in f', "    g()"]
FP16 = "ValueError: Attempting to unscale FP16 gradients."
MAT = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"


def test_interleaved_ranks_are_separated_and_counted():
    lines = []
    for text in [*ONE, MAT]:
        lines += [f"[rank0]: {text}", f"[rank1]: {text}"]
    (finding,) = explain(lines)
    assert finding.code == "EX001"
    assert finding.place.line == 3
    assert "2 times" in dict(finding.details)["repeated"]


def test_the_last_error_wins_and_all_are_reported():
    first, second = explain([*ONE, MAT, "", "retrying", "", *ONE, FP16])
    assert (first.code, str(first.severity)) == ("EX012", "error")
    assert (second.code, str(second.severity)) == ("EX001", "warning")


def test_a_chained_exception_reports_its_root():
    lines = [
        *ONE,
        MAT,
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        *ONE,
        "RuntimeError: training failed",
    ]
    assert [f.code for f in explain(lines)] == ["EX001"]


def test_a_notebook_traceback():
    lines = [
        "---------------------------------------------------------------------------",
        "RuntimeError                              Traceback (most recent call last)",
        "Cell In[7], line 2",
        "      1 inputs = tokenizer('hi')",
        "----> 2 out = model.generate(**inputs)",
        "",
        "File /usr/lib/python3/dist-packages/torch/nn/modules/linear.py:125, in Linear.forward(self, input)",
        "--> 125 return F.linear(input, self.weight, self.bias)",
        "",
        MAT,
    ]
    (finding,) = explain(lines)
    assert "generate outside autocast" in (finding.cause or "")


def test_memory_does_not_grow_with_the_log():
    def lines(count: int) -> Iterator[str]:
        for i in range(count):
            yield f"{{'loss': {i}, 'learning_rate': 2e-05}}"
        yield from [*ONE, MAT]

    peaks = []
    for count in (1_000, 10_000):
        tracemalloc.start()
        assert explain(lines(count))[0].code == "EX001"
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + 200_000


def test_a_traceback_inside_a_json_string():
    line = (
        '{"level": "error", "msg": "Traceback (most recent call last):\\n  File \\"/srv/app.py\\", line 9, in go\\n    y = f(x)\\n'
        'RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16", "ts": 1}\n'
    )
    (incident,) = read_incidents([line])
    assert incident.text.endswith("c10::BFloat16")
    assert [(f.file, f.line, f.function, f.code) for f in incident.frames] == [
        ("/srv/app.py", 9, "go", "y = f(x)")
    ]


def test_a_traceback_that_is_indented_as_a_whole():
    titled = [f"    {line}" for line in [*ONE, MAT]]
    frames = [f"  {line}" for line in ONE[1:]] + [f"    {MAT}"]
    for lines in (titled, titled[1:], frames):
        (finding,) = explain(["It fails:", "", *lines])
        assert finding.code == "EX001"
        assert finding.place.line == 3
