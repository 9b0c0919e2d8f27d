"""Shared by every test: no network, the read-only inputs beside the checkout, one thread a process,
and the same numbers every time.

The tensors are tiny: a second thread would spin more than it works. What a test draws depends on
its name, not on the tests before it.
"""

import contextlib
import gc
import io
import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# a slow or busy machine is no fault
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# no test cuts the power: in this process nothing waits for the disk (50 waits a run of 6 ms each)
os.fsync = lambda file: None
# a test that is about the cache names a folder of its own
os.environ.setdefault("ISOTYPE_CACHE", "none")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection() -> None:
    """In a worker of the whole suite, Isotype imports bitsandbytes, as in a run of the command line.
    If a test imports it first, it compiles functions, and then loads torch's inductor (2 s), and
    every observed step looks for compiled code.

    No garbage collection runs while the test files are imported: nearly all of it stays.
    """
    gc.disable()
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.api import disable_hub_kernels

        disable_hub_kernels()


def pytest_collection_finish() -> None:
    """What the tests imported stays to the end: no garbage collection need look through it again. A
    run's last one took 0.3 s of 2.5.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    # collections took 6% of the tests' time; a test that is about freed memory collects by itself
    gc.set_threshold(20_000)
    gc.callbacks.append(full_collections)


class FullCollections:
    """The time that garbage collections spent looking through every object since `freeze`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.start = 0.0

    def __call__(self, phase: str, details: dict[str, int]) -> None:
        if details["generation"] < 2:
            return
        if phase == "start":
            self.start = time.process_time()
        else:
            self.seconds += time.process_time() - self.start

    def freeze(self) -> None:
        """Later collections need not look through what tests imported, compiled or cached."""
        gc.collect()
        gc.freeze()
        self.seconds = 0.0


full_collections = FullCollections()


def pytest_runtest_setup() -> None:
    # each run and many tests collect all garbage; after a while that took 0.3 s every time
    if full_collections.seconds > 0.5:
        full_collections.freeze()


def pytest_unconfigure() -> None:
    if full_collections in gc.callbacks:
        gc.callbacks.remove(full_collections)
    gc.unfreeze()  # what is left at the end would be reported as leaked


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The seed of everything that draws numbers without one of its own."""
    import numpy
    import torch

    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # without a GPU torch.manual_seed formats the stack for each kind of device: 2 ms a test
        torch.default_generator.manual_seed(seed)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real inputs beside the checkout; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED.name}/ folder beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> SimpleNamespace:
    """`base`: a saved tiny Llama with a chat tokenizer; `chats`: a JSONL file of 48 short
    conversations.
    """
    from tests.api import train_tokenizer
    from tests.models import SIZES, tiny

    folder = tmp_path_factory.mktemp("workshop")
    pairs = [
        (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
        for a in range(4)
        for b in range(12)
    ]
    tokenizer = train_tokenizer([f"{q} {a}" for q, a in pairs] * 2, vocabulary=320)
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_id")}
    model = tiny(**{**sizes, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
                    "eos_token_id": tokenizer.eos_token_id})  # fmt: skip
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = (
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    )
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(folder=folder, base=folder / "base", chats=folder / "chats.jsonl")


def written(
    place: Path, folder: str, config: dict[str, dict[str, Any]], sections: dict[str, dict[str, Any]]
) -> Any:
    """place/folder.yaml with the sections in the place of the configuration's, loaded."""
    from isotype.config.load import load

    file = place / f"{folder}.yaml"
    # JSON is YAML
    file.write_text(
        json.dumps(
            config | {name: config.get(name, {}) | values for name, values in sections.items()}
        )
    )
    return load(file, [], {})


def configure_in(workshop: SimpleNamespace, place: Path) -> Any:
    """`make(folder, train={...})` writes place/folder.yaml and loads it; the run goes to
    place/folder.
    """

    def make(folder: str = "run", **sections: Any) -> Any:
        config = {
            "model": {"name": str(workshop.base)},
            "data": {"train": str(workshop.chats), "eval_split": 0.1, "max_length": 64},
            "adapter": {"kind": "lora", "r": 4},
            "precision": {"preset": "fp32"},
            "train": {"steps": 6, "batch_size": 4, "learning_rate": 1e-3, "eval_every": 2},
            "run": {
                "folder": str(place / folder),
                "sample_tokens": 2,
                "report": False,
                "samples": ["How much is 1 plus 1?"],
            },
        }
        return written(place, folder, config, sections)

    return make


@pytest.fixture
def configured(workshop, tmp_path):
    """`configured(train={...})` writes tmp_path/run.yaml and loads it; the run goes to
    tmp_path/`folder`.
    """
    return configure_in(workshop, tmp_path)


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """A hub without repositories, in tmp_path/hub, and a token for it."""
    from huggingface_hub import constants

    from tests.hub import TOKEN, hub

    with hub(tmp_path / "hub") as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture(scope="session")
def default_run(workshop, tmp_path_factory) -> Path:
    """The folder of a run of `configured()` that nothing disturbed. Tests read it only. The file
    `printed.txt` beside it holds what the run printed.
    """
    from isotype.tasks.choose import train

    folder = tmp_path_factory.mktemp("default")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train(configure_in(workshop, folder)("run")) == 0
    (folder / "printed.txt").write_text(printed.getvalue(), encoding="utf-8")
    return folder / "run"


@pytest.fixture
def run_copy(default_run, tmp_path) -> Path:
    """A copy of the default run in tmp_path/run, which a test may change and resume."""
    return Path(shutil.copytree(default_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def vlm(tmp_path_factory) -> Callable[[str], Path]:
    """`vlm(family)`: the folder of a tiny vision-language model with its processor, saved when it
    is first asked for.
    """
    from tests.vlms import saved_with_processor

    @cache
    def folder(family: str) -> Path:
        return saved_with_processor(family, tmp_path_factory.mktemp(family))

    return folder


@pytest.fixture
def subject(configured, tmp_path):
    """`subject(folder, **sections)`: a prepared run, as `train` would hand it to the preflight."""
    from isotype.runs.folder import RunFolder
    from isotype.tasks.choose import choose_task
    from tests.api import PreflightSubject, RunSchedule, prepare

    def make(folder_name: str = "run", **sections: Any) -> PreflightSubject:
        loaded = configured(folder_name, **sections)
        folder = tmp_path / folder_name
        folder.mkdir(exist_ok=True)
        task = choose_task(loaded.config)
        prepared = prepare(task, loaded.sources, RunFolder(folder).base)
        plan = RunSchedule.from_config(loaded.config, rows=task.rows, eval_rows=task.eval_rows)
        return PreflightSubject(
            config=loaded.config, task=task, prepared=prepared, schedule=plan, folder=folder
        )

    return make


@pytest.fixture
def with_data():
    """A subject with other rows or facts."""

    from isotype.data.rows import LoadedData

    def change(subject: Any, **changes: Any) -> Any:
        data = subject.task.data
        fields = {
            name: getattr(data, name)
            for name in ("train", "eval", "prompts", "chat_template", "facts")
        }
        subject.task.data = LoadedData(**(fields | changes))
        return replace(subject)

    return change
