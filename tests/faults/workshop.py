"""A tiny model, a little data, and undisturbed runs: what every fault is done to."""

import itertools
import json
import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from isotype.errors import RunError

from .child import Ended, elsewhere, on_operation, run
from .trial import differences

STEPS, EVERY = 12, 3  # checkpoints at 3, 6, 9 and 12

# every way in which a run keeps state: optimizer, dropout's generator, stochastic rounding, loss
# scale, 8-bit states
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "fp32 LoRA, dropout": {"precision": {"preset": "fp32"}, "adapter": {"kind": "lora", "r": 4, "dropout": 0.1}},
    "bf16-pure, stochastic rounding, no evaluation": {
        "precision": {"preset": "bf16-pure"}, "adapter": {"kind": "none"}, "data": {"eval_split": 0.0}, "run": {"save_every": EVERY},
    },
    "fp16-mixed, loss scaling": {"precision": {"preset": "fp16-mixed"}, "adapter": {"kind": "none"}},
    "bf16-lora, early stopping": {"precision": {"preset": "bf16-lora"}, "adapter": {"kind": "lora", "r": 4}, "train": {"patience": 9}},
}  # fmt: skip
FIRST, SECOND, *_ = RECIPES


class Workshop:
    """Everything lies under `folder`; runs are made by the real command line in other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._undisturbed: dict[str, tuple[Path, Ended]] = {}
        self._operations: dict[str, int] = {}

    @cached_property
    def base(self) -> Path:
        """A Llama of about 120,000 parameters and its tokenizer."""
        if elsewhere(self._make_base) != 0:
            raise RunError("the model for the trials could not be made")
        return self.folder / "base"

    def _make_base(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tests.api import quiet_libraries, small_config, train_tokenizer

        quiet_libraries()
        texts = [
            f"{row['messages'][0]['content']} {row['messages'][1]['content']}" for row in _rows()
        ]
        tokenizer = train_tokenizer(texts * 2, vocabulary=320)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small_config(tokenizer, hidden=64, layers=2, positions=128), dtype=torch.float32
        )
        model.save_pretrained(self.folder / "base")
        tokenizer.save_pretrained(str(self.folder / "base"))

    @cached_property
    def data(self) -> Path:
        file = self.folder / "chats.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in _rows()), encoding="utf-8")
        return file

    def new_folder(self) -> Path:
        """A path that is not there yet."""
        return self.folder / f"run_{next(self._numbers)}"

    def log(self) -> Path:
        # forks count on their own
        return self.folder / "logs" / f"{os.getpid()}_{next(self._numbers)}.txt"

    def settings(self, folder: Path, recipe: str = FIRST, **sections: dict[str, Any]) -> Path:
        """Writes a configuration whose run goes to `folder` and returns its path."""
        config: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.base), "device": "cpu"},
            "data": {"train": str(self.data), "eval_split": 0.1, "max_length": 64},
            "train": {"steps": STEPS, "batch_size": 4, "learning_rate": 1e-3, "eval_every": EVERY},
            "run": {
                "folder": str(folder),
                "sample_tokens": 4,
                "report": False,
                "samples": ["How much is 1 plus 1?"],
            },
        }
        for more in (RECIPES[recipe], sections):
            for section, values in more.items():
                config[section] = config.get(section, {}) | values
        file = self.folder / f"{folder.name}.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return file

    def undisturbed(self, recipe: str = FIRST) -> tuple[Path, Ended]:
        """The run that nothing happens to, made once. Raises RunError when even that fails."""
        if recipe not in self._undisturbed:
            folder = self.new_folder()
            ended = run(["train", str(self.settings(folder, recipe))], self.log())
            if ended.status != 0:
                raise RunError(
                    f"the undisturbed run ({recipe}) ended with {ended.status}: {ended.output[-2000:]}"
                )
            self._undisturbed[recipe] = (folder, ended)
        return self._undisturbed[recipe]

    def unfinished(self, recipe: str = FIRST) -> Path:
        """A copy of the undisturbed run, with its checkpoints and without its result."""
        folder = self.new_folder()
        shutil.copytree(self.undisturbed(recipe)[0], folder)
        for name in ("adapter", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "result.json").unlink()
        return folder

    def go_on(self, folder: Path, settings: Path | None = None) -> list[str]:
        """The command that a user gives after something happened: resume where there is a run, else
        the same command again.
        """
        if (folder / "resolved.yaml").is_file() or settings is None:
            return ["train", "--resume", str(folder)]
        return ["train", str(settings)]

    def operations(self, recipe: str = FIRST) -> int:
        """How often an undisturbed run of `recipe` changes files."""
        if recipe not in self._operations:
            folder, counted = self.new_folder(), self.log()
            with counted.open("wb", buffering=0) as file:
                settings = self.settings(folder, recipe)
                run(
                    ["train", str(settings)],
                    self.log(),
                    before=on_operation(lambda: file.write(b".")),
                )
            self._operations[recipe] = counted.stat().st_size
            shutil.rmtree(folder)
        return self._operations[recipe]

    def ends_as_undisturbed(
        self, folder: Path, undisturbed: Path, settings: Path | None = None
    ) -> tuple[Ended, list[str], list[str]]:
        """The run that goes on, what is wrong with that, and with its end; a folder that ended well
        is removed.
        """
        ended = run(self.go_on(folder, settings), self.log())
        if ended.status != 0:
            return ended, [f"did not go on ({folder}): {ended.output[-1500:]}"], []
        if not (different := differences(folder, undisturbed)):
            shutil.rmtree(folder)
        return ended, [], different


def _rows() -> list[dict[str, Any]]:
    pairs = [
        (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
        for a in range(4)
        for b in range(12)
    ]
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
