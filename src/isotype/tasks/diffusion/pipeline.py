"""Opens a diffusers pipeline in a folder or on the hub. It finds the pipeline's model family and
loads its parts. The parts are loaded one at a time, and only from safetensors files.

For a pipeline on the hub, the settings and tokenizers are downloaded first. The weights of a part
are downloaded when the part is loaded. `isotype plan` does not download weights.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import safe_open

from ...config.kind import GGUF_FIX, GGUF_REFUSAL, MODULAR_FILE, PIPELINE_FILE
from ...config.sources import unknown_key
from ...environment.hardware import out_of_memory_message
from ...environment.hub import is_unreachable, print_status
from ...environment.install import install_command
from ...errors import UsageError
from ...model.load import loading_error
from ...optimize.widened import place_widened
from ...precision.quantised_base import Quantisation, quantisation_from_settings
from ...runs.checkpoint.atomic_folder import find_damage, write_folder
from .families import EDIT_FAMILIES, EXPERT_FAMILIES, FAMILIES, REFUSED, Family
from .file_markers import (
    FileMarkers,
    describe_markers,
    read_markers,
    refuse_unknown_prediction,
    scheduler_changes,
)
from .single_file import (
    find_settings_repository,
    read_model,
    refuse_other_family,
    refuse_other_models,
    widest_dtype,
)

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
_DOWNLOAD_AGAIN = "get the folder again from where it came, or save it anew with save_pretrained"


@dataclass(frozen=True)
class PipelineFolder:
    """A diffusers pipeline.

    path                 the pipeline's folder, with settings and tokenizers
    family               the code for the pipeline's model family
    index                the content of model_index.json
    hub_name             the pipeline's name on the hub, if `path` is a copy in the local cache; in
                         this case, the weights are downloaded when they are needed
    denoiser_settings    the denoiser's configuration for `model.init: random`; otherwise None
    random_weights       for `model.init: random`, the folder with the denoiser's weights
    file                 the checkpoint that contains the denoiser, if it is a single file
    has_encoders         whether this file also contains the text encoders
    has_vae              whether this file also contains the VAE
    vae_path             the file or folder of another VAE, which replaces the VAE of the pipeline
    markers              the markers in the file, which say how it was trained
    scheduler_overrides  the scheduler's settings that the markers or the run's configuration change
    settings_repository  the repository on the hub with the settings for the file, if there is no
                         folder with settings next to the file
    """

    path: Path
    family: Family
    index: dict[str, Any]
    hub_name: str | None = None
    denoiser_settings: Mapping[str, Any] | None = None
    random_weights: Path | None = None
    file: Path | None = None
    has_encoders: bool = False
    has_vae: bool = False
    vae_path: Path | None = None
    markers: FileMarkers = field(default_factory=FileMarkers)
    scheduler_overrides: Mapping[str, Any] = field(default_factory=dict)
    settings_repository: str | None = None

    @classmethod
    def open(
        cls, name: str, *, revision: str | None = None, vae: str | None = None
    ) -> PipelineFolder:
        """Opens a pipeline. Raises UsageError if its model family is not supported or if a part is
        missing.

        name  a folder, a .safetensors file, or a name on the hub
        vae   the file or folder of another VAE
        """
        path = Path(name).expanduser()
        require_diffusers()
        hub_name = None
        file = None
        repository = None
        vae_path = None if vae is None else find_vae(Path(vae).expanduser())
        if path.is_file():
            file = path
            refuse_other_models(file)
            companion = path.with_suffix("")
            if (companion / PIPELINE_FILE).is_file():
                path = companion
            else:
                repository = find_settings_repository(file)
                path = fetch_settings(repository, None)
        elif not path.is_dir():
            path = fetch_settings(name, revision)
            hub_name = name
        if (path / MODULAR_FILE).is_file() and not (path / PIPELINE_FILE).is_file():
            raise UsageError(
                f"model.name: {path}: a modular pipeline of diffusers ({MODULAR_FILE}), such as"
                " FLUX.3 and Anima, is not trained: its folder need not contain its parts, and it"
                " has no settings of the scheduler",
                fix=f"a pipeline with a {PIPELINE_FILE}",
            )
        try:
            index = json.loads((path / PIPELINE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"model.name: {path / PIPELINE_FILE}: {error}", fix=_DOWNLOAD_AGAIN
            ) from None
        class_name = index.get("_class_name") if isinstance(index, dict) else None
        if class_name in REFUSED:
            raise UsageError(
                f"model.name: {path}: {class_name} is not trained: {REFUSED[class_name]}"
            )
        if class_name not in FAMILIES:
            raise UsageError(
                f"model.name: {path}: {class_name} is not supported: expected one of"
                f" {' '.join(FAMILIES)}"
            )
        family = FAMILIES[class_name]()
        folder = cls(path, family, index, hub_name, file=file, vae_path=vae_path)
        required = (
            family.denoiser,
            "vae",
            "scheduler",
            *(
                part
                for part in family.encoder_parts
                if index.get(part, [None, None])[1] is not None
            ),
        )
        for part in required:
            if index.get(part, [None, None])[1] is None or not (path / part).is_dir():
                raise UsageError(
                    f"model.name: {path}: the pipeline has no {part}", fix=_DOWNLOAD_AGAIN
                )
        if file is not None:
            widest_dtype(file)
            markers = read_markers(file)
            folder = replace(folder, markers=markers, settings_repository=repository)
            folder = folder._with_parts_of_file(is_from_hub=repository is not None)
            kinds = {family.denoiser: folder.denoiser_class()}
            if folder.has_vae:
                kinds["vae"] = folder.vae_class()
            refuse_other_family(file, kinds, path, family.pipeline)
        return folder

    def _with_parts_of_file(self, *, is_from_hub: bool) -> PipelineFolder:
        """Decides which parts are read from the single file. These are the parts whose weights are
        not in the folder with the settings. A VAE in a file `NAME.vae.safetensors` next to the
        checkpoint `NAME.safetensors` is used, as A1111 and Forge do.

        is_from_hub  whether the folder with the settings is a copy of a repository on the hub
        """
        assert self.file is not None
        neighbour = self.file.with_suffix(".vae.safetensors")
        vae_path = self.vae_path
        if vae_path is None and neighbour.is_file():
            vae_path = neighbour
        encoders = (part for part in self.family.encoder_parts if part in self.index)
        return replace(
            self,
            vae_path=vae_path,
            has_vae=vae_path is None and (is_from_hub or not self._has_weights("vae")),
            has_encoders=is_from_hub or not any(map(self._has_weights, encoders)),
        )

    def _has_weights(self, part: str) -> bool:
        return any((self.path / part).glob("*.safetensors"))

    def for_pairs(self) -> PipelineFolder:
        """Some pipelines can be trained on captions, or on pairs of pictures (before and after an
        edit). For such a pipeline, returns it with the model family for pairs. Returns other
        pipelines unchanged.
        """
        family = EDIT_FAMILIES.get(self.family.pipeline)
        return self if family is None else replace(self, family=family())

    def for_expert(self, expert: str | None) -> PipelineFolder:
        """Some pipelines have two denoisers, one for high and one for low noise levels. For such a
        pipeline, returns it with the model family for one of them. Returns other pipelines
        unchanged.

        expert  the setting `diffusion.expert`
        Raises  UsageError if the setting is missing, or if it has no effect
        """
        families = EXPERT_FAMILIES.get(self.family.pipeline)
        if families is None or self.index.get("transformer_2", [None, None])[1] is None:
            if expert is not None:
                raise UsageError(
                    f"diffusion.expert: has no effect: {self.path} has one denoiser",
                    fix="remove diffusion.expert",
                )
            return self
        if expert is None:
            raise UsageError(
                f"model.name: {self.path} has two denoisers, and diffusion.expert does not name the"
                " one to train",
                fix=f"diffusion.expert: {' or '.join(families)}",
            )
        boundary = self.index.get("boundary_ratio")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            raise UsageError(
                f"model.name: {self.path / PIPELINE_FILE}: boundary_ratio: {boundary!r}: expected a"
                " number between 0 and 1",
                fix=_DOWNLOAD_AGAIN,
            )
        return replace(self, family=families[expert]())

    def for_other_expert(self) -> PipelineFolder | None:
        """Returns the pipeline with the model family for its other denoiser, which is not trained.
        Returns None if there is only one denoiser.
        """
        families = EXPERT_FAMILIES.get(self.family.pipeline, {}).values()
        for family in families:
            if (family.denoiser_folder or family.denoiser) == self.family.other_denoiser:
                return replace(self, family=family(), denoiser_settings=None)
        return None

    @property
    def denoiser_part(self) -> str:
        """The name of the denoiser's folder, which is also its key in model_index.json."""
        return self.family.denoiser_folder or self.family.denoiser

    def files(self, part: str) -> list[Path]:
        """Returns the files with the settings and weights of the VAE or of a text encoder."""
        self._fetch(part)
        part_files = [file for file in (self.path / part).rglob("*") if file.is_file()]
        if part == "vae" and self.vae_path is not None:
            if self.vae_path.is_dir():
                return [file for file in self.vae_path.rglob("*") if file.is_file()]
            return [*part_files, self.vae_path]
        if self.file is not None and part in self.parts_outside:
            return [*part_files, self.file]
        return part_files

    def with_markers(self, *, objective: str, shift: Any) -> PipelineFolder:
        """If the pipeline comes from a single file, returns it with the noise schedule with which
        the model in this file was trained. Otherwise returns it unchanged. Raises UsageError if the
        file's markers contradict each other.

        objective, shift  the settings of `diffusion`
        """
        if self.file is None:
            return self
        if not self.markers.prediction and objective == "auto":
            refuse_unknown_prediction(self.file, self.settings_repository)
        scheduler = replace(self, scheduler_overrides={}).config("scheduler")
        changes = scheduler_changes(
            self.markers, scheduler, self.file, objective=objective, shift=shift
        )
        return replace(self, scheduler_overrides=changes)

    def marker_lines(self) -> list[str]:
        """Returns lines about the markers of a single file, for the header."""
        if self.file is None:
            return []
        return describe_markers(
            self.markers, self.scheduler_overrides, self.config("scheduler"), self.file
        )

    def fetch(self) -> None:
        """Downloads all weights if the pipeline is on the hub. Raises UsageError."""
        other_denoisers = EXPERT_FAMILIES.get(self.family.pipeline, {}).values()
        denoisers = {family.denoiser_folder or family.denoiser for family in other_denoisers}
        denoisers = {
            part for part in denoisers if self.index.get(part, [None, None])[1] is not None
        }
        self._fetch(*sorted({self.denoiser_part, *denoisers}), "vae", *self.family.encoder_parts)

    def _fetch(self, *parts: str) -> None:
        if self.hub_name is not None:
            parts_inside = [part for part in parts if part not in self.parts_outside]
            fetch_weights(self.hub_name, self.path, parts_inside)

    def refuse_missing_weights(self) -> None:
        """Raises UsageError if a part of a local folder has no weights in a format that can be
        read.
        """
        if self.hub_name is not None:
            return
        parts = ["vae", *self.family.encoder_parts]
        if self.denoiser_settings is None and self.file is None:
            parts.insert(0, self.denoiser_part)
        for part in parts:
            if part in self.parts_outside:
                continue
            folder = self.path / part
            is_model = (
                folder.is_dir()
                and (folder / "config.json").is_file()
                and self.index.get(part, [None, None])[1] is not None
            )
            if is_model and not any(folder.glob("*.safetensors")):
                is_gguf = any(folder.glob("*.gguf"))
                pickles = sorted(folder.glob("*.bin"))
                if is_gguf:
                    reason = GGUF_REFUSAL
                else:
                    reason = f"no .safetensors{f', and {pickles[0].name} can run code' if pickles else ''}"
                raise UsageError(
                    f"model.name: {folder}: {reason}",
                    fix=GGUF_FIX if is_gguf else _DOWNLOAD_AGAIN,
                )

    def config(self, part: str) -> dict[str, Any]:
        """Returns the configuration of a part. Raises UsageError."""
        if self.denoiser_settings is not None and part == self.denoiser_part:
            return dict(self.denoiser_settings)
        setting = "model.name"
        folder = self.path / part
        if part == "vae" and self.vae_path is not None and self.vae_path.is_dir():
            setting = "model.vae"
            folder = self.vae_path
        file = folder / ("scheduler_config.json" if part == "scheduler" else "config.json")
        try:
            settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{setting}: {file}: {error}", fix=_DOWNLOAD_AGAIN) from None
        return {**settings, **self.scheduler_overrides} if part == "scheduler" else settings

    def clip_length(self) -> int:
        """Returns the number of tokens to which the CLIP tokenizer pads a caption."""
        try:
            settings = json.loads(
                (self.path / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8")
            )
            return int(settings["model_max_length"])
        except (OSError, ValueError, LookupError, TypeError):
            return 77  # the length of CLIP's published tokenizers

    def processor(self, tokenizer: Any) -> Any:
        """Loads the processor that prepares pictures for the text encoder. Raises UsageError."""
        from transformers import AutoConfig

        from ...model.processor import load_processor

        return load_processor(
            str(self.path / "processor"),
            None,
            AutoConfig.from_pretrained(self.path / "text_encoder"),
            tokenizer,
        )

    @property
    def published_quantisation(self) -> Quantisation | None:
        """Returns how the denoiser's files are quantised. Returns None if they are not quantised."""
        is_plain = self.denoiser_settings is not None or self.file is not None
        if is_plain:
            settings = None
        else:
            settings = self.config(self.denoiser_part).get("quantization_config")
        if isinstance(settings, Mapping):
            return quantisation_from_settings(settings)
        return None

    def denoiser_files(self) -> list[Path]:
        """Returns the denoiser's safetensors files. Raises UsageError."""
        self._fetch(self.denoiser_part)
        folder = self.path / self.denoiser_part
        index = folder / f"{WEIGHTS_FILE}.index.json"
        with self._explain_errors(self.denoiser_part):
            if index.is_file():
                names = set(json.loads(index.read_text())["weight_map"].values())
            else:
                names = {WEIGHTS_FILE}
        if missing_files := [name for name in sorted(names) if not (folder / name).is_file()]:
            raise UsageError(f"model.name: {folder} has no {missing_files[0]}", fix=_DOWNLOAD_AGAIN)
        return [folder / name for name in sorted(names)]

    def denoiser_class(self) -> Any:
        import diffusers

        return getattr(diffusers, str(self.index[self.denoiser_part][1]))

    def vae_class(self) -> Any:
        import diffusers

        return getattr(diffusers, self.family.latents.vae)

    def denoiser(self, dtype: torch.dtype) -> Any:
        """Loads the denoiser with its weights. Raises UsageError."""
        with self._explain_errors(self.denoiser_part):
            if self.denoiser_settings is None and self.file is not None:
                return read_model(
                    self.file, self.denoiser_class(), self.path, self.denoiser_part, dtype
                )
            loaded = self.denoiser_class().from_pretrained(
                str(self._denoiser_weights_folder()), dtype=dtype, use_safetensors=True
            )
            self.widen_buffers(loaded)
            return loaded

    def _denoiser_weights_folder(self) -> Path:
        if self.denoiser_settings is None:
            self._fetch(self.denoiser_part)
            return self.path / self.denoiser_part
        assert self.random_weights is not None, "its weights are drawn when the model is built"
        return self.random_weights

    def widen_buffers(self, denoiser: torch.nn.Module) -> None:
        """Reads the floating-point buffers from the files again, in fp32. When a denoiser is loaded
        in a narrower dtype, its buffers are rounded, but tables of positions must stay exact.
        """
        narrow_names = {
            name
            for name, buffer in denoiser.named_buffers()
            if buffer.is_floating_point() and buffer.dtype in (torch.bfloat16, torch.float16)
        }
        if not narrow_names:
            return
        if self.denoiser_settings is None and self.file is not None:
            # `read_model` reads buffers in fp32 for any dtype of the weights
            exact_buffers = dict(self.denoiser(widest_dtype(self.file)).named_buffers())
        else:
            exact_buffers = {}
            for file in self._denoiser_weights_folder().glob("*.safetensors"):
                with safe_open(file, framework="pt") as opened:
                    exact_buffers |= {
                        name: opened.get_tensor(name).float()
                        for name in narrow_names.intersection(opened.keys())
                    }
        for name in narrow_names & exact_buffers.keys():
            module, _, buffer_name = name.rpartition(".")
            denoiser.get_submodule(module)._buffers[buffer_name] = exact_buffers[name]

    def denoiser_outline(self) -> Any:
        """Returns the denoiser on the meta device, without weights."""
        with self._explain_errors(self.denoiser_part), torch.device("meta"):
            return self.denoiser_class().from_config(self.dense_config())

    def dense_config(self) -> dict[str, Any]:
        """Returns the denoiser's configuration, without the settings for quantisation."""
        return {
            key: value
            for key, value in self.config(self.denoiser_part).items()
            if key != "quantization_config"
        }

    def encoder_outlines(self) -> list[Any]:
        """Returns the text encoders on the meta device, without weights."""
        import transformers

        outlines = []
        for part in self.family.encoder_parts:
            encoder_class = getattr(transformers, str(self.index.get(part, [None, None])[1]), None)
            if isinstance(encoder_class, type) and issubclass(
                encoder_class, transformers.PreTrainedModel
            ):
                settings = cast(Any, encoder_class).config_class
                with self._explain_errors(part), torch.device("meta"):
                    outlines.append(encoder_class(settings.from_pretrained(self.path / part)))
        return outlines

    def text_encoders(self, dtype: torch.dtype) -> dict[str, Any]:
        """Loads the text encoders that can be trained. Their weights are frozen. Returns a mapping
        from the name of the part to the text encoder. Raises UsageError.
        """
        pipe = self.pipeline(dtype, vae=None, **{self.family.denoiser: None})
        return {
            part: getattr(pipe, part).eval().requires_grad_(False)
            for part in self.family.trainable_encoders
        }

    def with_random_denoiser(self, settings: Mapping[str, Any] | None) -> PipelineFolder:
        """Returns this pipeline with the configuration of a denoiser that has random weights.

        settings  the configuration; None for the configuration in the folder
        Raises    UsageError if the configuration is for another class, if it has a key that the
                  class does not have, or if the class rejects its values
        """
        if settings is None:
            return replace(self, denoiser_settings=self.dense_config())
        denoiser_class = self.denoiser_class()
        if settings.get("_class_name") != denoiser_class.__name__:
            raise UsageError(
                f"model.config: _class_name: {settings.get('_class_name')}, but the"
                f" {self.denoiser_part}"
                f" of {self.path} is a {denoiser_class.__name__}",
                fix=f"_class_name: {denoiser_class.__name__}, or model.name: a pipeline of that class",
            )
        accepted = [
            name for name in inspect.signature(denoiser_class.__init__).parameters if name != "self"
        ]
        for key in settings:
            if not key.startswith("_") and key not in accepted:
                raise unknown_key("model.config", key, accepted)
        try:
            with torch.device("meta"):
                denoiser_class.from_config(dict(settings))
        except Exception as error:  # a class can raise any exception for unsuitable values
            raise UsageError(
                f"model.config: {denoiser_class.__name__}:"
                f" {str(error).splitlines()[0] or type(error).__name__}"
            ) from error
        return replace(self, denoiser_settings=settings)

    def draw_denoiser(self, folder: Path, *, seed: int) -> PipelineFolder:
        """Returns this pipeline with the randomly initialised denoiser in `folder`. If the folder
        does not contain its weights yet, random weights are generated now.
        """
        if find_damage(folder) is not None:
            torch.manual_seed(seed)
            with self._explain_errors(self.denoiser_part):
                denoiser = self.denoiser_class().from_config(self.config(self.denoiser_part))
            write_folder(folder, denoiser.save_pretrained)
        return replace(self, random_weights=folder)

    def vae(self, dtype: torch.dtype) -> Any:
        """Loads the VAE. Raises UsageError."""
        vae = self._load_vae(dtype)
        place_widened(vae)
        return vae

    def _load_vae(self, dtype: torch.dtype) -> Any:
        vae_class = self.vae_class()
        if self.vae_path is not None:
            with self._explain_errors("vae", f"model.vae: {self.vae_path}"):
                if self.vae_path.is_dir():
                    return vae_class.from_pretrained(
                        self.vae_path, dtype=dtype, use_safetensors=True
                    )
                return read_model(self.vae_path, vae_class, self.path, "vae", dtype)
        self._fetch("vae")
        with self._explain_errors("vae"):
            if self.file is not None and self.has_vae:
                return read_model(self.file, vae_class, self.path, "vae", dtype)
            return vae_class.from_pretrained(
                self.path, subfolder="vae", dtype=dtype, use_safetensors=True
            )

    def pipeline(self, dtype: torch.dtype, **parts: Any) -> Any:
        """Builds the pipeline. The parts in `parts` replace the parts of the folder that have the
        same names. A part that is not needed is None.
        """
        import diffusers

        self._fetch(*(part for part in self.family.encoder_parts if part not in parts))
        parts = {
            **dict.fromkeys(name for name in self.family.unneeded_parts if name in self.index),
            **parts,
        }
        pipeline_class = getattr(diffusers, self.family.pipeline)
        with self._explain_errors("pipeline"):
            if self.has_encoders:
                pipe = pipeline_class.from_single_file(
                    str(self.file),
                    config=str(self.path),
                    local_files_only=True,
                    dtype=dtype,
                    **parts,
                )
                # diffusers leaves weights that the file lacks on the meta device
                for part in self.family.encoder_parts:
                    encoder = getattr(pipe, part, None)
                    for name, tensor in (
                        encoder.named_parameters() if isinstance(encoder, torch.nn.Module) else ()
                    ):
                        if tensor.is_meta:
                            raise UsageError(
                                f"model.name: {self.file}: it does not have {name} of the {part}",
                                fix=_DOWNLOAD_AGAIN,
                            )
            else:
                pipe = pipeline_class.from_pretrained(
                    self.path, dtype=dtype, use_safetensors=True, **parts
                )
        if self.scheduler_overrides:
            settings = self.config("scheduler")
            pipe.scheduler = getattr(diffusers, settings["_class_name"]).from_config(settings)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def pipeline_for_sampling(
        self,
        denoiser: Any,
        vae: Any,
        encoders: Mapping[str, Any] = MappingProxyType({}),
        other_denoiser: Any = None,
    ) -> Any:
        """Builds the pipeline for a denoiser that is already loaded. The pipeline contains only the
        text encoders that are in `encoders`.

        other_denoiser  the denoiser of `for_other_expert`; None for a pipeline with only one
                        denoiser, or to use the pipeline only for loading a LoRA
        """
        parts = {**dict.fromkeys(self.family.encoder_parts), **encoders, "vae": vae}
        if other_denoiser is None:
            parts[self.family.denoiser] = denoiser
        else:
            parts[self.denoiser_part] = denoiser
            parts[self.family.other_denoiser] = other_denoiser
        return self.pipeline(torch.float32, **parts)

    @property
    def parts_outside(self) -> tuple[str, ...]:
        """The parts, without the denoiser, whose weights are not in the pipeline's folder."""
        has_other_vae = self.has_vae or self.vae_path is not None
        parts = ["vae"] if has_other_vae else []
        return (*parts, *(self.family.encoder_parts if self.has_encoders else ()))

    def save_other_parts(self, folder: Path) -> None:
        """Saves the parts whose weights are not in the pipeline's folder. Each is saved in a
        subfolder of `folder`, in the dtype that it has in its file. Also saves the scheduler's
        settings if they were changed.
        """
        if self.scheduler_overrides:
            self._save_scheduler(folder)
        if "vae" in self.parts_outside:
            source = self.vae_path or self.file
            assert source is not None
            weights = next(source.glob("*.safetensors")) if source.is_dir() else source
            self.vae(widest_dtype(weights)).save_pretrained(folder / "vae")
        if self.file is None or not self.has_encoders:
            return
        pipe = self.pipeline(widest_dtype(self.file), vae=None, **{self.family.denoiser: None})
        for part in self.family.encoder_parts:
            if isinstance(getattr(pipe, part, None), torch.nn.Module):
                getattr(pipe, part).save_pretrained(folder / part)

    def _save_scheduler(self, folder: Path) -> None:
        settings = self.config("scheduler")
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "scheduler/scheduler_config.json").write_text(text, encoding="utf-8")
        index = {**self.index, "scheduler": ["diffusers", settings["_class_name"]]}
        text = json.dumps(index, indent=2) + "\n"
        (folder / PIPELINE_FILE).write_text(text, encoding="utf-8")

    @contextmanager
    def _explain_errors(self, part: str, label: str | None = None) -> Iterator[None]:
        from ...training.console import silence_library_warnings

        try:
            with silence_library_warnings():
                yield
        except UsageError:
            raise
        except Exception as error:  # a damaged or malicious file can raise any exception
            if out_of_memory_message(error) is not None:
                raise
            message = next(
                (line.strip() for line in str(error).splitlines() if line.strip()),
                type(error).__name__,
            )
            label = label or f"model.name: {self.file or self.path}"
            raise UsageError(f"{label}: {part}: {message[:300]}", fix=_DOWNLOAD_AGAIN) from error


def find_vae(path: Path) -> Path:
    """Returns the file or folder with the weights of a VAE that `model.vae` names. In a pipeline's
    folder this is its subfolder `vae`. Raises UsageError.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return path
    folder = path / "vae" if (path / PIPELINE_FILE).is_file() else path
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    reason = "no .safetensors file, and no folder with a config.json and a .safetensors file"
    raise UsageError(
        f"model.vae: {path}: {reason}", fix="download the VAE, and give its file or folder"
    )


def require_diffusers() -> None:
    """Raises UsageError if diffusers or Pillow is not installed. The message contains the command
    that installs them.
    """
    try:
        import diffusers
        import PIL  # noqa: F401
    except ImportError:
        raise UsageError(
            "a diffusion run needs diffusers and Pillow", fix=install_command("diffusion")
        ) from None
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()


SETTINGS_PATTERNS = ["*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja"]
# files with the same weights in another dtype or form, which are not downloaded
VARIANT_PATTERNS = ["*.fp16*", "*.bf16*", "*.non_ema*", "*.ema*"]


def fetch_settings(name: str, revision: str | None) -> Path:
    """Downloads a pipeline's settings and tokenizers. Returns their folder in the local cache.
    Raises UsageError.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    is_unreachable()
    try:
        hf_hub_download(name, PIPELINE_FILE, revision=revision)
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(SETTINGS_PATTERNS))
        )
    except Exception as error:  # whatever the hub's library raises
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UsageError(
                f"model.name: {name}: no {PIPELINE_FILE} on the hub: not a pipeline of diffusers, or"
                " a modular one, which is not trained"
            ) from error
        raise loading_error(name, "model.name:", error) from error


def fetch_weights(name: str, folder: Path, parts: Sequence[str]) -> None:
    """Downloads the safetensors files of the given parts to `folder`, which is a snapshot in the
    cache. Files that already exist there are not downloaded. Raises UsageError.
    """
    from huggingface_hub import constants, snapshot_download

    if not parts or is_unreachable():
        return  # if a file is missing, loading it raises an error
    if not all(
        any((folder / part).glob("*.safetensors"))
        for part in parts
        if (folder / part / "config.json").is_file()
    ):
        print_status(
            f"{name}: {', '.join(parts)}: fetched from the hub, once; it is kept in"
            f" {constants.HF_HUB_CACHE}"
        )
    try:
        snapshot_download(
            name,
            revision=folder.name,
            allow_patterns=[f"{part}/*.safetensors" for part in parts],
            ignore_patterns=VARIANT_PATTERNS,
        )
    except Exception as error:  # whatever the hub's library raises
        raise loading_error(name, "model.name:", error) from error
