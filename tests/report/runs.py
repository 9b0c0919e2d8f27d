"""Run folders for the report's tests, written file by file."""

import json
from pathlib import Path
from typing import Any

DECLARED = {
    "base": {"value": "bf16", "reason": "preset bf16-lora"},
    "grads": {"value": "fp32", "reason": "run.yaml:9"},
}
RESOLVED = """\
model:
  name: some/model                        # run.yaml:2
adapter:
  kind: lora                              # default
  r: 16                                   # default
precision:
  preset: bf16-lora                       # run.yaml:8
train:
  clip: 1.0                               # default
  weight_decay: 0.1                       # run.yaml:12
"""


def run_folder(path: Path, **files: Any) -> Path:
    """A run folder with the given files; `metrics` is a list of rows, `samples` a list of moments."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        if name == "metrics":
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        elif name == "samples":
            (path / "samples").mkdir(exist_ok=True)
            for moment in content:
                (path / "samples" / f"step_{moment['step']}.json").write_text(json.dumps(moment))
        elif name == "resolved":
            (path / "resolved.yaml").write_text(content)
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def step(n: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": n,
        "loss": 4 / n,
        "learning_rate": 1e-4,
        "grad_norm": 2.0 / n,
        "share_changed": 0.98,
        "tokens_per_second": 3000.0,
        "memory_bytes": 10**9,
    } | changes


def whole(path: Path, steps: int = 100) -> Path:
    """A finished run with something in every section of the page."""
    folder = run_folder(
        path,
        resolved=RESOLVED,
        metrics=[
            *(step(n) for n in range(1, steps + 1)),
            {"step": steps, "event": "evaluation", "eval_loss": 1.25},
        ],
        precision={
            "preset": "bf16-lora",
            "declared": DECLARED,
            "observed": {"base": {"bf16": 12}, "grads": {"fp32": 4}},
            "violations": [],
        },
        data={
            "train": {
                "rows": 90,
                "lengths": {"histogram": [{"up_to": 32, "rows": 30}, {"up_to": 64, "rows": 60}]},
                "files": [],
            },
            "notes": ["7 rows were cut"],
        },
        env={"python": "3.11.7", "packages": {"torch": "2.13.0"}},
        result={"status": "done", "base": "some/model", "trained_seconds": 75.0},
        manifest={
            "entries": [
                {"module": f"norm{i}", "part": "norm", "kind": "Norm", "op": "rms_norm"}
                for i in range(3)
            ]
        },
        plan={"total": steps, "parameters": 1000, "trained": 10},
        preflight={
            "findings": [
                {
                    "code": "PF011",
                    "severity": "warning",
                    "message": "may not fit",
                    "fix": "a smaller train.batch_size",
                }
            ],
            "checks": {f"PF{n:03}": "updates survive rounding" for n in range(1, 18)},
            "skipped": [
                {
                    "code": "PF004",
                    "check": "the disk holds the checkpoints",
                    "reason": "shared disk",
                }
            ],
            "seconds": {"static": 0.5},
        },
        examples={
            "examples": [
                {
                    "which": "the first row",
                    "tokens": 9,
                    "learnt": 3,
                    "left_out": 0,
                    "parts": [
                        {"text": "<|user|>why?", "learnt": False},
                        {"text": "because<|end|>", "learnt": True},
                    ],
                }
            ]
        },
        samples=[
            {
                "step": s,
                "samples": [{"prompt": "why?", "answer": f"because {s}", "reference": "so"}],
            }
            for s in (steps, 0, steps // 2)
        ],
    )
    (folder / "adapter").mkdir(exist_ok=True)
    return folder
