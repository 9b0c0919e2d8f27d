"""Implements `training.task.Task` for fine-tuning of a causal language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...config.schema import RunConfig
from ...data.bad_rows import BAD_ROWS_FILE as BAD_ROWS
from ...data.bad_rows import BadRow, BadRowFile
from ...data.facts import source_lines
from ...data.load import load_data
from ...data.prompts import run_prompts
from ...data.rows import LoadedData, SamplePrompt, example_rows, row_lengths
from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...errors import UsageError
from ...model.adapter import check_lora_branch, save_adapter
from ...model.architecture import SCORE, auto_class
from ...model.build import build_model
from ...model.card import write_card
from ...model.gguf import read_architecture
from ...model.load import Source, base_source, load_architecture, load_tokenizer
from ...model.processor import build_picture_reader, copy_files, has_vision
from ...model.served import check_served
from ...model.targets import has_stack, is_stack
from ...model.tokens import check_vocabulary
from ...optimize import Manifest
from ...precision.apply import inner_model, is_quantised
from ...precision.parts import Part
from ...precision.precision import Precision
from ...precision.quantised_base import check_base, check_share, quantisation_from_config
from ...precision.vision import vision_parts
from ...runs.folder import RunFolder
from ...training.console import silence_library_warnings
from ...training.memory.blocks import apply_offload
from ...training.memory.plan import max_step_bytes
from ...training.memory.recomputation import checkpointable_layers
from ...training.task import (
    Batch,
    Evaluation,
    HeaderRows,
    MeanSizes,
    MetricNames,
    ModelOutline,
    StepOutline,
    evaluation_batch_size,
)
from ...wording import pluralise
from .batches import longest_rows, mean_longest, padded_length, shortest_rows, split_by_pictures
from .distil import Distil
from .kto import Kto
from .objective import NextToken, Objective
from .outline import outline_largest_step, outline_model
from .preference import Preference, Reward
from .result import evaluate, load_result, save_model
from .sample import Sample, batch_duration, batch_prompts, sample

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


OBJECTIVES: Mapping[str, Callable[[RunConfig], Objective]] = {
    "sft": NextToken,
    "kto": Kto,
    "reward": Reward,
    "distil": Distil,
}  # all other objectives learn from pairs, by `Preference`
# the rows among which a small evaluation searches its rows
FIRST_ROWS = 16
# tokens of a shortened sample; generation uses the cache from the second token on
REHEARSED_TOKENS = 4


class LanguageTask:
    """The task of a language run. The objective defines its rows, batches and loss."""

    kind = "language"

    tokenizer: PreTrainedTokenizerBase
    data: LoadedData
    prompts: Sequence[SamplePrompt]
    source: Source
    # the device of the model that was built or outlined last; rows are padded for it
    device_type = "cpu"

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if config.train.objective == "reward" and config.adapter.kind != "none":
            full_modules = [*config.adapter.modules_to_save, SCORE]
            self.config = config = config.model_copy(
                update={
                    "adapter": config.adapter.model_copy(update={"modules_to_save": full_modules})
                }
            )
        self.objective: Objective = OBJECTIVES.get(config.train.objective, Preference)(config)
        self.feed = self.objective.feed
        self.largest_rows = self.objective.largest_rows
        self.checks = self.objective.checks
        self.prepare_step = self.objective.prepare_step
        self.loss_sum = self.objective.loss_sum

    @property
    def metric_names(self) -> MetricNames:
        return self.objective.metric_names

    @property
    def roles(self) -> Mapping[str, str]:
        if has_vision(self.config.model):
            return {"vision": "compute"}
        return {}

    def observed_dtypes(self) -> Iterable[tuple[str, str, str]]:
        pictures = self.data.pictures
        if pictures is None:
            return []
        return [("vision", name, dtype) for name, dtype in pictures.floating_dtypes.items()]

    @property
    def base_name(self) -> str:
        return self.source.name

    # before step 1

    def check(self, precision: Precision) -> None:
        check_lora_branch(self.config, precision)
        check_served(self.config, precision)
        if self.config.precision.vision is not None and not self.roles:
            raise UsageError(
                "precision.vision has no effect: the model has no vision tower", fix="leave it out"
            )
        self.objective.check()

    def load_data(self) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        pictures = build_picture_reader(config.model, config.data, self.tokenizer)
        held_out_seed = config.data.eval_seed
        if held_out_seed is None:
            held_out_seed = config.train.seed
        self.data = data = load_data(
            config.data,
            self.tokenizer,
            seed=held_out_seed,
            objective_format=self.objective.format,
            pictures=pictures,
        )
        if data.pictures is None and (config.data.min_pixels or config.data.max_pixels):
            raise UsageError(
                "data.min_pixels, data.max_pixels: no row has a picture", fix="leave them out"
            )
        self.objective.set_data(data)
        if data.chat_template is not None:
            self.tokenizer.chat_template = data.chat_template
        if self.objective.has_score_head:
            self.prompts = []
        else:
            self.prompts = run_prompts(config.run, data, self.tokenizer)

    def encode(self, device: torch.device) -> None:
        """Does nothing, because a language run does not encode its data with another model."""

    def build_model(
        self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        config = self.config
        self.device_type = device.type
        if config.adapter.kind == "none":
            dtype = precision.trainable
        else:
            dtype = precision.unquantised
        source = base_source(
            config.model, self.tokenizer, folder=folder, seed=config.train.seed, dtype=dtype
        )
        self.source = replace(source, has_score_head=self.objective.has_score_head)
        if self.data.pictures is not None:
            self.data.pictures.dtype = to_torch(precision.vision)
        model, manifest = build_model(
            config,
            precision,
            self.source,
            self.tokenizer,
            device,
            part,
            has_pictures=self.data.pictures is not None,
        )
        self.objective.check_model(model)
        manifest.notes += self.objective.load_other_models(self.tokenizer, precision, device).notes
        return apply_offload(model, config.model.offload, device), manifest

    @property
    def rows(self) -> int:
        return len(self.objective.train)

    def fingerprints(self) -> dict[str, str]:
        return self.data.fingerprints()

    @property
    def eval_rows(self) -> int:
        return len(self.objective.eval)

    def count_base_weights(self) -> int | None:
        section = self.config.model
        if section.name is None or section.init == "random":
            return None
        # any error is reported when the model is loaded
        with suppress(Exception), torch.device("meta"), silence_library_warnings():
            architecture = read_architecture(
                section.name, section.revision, trust_remote_code=section.trust_remote_code
            )
            base: nn.Module = auto_class(architecture).from_config(
                architecture, trust_remote_code=section.trust_remote_code
            )
            return sum(parameter.numel() for parameter in base.parameters())
        return None

    def architecture(self) -> PretrainedConfig:
        return load_architecture(
            self.config.model,
            self.tokenizer,
            has_score_head=self.config.train.objective == "reward",
        )

    def outline_model(self, precision: Precision, *, device_type: str) -> ModelOutline:
        self.device_type = device_type
        has_pictures = self.data.pictures is not None
        return outline_model(
            self.architecture(),
            self.config,
            precision,
            device_type=device_type,
            has_pictures=has_pictures,
        )

    def outline_largest_step(self, precision: Precision) -> StepOutline:
        step = outline_largest_step(
            self.config,
            precision,
            self.data,
            self.prompts,
            device_type=self.device_type,
            objective=self.objective,
        )

        def block_flops(model: Any) -> list[float]:
            tokens = step.rows * step.length
            config = inner_model(model).config
            return [
                tokens * flops_per_token(layer, config) / 2
                for layer in checkpointable_layers(model)
            ]

        def head_flops(model: Any) -> float:
            inner: Any = inner_model(model)
            head = inner.get_output_embeddings()
            if head is None:
                return 0.0
            return step.rows * step.length * flops_per_token(head, inner.config) / 2

        return replace(
            step,
            other_model_bytes=self.objective.load_other_models(
                self.tokenizer, precision, None
            ).bytes,
            block_flops=block_flops,
            head_flops=head_flops,
        )

    def max_step_bytes(self, model: nn.Module, precision: Precision) -> int:
        length = len(self.data.longest(1)[0].input_ids)
        rows = {"batch_size": self.config.train.batch_size * self.objective.answers_per_row}
        train = self.config.train.model_copy(update=rows)
        return max_step_bytes(
            model, train, precision, length=padded_length(length, self.device_type)
        )

    # training

    def prepare_training(
        self, model: nn.Module, device: torch.device, folder: Path, world: World, *, dtype: str
    ) -> HeaderRows:
        if self.data.stream is not None:
            self.data.stream.processes = world
        return self.objective.prepare_training(
            model, device, folder, world, pad_id=self.tokenizer.pad_token_id, dtype=dtype
        )

    def split_by_shape(self, rows: Sequence[Any]) -> list[Sequence[Any]]:
        return split_by_pictures(rows)  # rows of different lengths are padded

    def collate(self, rows: Sequence[Any]) -> Batch:
        return self.objective.collate(
            rows, pad_id=self.tokenizer.pad_token_id, device_type=self.device_type
        )

    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        dtype: str,
        most: int | None = None,
        stride: int = 1,
        world: World = ALONE,
    ) -> Evaluation:
        rows = self.objective.eval
        sets = self.data.eval_sets
        if most is not None:
            short_rows = shortest_rows((rows or self.objective.train)[:FIRST_ROWS], most)
            return self._evaluate(model, short_rows, device, dtype, world)
        if not sets:
            return self._evaluate(
                model, (rows or self.objective.train)[::stride], device, dtype, world
            )
        evaluations: dict[str, Evaluation] = {}
        start = 0
        for name, count in sets.items():
            end = start + count // self.objective.answers_per_row
            evaluations[name], start = (
                self._evaluate(model, rows[start:end:stride], device, dtype, world),
                end,
            )
        return Evaluation.combine(evaluations)

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        longest = longest_rows(self.objective.eval, evaluation_batch_size(self.config.train))
        if longest:
            return self._evaluate(model, longest, device, dtype)
        return None

    def _evaluate(
        self,
        model: nn.Module,
        rows: Sequence[Any],
        device: torch.device,
        dtype: str,
        world: World = ALONE,
    ) -> Evaluation:
        size = evaluation_batch_size(self.config.train)
        pad_id = self.tokenizer.pad_token_id
        return evaluate(
            model,
            rows,
            batch_size=size,
            pad_id=pad_id,
            device=device,
            loss_dtype=dtype,
            world=world,
            objective=self.objective,
        )

    @property
    def mean_sizes(self) -> MeanSizes:
        batch_rows = self.config.train.batch_size * self.objective.answers_per_row
        train_length = mean_longest(row_lengths(self.data.train), batch_rows)
        # evaluation rows are sorted by length, so their batches have almost no padding
        eval_length = mean_longest(row_lengths(self.data.eval), 1)
        largest, train_padded, eval_padded = (
            padded_length(math.ceil(length), self.device_type)
            for length in (len(self.data.longest(1)[0].input_ids), train_length, eval_length)
        )
        return MeanSizes(min(1.0, train_padded / largest), eval_padded / largest)

    @property
    def samples(self) -> int:
        return len(self.prompts)

    @property
    def sample_ratio(self) -> float | None:
        if self.sample_forwards is None:
            return None
        return self.sample_forwards / min(REHEARSED_TOKENS, self.config.run.sample_tokens)

    @property
    def sample_forwards(self) -> float | None:
        if not self.prompts:
            return None
        rounds = sum(batch_duration(len(batch)) for batch in batch_prompts(self.prompts))
        return rounds * self.config.run.sample_tokens

    def sample(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        is_shortened: bool = False,
        world: World = ALONE,
    ) -> list[Sample]:
        prompts = self.prompts
        tokens = self.config.run.sample_tokens
        if is_shortened:
            # a prompt with pictures also runs the vision tower
            prompts = sorted(prompts, key=lambda prompt: not prompt.pictures)[:1]
            tokens = min(REHEARSED_TOKENS, tokens)
        return sample(
            model,
            self.tokenizer,
            prompts,
            max_new_tokens=tokens,
            min_new_tokens=tokens if is_shortened else None,
            device=device,
            world=world,
            pictures=self.data.pictures,
        )

    # the result

    def save(self, model: Any, folder: Path, precision: Precision, *, step: int) -> None:
        if self.config.adapter.kind != "none":
            save_adapter(model, folder, precision)
        else:
            save_model(model, folder, precision)
        self.tokenizer.save_pretrained(str(folder))
        if vision_parts(inner_model(model)) is not None:
            copy_files(self.source.name, self.source.revision, folder)

    def write_card(
        self,
        model: Any,
        folder: Path,
        precision: Precision,
        *,
        step: int,
        observed: Mapping[str, Mapping[str, int]],
    ) -> None:
        write_card(
            folder,
            model,
            base=self.base_name,
            data=self.header()[0][1],
            step=step,
            precision=precision,
            observed=observed,
            is_adapter=self.config.adapter.kind != "none",
            has_score_head=self.config.train.objective == "reward",
        )

    def reload(
        self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None
    ) -> nn.Module:
        return load_result(
            folder,
            self.source,
            precision,
            config=self.config.model,
            device=device,
            part=part,
            adapter=self.config.adapter,
        )

    # what is shown and recorded

    def header(self) -> HeaderRows:
        facts = self.data.facts
        data = self.data
        row = self.metric_names.row_noun
        if data.stream is not None:
            rows = "a stream of training rows"
        else:
            rows = pluralise(self.rows, f"training {row}")
        if data.stream is None and (packing := facts.get("packing")):
            packed_rows = pluralise(len(data.train), "packed one")
            rows = f"{pluralise(packing['rows'], 'training row')} in {packed_rows}"
        line = f"{rows}, {pluralise(self.eval_rows, f'evaluation {row}')}"
        notes = [("", note) for note in facts["notes"]]
        return [("data", line), *notes, *self.objective.describe_example(data, self.tokenizer)]

    def header_details(self) -> HeaderRows:
        return [("data", "\n".join(source_lines(self.data.facts)))]

    def records(self) -> Mapping[str, Any]:
        return {
            "data.json": self.data.facts,
            "examples.json": {
                "examples": example_rows(self.data.train, self.tokenizer, self.data.pictures)
            },
        }

    def begin(self, folder: Path, *, is_resuming: bool) -> None:
        """Writes the list of the rows that are left out. If the data is a stream, more rows are
        added while the stream is read.
        """
        bad_rows_file = BadRowFile(folder / BAD_ROWS, resuming=is_resuming)
        bad_rows_file.write(self.data.bad_rows)
        if self.data.stream is None:
            return
        stream: dict[str, Any] = self.data.facts["stream"]
        stream["left_out"] = bad_rows_file.count

        def record_bad_rows(rows: Sequence[BadRow]) -> None:
            bad_rows_file.write(rows)
            if stream["left_out"] != bad_rows_file.count:
                stream["left_out"] = bad_rows_file.count
                RunFolder(folder).write_json("data.json", self.data.facts)

        self.data.stream.on_bad_rows = record_bad_rows

    def model_notes(
        self, model_outline: ModelOutline, precision: Precision
    ) -> tuple[str, list[str]]:
        architecture: Any = self.architecture()
        notes = check_base(
            quantisation_from_config(architecture),
            precision,
            self.config.model.name or "model.config",
        )
        get_base_model: Callable[[], PreTrainedModel] | None = getattr(
            model_outline.model, "get_base_model", None
        )
        inner = (
            get_base_model()
            if get_base_model is not None
            else cast("PreTrainedModel", model_outline.model)
        )
        check_vocabulary(inner, self.tokenizer)
        if precision.base == "nf4":
            notes += check_share(
                inner,
                is_allowed=self.config.model.allow_unquantised,
                dtype_name=precision.unquantised,
            )
        notes += self.objective.load_other_models(self.tokenizer, precision, None).notes
        return str(getattr(architecture, "model_type", "model")), notes

    def plan_facts(self) -> dict[str, Any]:
        """Returns the numbers of rows and tokens for `isotype plan`. If rows are packed, the number
        of rows is the number of packed rows. For a stream, only its first rows are counted.
        """
        data = self.data
        return {
            "train_rows": self.rows,
            "eval_rows": self.eval_rows,
            "train_tokens": int(sum(row_lengths(data.train))),
            "supervised_tokens": data.facts["train"]["supervised_tokens"],
            "longest": len(data.longest(1)[0].input_ids),
            "lengths": data.facts["train"]["lengths"],
            "pictures": data.facts.get("pictures"),
            "stream": data.stream is not None,
            "packed_from": data.facts["packing"]["rows"] if data.facts.get("packing") else None,
            "sources": source_lines(data.facts),
            "notes": list(data.facts["notes"]),
        }

    def plan_lines(self) -> list[str]:
        facts = self.plan_facts()
        row = self.metric_names.row_noun
        rows = pluralise(facts["train_rows"], f"training {row}")
        if facts["stream"]:
            rows = f"a stream, begun with {pluralise(facts['train_rows'], 'row')}"
        elif facts["packed_from"]:
            rows += f" packed from {facts['packed_from']:,}"
        evaluation = pluralise(facts["eval_rows"], f"evaluation {row}")
        tokens = pluralise(facts["train_tokens"], "token")
        line = f"{rows}, {tokens}, longest {facts['longest']}; {evaluation}"
        picture_lines = []
        lengths = facts["lengths"]
        # most tokens of a row are those of its pictures
        if facts["pictures"] is not None:
            spread = f"{lengths['median']} tokens in the median, 95% at most {lengths['p95']}"
            rows_with_pictures = (
                f"{pluralise(facts['pictures']['rows'], 'training row')} with pictures"
            )
            picture_lines = [
                f"{rows_with_pictures}; rows have {spread}; the memory plan counts no vision tower"
            ]
        example_lines = []
        for label, text in self.objective.describe_example(self.data, self.tokenizer):
            example_lines += f"{label}: {text}".split("\n")
        return [line, *picture_lines, *facts["sources"], *facts["notes"], *example_lines]


def flops_per_token(model: nn.Module, config: Any) -> float:
    """Returns the number of FLOPs for one token in forward and backward. Only the matrix products
    with weights are counted.

    The matrix product with a weight of M elements needs 2 M FLOPs in forward, and 2 M FLOPs for the
    gradient of its input. If the weight is trained, the weight's gradient needs another 2 M FLOPs.
    Every Linear module of `model` is counted, including those of adapters. If experts are stacked
    in one weight, only the experts that process a token are counted.

    model   a layer, or a model for text
    config  a transformers configuration
    Source  Kaplan et al. 2020, section 2.1, but without the weight gradients of frozen weights
    """
    flops = 0.0
    stacked_experts = {
        name.split(".base_layer")[0]: m for name, m in model.named_modules() if has_stack(m)
    }
    experts_per_token = getattr(config, "num_experts_per_tok", None) or 1
    for name, module in model.named_modules():
        experts = next(
            (
                module.num_experts
                for path, module in stacked_experts.items()
                if name == path or name.startswith(f"{path}.")
            ),
            experts_per_token,
        )
        if isinstance(module, nn.Linear):
            is_trained = module.weight.requires_grad and not is_quantised(module.weight)
            flops += (
                module.in_features
                * module.out_features
                * (6 if is_trained else 4)
                * experts_per_token
                / experts
            )
        elif has_stack(module):
            weights = [p for p in module.parameters(recurse=False) if is_stack(p)]
            flops += (
                sum(
                    getattr(p, "quant_state", p).shape.numel() * (6 if p.requires_grad else 4)
                    for p in weights
                )
                * experts_per_token
                / experts
            )
    return flops
