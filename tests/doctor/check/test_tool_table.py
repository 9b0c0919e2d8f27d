"""The page of `check` states how many configurations of each tool the tests contain."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.api import check_check as check

from .contradictions import CASES
from .test_clean import CLEAN

PAGE = Path(__file__).parents[3] / "docs/doctor/check.md"
TOOLS = {
    "Hugging Face": "hf",
    "SimpleTuner": "simpletuner",
    "axolotl": "axolotl",
    "LLaMA-Factory": "llamafactory",
    "Lightning": "lightning",
    "torchtune": "torchtune",
}


def find_tools(folder: Path) -> set[str]:
    return {record.tool for record in check([str(folder)]).records}


def test_the_page_states_how_each_tool_is_tested(tmp_path: Path):
    wrong: Counter[str] = Counter()
    for number, case in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        for name, text in case.bad.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        wrong.update(find_tools(folder))
    correct = Counter(tool for folder in CLEAN for tool in find_tools(folder))
    rows = re.findall(r"(?m)^\| (.+?) \| .+ \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"))
    assert len(rows) == len(TOOLS)
    for title, wrong_count, correct_count in rows:
        tool = next(name for start, name in TOOLS.items() if title.startswith(start))
        assert (wrong[tool], correct[tool]) == (int(wrong_count), int(correct_count)), title
    assert (wrong["kohya"], wrong["torchtitan"]) == (3, 1)
    assert "only 3 and 1 wrong configurations" in PAGE.read_text("utf-8")
