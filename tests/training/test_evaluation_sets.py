"""`data.eval` as sets by name: a loss for each, and early stopping by one of them."""

import json
from pathlib import Path
from typing import Any

from isotype.report import write_report
from isotype.tasks.choose import train


def test_every_named_set_has_a_loss_and_one_of_them_decides(configured: Any, workshop: Any, tmp_path: Path, capsys: Any) -> None:
    lines = Path(workshop.chats).read_text().splitlines(keepends=True)
    ours, other, odd = tmp_path / "train.jsonl", tmp_path / "more.jsonl", tmp_path / "odd.jsonl"
    ours.write_text("".join(lines[6:]))
    other.write_text("".join(lines[:6]))
    odd.write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Zqx Vjk Wyq! " * 4}]}) + "\n"
    )
    data = {"train": str(ours), "eval": {"like": str(other), "odd": [str(odd)]}}
    settings = {"steps": 4, "eval_every": 2, "patience": 9, "stop_on": "like", "learning_rate": 0.01}
    assert train(configured(data=data, train=settings)) == 0
    assert "(best of like)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row.get("event") == "evaluation"]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:
        low, high = sorted((row["eval_loss_like"], row["eval_loss_odd"]))
        assert low < row["eval_loss"] < high
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["best_eval_loss"] == min(row["eval_loss_like"] for row in evaluations)
    write_report(tmp_path / "run")
    page = (tmp_path / "run/report.html").read_text()
    assert "Evaluation loss, like" in page
    assert "Evaluation loss, odd" in page
