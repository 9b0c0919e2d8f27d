"""Good files, of which hostile ones are made: rows of every format, a whole run, its weights, and the settings that read them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .workshop import Workshop

ROWS: tuple[Any, ...] = (
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"},
                  {"role": "assistant", "content": "Yes."}], "id": 3},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sun."}], "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"prompt": "One and one is", "completion": " two."},
    {"text": "A line of text that is learnt whole."},
)  # fmt: skip


@dataclass(frozen=True)
class Material:
    """Good files to begin with, and the settings that read them."""

    workshop: Workshop

    @cached_property
    def run(self) -> Path:
        return self.workshop.undisturbed()[0]

    @cached_property
    def config(self) -> dict[str, Any]:
        from isotype.config.load import load

        return load(self.run / "resolved.yaml").config.model_dump()

    @cached_property
    def tokenizer(self) -> Any:
        from isotype.config.schema import ModelSection
        from isotype.model.load import load_tokenizer

        return load_tokenizer(ModelSection(name=str(self.workshop.base)))

    @cached_property
    def small_weights(self) -> tuple[dict[str, Any], bytes]:
        """The header and the bytes of a whole file with three tensors and a note."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for i, (dtype, shape) in enumerate((("F32", [4, 2]), ("BF16", [3]), ("U8", []))):
            header[f"model.layers.{i}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": ([0, 32], [32, 38], [38, 39])[i]}
        return header, bytes(range(39))

    def model(self) -> Any:
        """A fresh base on which the run's adapter fits."""
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.workshop.base))
