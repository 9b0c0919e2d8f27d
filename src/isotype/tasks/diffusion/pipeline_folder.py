"""A diffusers pipeline's folder: its family, its parts, and loading them one at a time, in safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...config.kind import PIPELINE_FILE
from ...errors import UsageError
from .families import FAMILIES, Family

_AGAIN = "get the folder again from where it came, or save it anew with save_pretrained"


@dataclass(frozen=True)
class PipelineFolder:
    """index  the content of model_index.json"""

    path: Path
    family: Family
    index: dict[str, Any]

    @classmethod
    def open(cls, name: str) -> PipelineFolder:
        """Raises  UsageError for a pipeline of another family, or one that lacks a part"""
        path = Path(name).expanduser()
        require_diffusers()
        if not path.is_dir():
            raise UsageError(f"model.name: {name}: a diffusion model is taken from a folder", fix=f"hf download {name} --local-dir FOLDER")
        try:
            index = json.loads((path / PIPELINE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"model.name: {path / PIPELINE_FILE}: {error}", fix=_AGAIN) from None
        kind = index.get("_class_name") if isinstance(index, dict) else None
        if kind not in FAMILIES:
            raise UsageError(f"model.name: {path}: {kind} is not supported: expected one of {' '.join(FAMILIES)}")
        family = FAMILIES[kind]()
        folder = cls(path, family, index)
        wanted = (family.denoiser, "vae", "scheduler", *(part for part in family.encoders if index.get(part, [None, None])[1] is not None))
        for part in wanted:
            if index.get(part, [None, None])[1] is None or not (path / part).is_dir():
                raise UsageError(f"model.name: {path}: the pipeline has no {part}", fix=_AGAIN)
        return folder

    @property
    def denoiser_part(self) -> str:
        """The denoiser's folder, its name in model_index.json, and the pipeline's attribute."""
        return self.family.denoiser

    def files(self, part: str) -> list[Path]:
        return [p for p in (self.path / part).rglob("*") if p.is_file()]

    def config(self, part: str) -> dict[str, Any]:
        """The part's own configuration. Raises UsageError."""
        file = self.path / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError) as error:
            raise UsageError(f"model.name: {file}: {error}", fix=_AGAIN) from None

    def clip_length(self) -> int:
        """Tokens that the CLIP tokenizer pads a caption to."""
        try:
            told = json.loads((self.path / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
            return int(told["model_max_length"])
        except (OSError, ValueError, LookupError, TypeError):
            return 77  # CLIP's own

    def denoiser_class(self) -> Any:
        import diffusers

        return getattr(diffusers, str(self.index[self.denoiser_part][1]))

    def denoiser(self, dtype: torch.dtype) -> Any:
        """The denoiser with its weights. Raises UsageError."""
        with self._explained(self.denoiser_part):
            loaded = self.denoiser_class().from_pretrained(self.path, subfolder=self.denoiser_part, dtype=dtype, use_safetensors=True)
            widen_buffers(loaded, self.path / self.denoiser_part)
            return loaded

    def denoiser_outline(self) -> Any:
        """The denoiser without weights: on the meta device."""
        with self._explained(self.denoiser_part), torch.device("meta"):
            kind = self.denoiser_class()
            return kind.from_config(kind.load_config(self.path, subfolder=self.denoiser_part))

    def vae(self, dtype: torch.dtype) -> Any:
        from diffusers import AutoencoderKL

        with self._explained("vae"):
            return AutoencoderKL.from_pretrained(self.path, subfolder="vae", dtype=dtype, use_safetensors=True)

    def pipeline(self, dtype: torch.dtype, **parts: Any) -> Any:
        """The pipeline with `parts` instead of those in the folder; None for parts that are not needed."""
        import diffusers

        with self._explained("pipeline"):
            made = getattr(diffusers, self.family.pipeline).from_pretrained(self.path, dtype=dtype, use_safetensors=True, **parts)
        made.set_progress_bar_config(disable=True)
        return made

    def pipeline_for_sampling(self, denoiser: Any, vae: Any) -> Any:
        """The pipeline around a denoiser, without its text encoders."""
        return self.pipeline(torch.float32, **dict.fromkeys(self.family.encoders), vae=vae, **{self.denoiser_part: denoiser})

    @contextmanager
    def _explained(self, part: str) -> Iterator[None]:
        from ...training.quiet import without_warnings

        try:
            with without_warnings():
                yield
        except (UsageError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a damaged or malicious file can raise any exception
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UsageError(f"model.name: {self.path}: {part}: {said[:300]}", fix=_AGAIN) from error


def widen_buffers(model: torch.nn.Module, folder: Path) -> None:
    """Puts floating buffers back in fp32, with the numbers of the folder's files: loading in a narrower dtype rounds them, and tables of
    positions must stay exact."""
    narrow = {name for name, b in model.named_buffers() if b.is_floating_point() and b.dtype in (torch.bfloat16, torch.float16)}
    for file in folder.glob("*.safetensors") if narrow else ():
        with safe_open(file, framework="pt") as opened:
            for name in narrow.intersection(opened.keys()):
                module, _, last = name.rpartition(".")
                model.get_submodule(module)._buffers[last] = opened.get_tensor(name).float()


def require_diffusers() -> None:
    """Raises  UsageError with the command that installs it."""
    try:
        import diffusers
        import PIL  # noqa: F401
    except ImportError:
        raise UsageError("a diffusion run needs diffusers and Pillow", fix="pip install 'isotype[diffusion]'") from None
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
