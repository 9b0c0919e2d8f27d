"""The README's commands, typed as they stand, in an empty folder; only the model's name is one that
is here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import interpreter

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_first_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert {"quickstart", "test", "install"} <= named <= targets


def test_every_command_of_the_table_is_a_command():
    from isotype.cli.app import build_app

    app = build_app()
    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {
        g.name for g in app.registered_groups
    }
    assert set(re.findall(r"`isotype ([a-z]+)", README)) <= known


@pytest.mark.slow
def test_the_commands_work_as_typed(tmp_path, workshop):
    chat = blocks("json")[0]
    (tmp_path / "chats.jsonl").write_text(workshop.chats.read_text() + chat)
    (tmp_path / "axolotl.yml").write_text(
        "base_model: a/b\nmicro_batch_size: 2\nsequence_len: 512\nadapter: lora\nbf16: true\n"
    )
    (tmp_path / "config").mkdir()
    env = "MODEL_TYPE=lora\nMODEL_FAMILY=flux\nMODEL_NAME=black-forest-labs/FLUX.1-dev\nMAX_NUM_STEPS=100\nMIXED_PRECISION=bf16\n"
    (tmp_path / "config/config.env").write_text(f"{env}DATALOADER_CONFIG=config/data.json\n")
    (tmp_path / "config/data.json").write_text(
        '[{"id": "mine", "type": "local", "instance_data_dir": "pictures", "resolution": 512}]'
    )
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen2.5-0.5B").symlink_to(workshop.base)
    commands = [
        line.partition("#")[0].strip() for block in blocks("bash") for line in block.splitlines()
    ]
    assert len(commands) >= 6
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    for command in commands:
        assert command.startswith("isotype ")
        ours = command.replace("isotype", f"{interpreter()} -m isotype", 1)
        done = subprocess.run(
            ours,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs/qwen/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "runs/second/report.html").is_file()


def test_the_code_of_the_ops_page_runs():
    code = "\n".join(
        re.findall(
            r"^```python\n(.*?)^```",
            (ROOT / "docs/ops.md").read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
    )
    done = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch.float32 torch.bfloat16 torch.float32" in done.stdout
    assert "linear_cross_entropy" in done.stdout
