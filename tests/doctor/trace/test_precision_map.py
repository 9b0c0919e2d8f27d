"""The map is one self-contained file that holds the tree, the dtypes and who decided."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn as nn

from isotype.doctor.trace import trace
from isotype.errors import UsageError


def drawn(file):
    text = file.read_text()
    data = json.loads(re.search(r"const DATA = (.*);\n", text)[1].replace("<\\/", "</"))
    return text, data


def test_holds_tree_dtypes_gradients_conversions_and_findings(tmp_path):
    file = tmp_path / "map.html"
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with trace(model, map=file):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 8)).float().sum()
        loss.backward()
    text, data = drawn(file)
    assert not re.search(r"(src|href)\s*=\s*[\"']?http|url\(|@import", text)
    (tree,) = data["trees"]
    nodes = {node["path"]: node for node in tree["nodes"]}
    assert set(nodes) == {"", "0", "1", "2"}
    assert nodes["0"]["activation"]["out"] == "bf16"
    assert nodes["0"]["tensors"][0] == {
        "name": "weight",
        "dtype": "fp32",
        "shape": [8, 8],
        "bytes": 256,
        "kind": "parameter",
        "trains": True,
    }
    assert {"bf16"} <= {g["dtype"] for g in nodes["2"]["gradients"]}
    assert "fp32 to bf16" in {change["change"] for change in nodes["0"]["changes"]}
    assert data["findings"] == []


def test_is_drawn_for_a_failing_program_too(tmp_path):
    file = tmp_path / "map.html"
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2).to(torch.bfloat16))
    with pytest.raises(RuntimeError), trace(model, map=file):
        model(torch.randn(3, 8))
    _, data = drawn(file)
    assert [finding["code"] for finding in data["findings"]] == ["TR001"]
    assert {node["path"] for node in data["trees"][0]["nodes"]} == {"", "0", "1"}


def test_script_tags_in_names_do_not_end_the_page(tmp_path):
    class Net(nn.Module):
        def forward(self, x):
            raise ValueError("float32 dtype </script><b>")

    file = tmp_path / "map.html"
    with pytest.raises(ValueError), trace(map=file):
        Net()(torch.randn(2))
    assert file.read_text().count("</script>") == 1


def test_unwritable_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"map\.html"), trace(map=tmp_path / "nowhere" / "map.html"):
        pass


def test_the_column_of_conversions_stays_in_view(tmp_path):
    """It is the last of its table, and keeps to the right edge of what scrolls, whatever the names before it need."""
    file = tmp_path / "map.html"
    with trace(nn.Linear(8, 8), map=file):
        pass
    text, _ = drawn(file)
    style = {
        selector.strip(): rule.strip()
        for selector, rule in re.findall(r"([^{}]+)\{([^{}]*)\}", text.partition("<style>")[2].partition("@media (max-width")[0])
    }
    (columns,) = re.findall(r"text\(\"h2\", model\.title\)\); const t = table\(\[(.*?)\]\)", text)
    assert columns.split(", ")[-1] == '"conversions"'
    assert {"position: sticky", "right: 0"} <= set(style["#tree th:last-child, #tree td:last-child"].split("; "))
    assert "overflow-x: auto" in style["#tree"]
    tracks = re.search(r"grid-template-columns: (.*?);", style["main"])[1]
    assert tracks.startswith("minmax(0, "), "the tree's track would grow with its names, beyond the page"
