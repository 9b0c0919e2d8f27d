"""Loads the result of a run with the run's precision, and chats with the model. For an unfinished
run, the newest complete checkpoint is loaded. Also loads folders of adapters and models that belong
to no run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from transformers import TextStreamer

from ..config.kind import DIFFUSION
from ..config.load import load
from ..config.schema import ModelSection, RunConfig
from ..config.sources import is_folder_name
from ..data.chat import chat_template
from ..data.pictures import BadPicture
from ..data.rows import SamplePrompt
from ..dtypes import format_dtype
from ..environment.hardware import detect
from ..errors import RunError, UsageError
from ..model.adapter_settings import ADAPTER_CONFIG_FILE, read_adapter_config
from ..model.build import build_model, resolve_precision
from ..model.load import Source, load_architecture, load_base, load_tokenizer
from ..model.processor import build_picture_reader
from ..optimize import optimize
from ..optimize.fp32_layers import use_stored_fp32_layers
from ..precision.apply import apply_precision, use_generate_dtype
from ..precision.precision import Precision
from ..precision.quantised_base import quantisation_from_config
from ..runs.checkpoint.atomic_folder import find_damage
from ..runs.checkpoint.snapshot import average_weights, restore_model
from ..runs.checkpoint.store import Checkpoint, CheckpointStore
from ..runs.folder import (
    RESOLVED,
    RunFolder,
    detect_model_folder,
    detect_run_kind,
    locate_base,
    refuse_remote_code,
    require_run,
    split_run_and_adapter,
    with_located_base,
)
from ..tasks.language.result import load_result
from ..tasks.language.sample import generation_config, prompt_inputs
from ..wording import remove_control_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedRun:
    """Contains a loaded model, its tokenizer and its precision. `weights_name` says where its
    weights come from, and is `adapter`, `model` or `checkpoint step_N`.

    source  where the base model comes from
    """

    folder: Path
    config: RunConfig
    precision: Precision
    source: Source
    tokenizer: PreTrainedTokenizerBase
    model: nn.Module
    device: torch.device
    weights_name: str


def load_run(folder: Path, *, as_served: bool = True) -> LoadedRun:
    """Loads a run folder, the folder of a PEFT adapter, or the folder of a model.

    as_served  whether the model multiplies by rounded weights if the run was trained for a served
               format. Without it, the model has the exact weights of base and adapter
    Raises  UsageError for any other folder, and for a run that has neither a result nor a complete
            checkpoint
    """
    kind = detect_model_folder(folder)
    if kind is not None:
        return _load_folder(folder, kind, as_served=as_served)
    folder, intermediate = split_run_and_adapter(folder)
    run = RunFolder(require_run(folder))
    if detect_run_kind(folder) == DIFFUSION:
        raise UsageError(
            f"{folder}: a diffusion run draws pictures, and answers nothing",
            fix=f"isotype sample {folder} 'a prompt'",
        )
    loaded = load(folder / RESOLVED, resolved=True)
    refuse_remote_code(loaded, folder)
    config = with_located_base(loaded.config, folder)
    if config.train.objective == "reward":
        refuse_scores(folder)
    result = find_result(folder, intermediate)
    if config.model.name is not None and (
        result is None or (result / ADAPTER_CONFIG_FILE).is_file()
    ):
        check_base_path(config.model.name, "model.name", folder / RESOLVED)
    device = _run_device(config)
    precision = resolve_precision(config, loaded.sources, detect(config.model.device)).precision
    source = _base_source(config, run)
    model_precision = precision if as_served else precision.but(served="")
    if result is not None:
        tokenizer = load_tokenizer(
            ModelSection(name=str(result), trust_remote_code=source.trust_remote_code)
        )
        model = load_result(result, source, model_precision, config=config.model, device=device)
        use_stored_fp32_layers(model, folder)
        return LoadedRun(
            folder,
            config,
            precision,
            source,
            tokenizer,
            model.eval(),
            device,
            result_name(folder, result),
        )
    # read before the model is built: if the run is still training, it may remove this checkpoint
    # meanwhile
    checkpoint = load_newest(folder)
    tokenizer = load_tokenizer(config.model)
    if config.data.chat_template is not None or config.data.template_kwargs:
        tokenizer.chat_template = chat_template(
            tokenizer, config.data.chat_template, config.data.template_kwargs
        ).text
    model, _ = build_model(config, model_precision, source, tokenizer, device)
    restore_model(model, average_weights(checkpoint.tensors, config.train.beta1))
    use_stored_fp32_layers(model, folder)
    return LoadedRun(
        folder,
        config,
        precision,
        source,
        tokenizer,
        model.eval(),
        device,
        f"checkpoint step_{checkpoint.step}",
    )


def find_result(run: Path, intermediate: Path | None) -> Path | None:
    """Returns the folder of an intermediate adapter or of the run's result. Returns None if there
    is no result. Raises UsageError for a damaged intermediate adapter.

    intermediate  the folder of an intermediate adapter; None means the result
    """
    if intermediate is None:
        return next(
            (
                run.absolute() / name
                for name in ("adapter", "model")
                if find_damage(run / name) is None
            ),
            None,
        )
    reason = find_damage(intermediate) if intermediate.is_dir() else "no such adapter"
    if reason is not None:
        steps = ", ".join(f"step_{step}" for step in RunFolder(run).adapter_steps())
        raise UsageError(
            f"{intermediate}: {reason}",
            fix=f"one of {steps}"
            if steps
            else f"{run}: the result of the run, which wrote no others (run.adapters_every)",
        )
    return intermediate.absolute()


def result_name(run: Path, result: Path) -> str:
    """Returns the name of a result in its run, which is `adapter`, `model` or `adapters/step_N`."""
    return result.relative_to(run.absolute()).as_posix()


def load_newest(folder: Path) -> Checkpoint:
    """Loads the newest complete checkpoint of a run. Raises UsageError if no checkpoint is
    complete."""
    store = CheckpointStore(RunFolder(folder).checkpoints)
    for is_last_try in (False, True):
        step, damage_reasons = store.find_newest_intact()
        try:
            if step is not None:
                return store.load(step)
        except RunError:  # a run that is still training removed it meanwhile, and has a newer one
            if is_last_try:
                raise
    reasons = "; ".join(["neither a result nor a whole checkpoint yet", *damage_reasons])
    raise UsageError(f"{folder}: {reasons}", fix=f"isotype train --resume {folder}")


def refuse_scores(folder: Path) -> NoReturn:
    """Raises UsageError for a reward model."""
    raise UsageError(
        f"{folder}: a reward model gives scores, and answers nothing",
        fix=(
            "transformers.AutoModelForSequenceClassification loads it with num_labels=1; README.md"
            " in its folder has the lines"
        ),
    )


def _load_folder(folder: Path, kind: str, *, as_served: bool) -> LoadedRun:
    """Loads a folder that belongs to no run. The folder contains a model (merged, base, or fully
    fine-tuned), or an adapter whose file names its base model. The precision comes from
    precision.json in the folder, or otherwise from the dtype in the base's config.
    """
    name = str(folder)
    revision = None
    if kind == "adapter":
        file = folder / ADAPTER_CONFIG_FILE
        settings = read_adapter_config(folder, "adapter")
        if settings.get("task_type") == "SEQ_CLS":
            refuse_scores(folder)
        if not settings.get("base_model_name_or_path"):
            raise UsageError(
                f"{file}: base_model_name_or_path is missing: which model is this an adapter of?"
            )
        base = locate_base(settings["base_model_name_or_path"], folder)
        name = check_base_path(base, "base_model_name_or_path", file)
        revision = settings.get("revision")
    config = RunConfig(model=ModelSection(name=name, revision=revision))
    source = Source(name, revision)
    device = _run_device(config)
    precision = _precision_from_file(folder) or _precision_from_config(source)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(ModelSection(name=str(folder) if has_tokenizer else name))
    model: nn.Module
    if kind == "adapter":
        model_precision = precision if as_served else precision.but(served="")
        model = load_result(folder, source, model_precision, config=config.model, device=device)
    else:
        model = load_base(
            source, precision, attention=config.model.attention, device=device, trainable=False
        )
        optimize(model, precision)
        apply_precision(model, precision, device_type=device.type)
    return LoadedRun(folder, config, precision, source, tokenizer, model.eval(), device, kind)


def _run_device(config: RunConfig) -> torch.device:
    return torch.device("cpu" if detect(config.model.device).kind == "cpu" else "cuda")


def check_base_path(name: str, setting: str, file: Path) -> str:
    """Returns the name of the base model. Raises UsageError if the name is a path that does not
    exist. The error message says which setting of which file contains the name.
    """
    if is_folder_name(name) and not Path(name).expanduser().exists():
        fix = f"write the folder where the base is now as {setting} in that file"
        raise UsageError(f"{file}: {setting}: {name} is no longer there", fix=fix)
    return name


def _precision_from_file(folder: Path) -> Precision | None:
    file = folder / "precision.json"
    if not file.is_file():
        return None
    try:
        return Precision.parse(json.loads(file.read_text(encoding="utf-8"))["precision"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file}: not as isotype writes it: {error}",
            fix="remove it: the base's dtype in the run is taken then",
        ) from None


def _precision_from_config(source: Source) -> Precision:
    architecture = load_architecture(ModelSection(name=source.name, revision=source.revision), None)
    packing = quantisation_from_config(architecture)
    if packing is not None:
        # an unsupported packing is refused when the base is loaded
        return Precision.preset(
            "bf16-lora",
            **(
                {}
                if packing.unread_reason or packing.weight_format == "fp4"
                else {"base": packing.weight_format}
            ),
        )
    dtype = getattr(architecture, "dtype", None)
    dtype_name = format_dtype(dtype) if dtype is not None else "fp32"
    return Precision(base=dtype_name, compute=dtype_name, generate=dtype_name, save=dtype_name)


def _base_source(config: RunConfig, run: RunFolder) -> Source:
    if config.model.init == "random" or config.model.add_tokens:
        return Source(str(run.base), rope=config.model.rope_parameters)
    assert config.model.name is not None, "a run with a pretrained base has its name"
    return Source(
        config.model.name,
        config.model.revision,
        config.model.trust_remote_code,
        rope=config.model.rope_parameters,
    )


class _CleanTextStreamer(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(remove_control_characters(text), stream_end)


class Conversation:
    """A chat with a model, which stores the earlier turns. If the tokenizer has no chat template,
    the model continues the given text instead.
    """

    def __init__(
        self,
        run: LoadedRun,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        stream: bool = True,
    ) -> None:
        self.run = run
        self.stream = stream
        self.config = generation_config(
            run.model,
            run.tokenizer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
        )
        self.messages: list[dict[str, Any]] = []
        self.pictures = build_picture_reader(run.config.model, run.config.data, run.tokenizer)
        self.picture_references: list[str] = []  # references of the pictures in all turns

    def clear(self) -> None:
        self.messages.clear()
        self.picture_references.clear()

    def add_pictures(self, files: Sequence[str]) -> None:
        """Adds pictures to the next question. Raises UsageError."""
        if not files:
            return
        if self.pictures is None or not self.run.tokenizer.chat_template:
            raise UsageError(
                f"--image: {self.run.source.name} has no vision tower, or no chat template"
            )
        try:
            self.pending_pictures = [self.pictures.reference(file, Path()) for file in files]
        except BadPicture as error:
            raise UsageError(f"--image: {error}") from None

    pending_pictures: Sequence[str] = ()

    def answer(self, text: str) -> str:
        """Generates and returns the answer to a message, and streams it to stdout. An interrupted
        answer does not change the conversation.
        """
        tokenizer = self.run.tokenizer
        model = self.run.model
        references = [*self.picture_references, *self.pending_pictures]
        content = (
            [{"type": "image"} for _ in self.pending_pictures] + [{"type": "text", "text": text}]
            if self.pending_pictures
            else text
        )
        messages = [*self.messages, {"role": "user", "content": content}]
        if tokenizer.chat_template:
            text = chat_template(tokenizer, None).render(
                messages, generation_prompt=True, location="the question"
            )
        if references and self.pictures is not None:
            text = self.pictures.insert_texts(text, self.pictures.picture_texts(references))
        ids = tuple(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])
        inputs = prompt_inputs(
            SamplePrompt(text, ids, pictures=tuple(references)), self.pictures, self.run.device
        )
        if self.stream:
            streamer = _CleanTextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        else:
            streamer = None
        with torch.no_grad(), use_generate_dtype(model):
            out = cast(Any, model).generate(
                **inputs, generation_config=self.config, streamer=streamer
            )
        answer = str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)).strip()
        if tokenizer.chat_template:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            self.picture_references = references
            self.pending_pictures = ()
        return answer
