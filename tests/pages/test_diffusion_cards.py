"""The table of memory on cards in docs/diffusion.md has every pipeline that the page trains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "diffusion.md"


def table(text: str, name: str) -> str:
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def test_every_pipeline_of_the_page_has_a_row_for_each_card():
    text = PAGE.read_text(encoding="utf-8")
    trained = re.findall(r"^\| `(\w+)`", table(text, "pipelines"), flags=re.MULTILINE)
    rows = table(text, "cards").splitlines()[2:]
    planned = {row.split("`")[1]: row for row in rows if row}
    assert len(set(trained)) > 20
    missing = {name for name in trained if name != "_class_name"} - planned.keys()
    assert not missing, f"python benchmarks/diffusion_cards.py writes the rows of {missing}"
    for row in planned.values():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 10
        for cell in cells[-4:]:
            assert cell == "does not fit" or re.search(r"(bf16|int8|nf4).*: \d+\.\d$", cell)
