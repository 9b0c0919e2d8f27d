"""The scripts that TRL ships, from its installed package, with one line added: they run to their
end and say what was fused.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations.trainers import Setting, words

pytest.importorskip("trl")


LINE = "    from isotype.integrations import attach; attach(trainer)\n"


def rows(name):
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    for i in range(8):
        answer, other = words(i + 1, 5 + i % 3), words(i + 2, 6)
        yield {
            "sft": {"text": words(i, 9)},
            "dpo": {"prompt": words(i, 4), "chosen": answer, "rejected": other},
            "kto": {"prompt": words(i, 4), "completion": answer, "label": bool(i % 2)},
            "reward": {"chosen": answer, "rejected": other},
            "grpo": {"prompt": words(i, 4)},
            "rloo": {"prompt": messages, "note": answer},
            "distillation": {"prompt": words(i, 4)},
        }[name]


def with_the_line(name, monkeypatch):
    """The script's module under a name of its own, `attach` after its trainer is built and nothing
    else changed.
    """
    script = Path(import_module("trl.scripts").__file__).with_name(f"{name}.py")
    before, mark, after = script.read_text(encoding="utf-8").partition("    # Train the model\n")
    assert mark
    made = ModuleType(f"trl_{name}_with_the_line")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # its dataclasses look their module up
    exec(compile(f"{before}{LINE}{mark}{after}", str(script), "exec"), made.__dict__)
    return made


MORE = {
    "grpo": [
        "--num_generations",
        "2",
        "--max_completion_length",
        "6",
        "--reward_funcs",
        "tests.integrations.trainers.diversity",
    ],
    "rloo": [
        "--num_generations",
        "2",
        "--max_completion_length",
        "6",
        "--reward_funcs",
        "think_format_reward",
    ],
    "distillation": ["--max_completion_length", "6"],
    "reward": ["--lora_task_type", "SEQ_CLS"],
}


OTHERS = [
    pytest.param(name, marks=pytest.mark.full)
    for name in ("sft", "kto", "reward", "dpo", "rloo", "distillation")
]


@pytest.mark.parametrize("name", ["grpo", *OTHERS])
def test_a_script_of_trls_runs_with_one_line_added(name, models, tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
    arguments = [
        "--model_name_or_path", Setting(models, family="smollm3").path(), "--dataset_name", str(data), "--output_dir",
        str(tmp_path / "out"), "--use_cpu", "true", "--max_steps", "2", "--per_device_train_batch_size", "2", "--logging_steps", "1",
        "--report_to", "none", "--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "4", "--disable_tqdm", "true",
        *MORE.get(name, []),
    ]  # fmt: skip
    if name == "distillation":
        arguments += ["--teacher_model_name_or_path", Setting(models, family="smollm3").path()]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    script = with_the_line(name, monkeypatch)
    script.main(*script.make_parser().parse_args_and_config(fail_with_unknown_args=False))
    manifest = json.loads((tmp_path / "out" / "isotype" / "manifest.json").read_text())
    assert manifest["precision"] == "bf16-lora"
    assert {"lora", "norm"} <= {row["part"] for row in manifest["first_step"]}
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (
        json.loads((tmp_path / "out" / "isotype" / "result.json").read_text())["status"] == "done"
    )
