"""Finds the faults of a checkpoint. Each function looks for one fault. The first line of its
docstring describes the fault. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...dtypes import format_dtype
from ...finding import Finding, Place, Severity, join_names
from ...model.adapter_settings import ADAPTER_CONFIG_FILE
from ...wording import pluralise
from .checkpoint import CONFIG_FILE, GGUF, MODEL, Checkpoint, StoredTensor
from .tokens import GENERATION_FILE, TOKENIZER, TokenSettings
from .values import ValueRange

if TYPE_CHECKING:
    from .adapter import AdapterFacts
    from .loading import Loading

_FETCH = "write the files again, or fetch them from where they came"
_NAMES_SHOWN = 3  # names of tensors that a finding lists
_FP16_MAX = 65504.0  # the largest finite number of fp16
# the end of an embedding's name in the families
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "token_embd.weight")


@dataclass
class Facts:
    """Contains everything that was read from a checkpoint.

    ranges      the values of each tensor with floating-point numbers
    tokens      the special tokens of the tokenizer and the settings; None without a tokenizer
    loading     how transformers would load the folder; None if this was not found out
    adapter     what was found out about an adapter; None for a model
    equal_ties  name of a tied weight -> whether its values are those of the weight to which it is
                tied
    """

    checkpoint: Checkpoint
    ranges: Mapping[str, ValueRange]
    tokens: TokenSettings | None = None
    loading: Loading | None = None
    adapter: AdapterFacts | None = None
    equal_ties: Mapping[str, bool] = field(default_factory=dict)

    def place(self, name: str = "", file: str = "") -> Place:
        path = self.checkpoint.path
        if file:
            return Place(file=str(path / file))
        tensor = self.checkpoint.tensors.get(name)
        return Place(symbol=name or None, file=str(path if tensor is None else tensor.file))

    def stored_matrices(self, dtype: str) -> list[str]:
        """Returns the names of the tensors of this dtype that have several dimensions."""
        return [
            tensor.name
            for tensor in self.checkpoint.tensors.values()
            if tensor.dtype == dtype and len(tensor.shape) > 1
        ]


def find_faults(facts: Facts) -> list[Finding]:
    """Returns the faults of a checkpoint."""
    return [finding for rule in _RULES for finding in rule(facts)]


def _names(names: Sequence[str]) -> str:
    return join_names(names, _NAMES_SHOWN)


def _not_finite(facts: Facts) -> Iterator[Finding]:
    """A tensor has values that are NaN or infinite."""
    names = [name for name, values in facts.ranges.items() if values.nan or values.infinite]
    if not names:
        return
    nan = sum(facts.ranges[name].nan for name in names)
    infinite = sum(facts.ranges[name].infinite for name in names)
    yield Finding(
        code="MF001",
        severity=Severity.ERROR,
        message=f"values that are not finite ({nan:,} NaN, {infinite:,} infinite) in {_names(names)}",
        place=facts.place(names[0]),
        cause="one such value makes every output of the model NaN",
        fix="use an older checkpoint; isotype doctor run --nan finds the step that made them",
    )


def _all_zero(facts: Facts) -> Iterator[Finding]:
    """A weight matrix has only zeros."""
    tensors = facts.checkpoint.tensors
    adapter = facts.adapter
    if adapter is not None:
        if adapter.zero and len(adapter.zero) == len(adapter.modules):
            yield Finding(
                code="MF002",
                severity=Severity.WARNING,
                message="every module of the adapter has a matrix of zeros: it changes nothing",
                place=facts.place(),
                cause="B is zero before the first step, and after training whose updates were lost",
                fix="save the adapter after training",
            )
        elif adapter.zero:
            yield _zero_finding(
                facts, adapter.zero, "modules of the adapter with a matrix of zeros"
            )
        return
    zero = [
        name
        for name, values in facts.ranges.items()
        if values.is_all_zero and is_matrix(tensors[name])
    ]
    if zero:
        yield _zero_finding(facts, zero, "matrices with only zeros")


def is_matrix(tensor: StoredTensor) -> bool:
    """Returns False for vectors, and for the biases of stacked experts, which may be zero."""
    return len(tensor.shape) > 1 and not tensor.name.endswith("bias")


def _zero_finding(facts: Facts, names: Sequence[str], message: str) -> Finding:
    return Finding(
        code="MF002",
        severity=Severity.WARNING,
        message=f"{message}: {_names(names)}",
        place=facts.place(names[0]),
        cause="the writer created the tensors and did not fill them, or training never reached them",
        fix=_FETCH,
    )


def _other_dtype(facts: Facts) -> Iterator[Finding]:
    """config.json declares another dtype than the files have."""
    config = facts.checkpoint.config
    declared = config.get("dtype") or config.get("torch_dtype")
    if facts.checkpoint.kind != MODEL or not isinstance(declared, str):
        return
    counts: dict[str, int] = {}
    for tensor in facts.checkpoint.tensors.values():
        if tensor.dtype in ("fp32", "bf16", "fp16") and len(tensor.shape) > 1:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.count
    has_scales = facts.loading is not None and bool(facts.loading.scales.quantised)
    if not counts or has_scales:
        return
    stored = max(counts, key=lambda name: counts[name])
    if stored == format_dtype(declared):
        return
    yield Finding(
        code="MF003",
        severity=Severity.WARNING,
        message=f"config.json says {format_dtype(declared)}, and the weights are {stored}",
        place=facts.place(file=CONFIG_FILE),
        cause=f"programs that load in the declared dtype cast every weight from {stored}",
        fix=f'"dtype": "{stored}" in config.json, or write the weights in the declared dtype',
        details=(
            ("stored", ", ".join(f"{count:,} numbers in {name}" for name, count in counts.items())),
        ),
    )


def _wider_than_values(facts: Facts) -> Iterator[Finding]:
    """fp32 matrices have only bf16 or fp16 values."""
    names = [name for name in facts.stored_matrices("fp32") if name in facts.ranges]
    ranges = [facts.ranges[name] for name in names if not facts.ranges[name].is_all_zero]
    if not ranges:
        return
    if all(values.only_bf16 for values in ranges):
        narrow = "bf16"
    elif all(values.only_fp16 for values in ranges):
        narrow = "fp16"
    else:
        return
    yield Finding(
        code="MF004",
        severity=Severity.NOTE,
        message=f"the {pluralise(len(names), 'fp32 matrix', 'fp32 matrices')} have only {narrow} values",
        place=facts.place(names[0]),
        cause=f"the values were rounded to {narrow} before they were stored in fp32",
        fix=f"save in {narrow}, which takes half of the space, or save the fp32 weights themselves",
    )


def _overflows_in_fp16(facts: Facts) -> Iterator[Finding]:
    """Values are too large for fp16."""
    names = [name for name, values in facts.ranges.items() if values.overflow]
    if not names:
        return
    largest = max(facts.ranges[name].largest for name in names)
    yield Finding(
        code="MF005",
        severity=Severity.NOTE,
        message=(
            f"{sum(facts.ranges[name].overflow for name in names):,} values become infinite in fp16:"
            f" {_names(names)}"
        ),
        place=facts.place(names[0]),
        observed=f"the largest is {largest:.3g}; fp16 ends at {_FP16_MAX:g}",
        fix="load and serve it in bf16 or fp32: vllm serve --dtype bfloat16, GGUF type BF16",
    )


def _missing_scales(facts: Facts) -> Iterator[Finding]:
    """A quantised weight has no scale, or one of another shape."""
    missing = {} if facts.loading is None else facts.loading.scales.missing
    if not missing:
        return
    first = next(iter(missing))
    yield Finding(
        code="MF006",
        severity=Severity.ERROR,
        message=f"{pluralise(len(missing), 'quantised weight')} without usable scales: {_names(list(missing))}",
        place=facts.place(file=""),
        observed=f"{first}: {missing[first]}",
        cause="the stored numbers have no meaning without their scales",
        fix="save the model again with the library that quantised it",
    )


def _orphaned_scales(facts: Facts) -> Iterator[Finding]:
    """A scale belongs to no quantised weight."""
    orphaned = [] if facts.loading is None else facts.loading.scales.orphaned
    if not orphaned:
        return
    yield Finding(
        code="MF007",
        severity=Severity.ERROR,
        message=f"{pluralise(len(orphaned), 'scale')} beside weights that are not quantised: {_names(orphaned)}",
        place=facts.place(orphaned[0]),
        cause=(
            "the weights were cast to a wider dtype. If the scales were not applied before, the"
            " weights are wrong by these factors; if they were, the scales are left over"
        ),
        fix="isotype inspect FOLDER --against BASE tells which; then write the model again",
    )


def _unlike_quantisation_config(facts: Facts) -> Iterator[Finding]:
    """quantization_config and the tensors contradict each other."""
    loading = facts.loading
    if loading is None or facts.checkpoint.kind != MODEL:
        return
    has_quantised = bool(loading.scales.quantised or loading.scales.missing)
    if loading.quantisation is not None and not has_quantised:
        yield Finding(
            code="MF008",
            severity=Severity.ERROR,
            message="config.json says that the weights are quantised, and no tensor is",
            place=facts.place(file=CONFIG_FILE),
            declared=f"quantization_config: {loading.quantisation}",
            cause="the weights were dequantised when they were merged, and the setting was kept",
            fix="remove quantization_config from config.json, also inside text_config",
        )
    if loading.quantisation is None and has_quantised:
        names = [*loading.scales.quantised, *loading.scales.missing]
        yield Finding(
            code="MF008",
            severity=Severity.ERROR,
            message=(
                f"{pluralise(len(names), 'quantised weight')}, and no quantization_config in"
                f" config.json: {_names(names)}"
            ),
            place=facts.place(file=CONFIG_FILE),
            cause="programs read the stored numbers as weights, without their scales",
            fix="copy quantization_config from the model that it was made from, or dequantise it",
        )


def _ties(facts: Facts) -> Iterator[Finding]:
    """Weights that config.json ties are stored twice with different values."""
    unequal = [name for name, is_equal in facts.equal_ties.items() if not is_equal]
    if not unequal or facts.loading is None:
        return
    source = facts.loading.ties[unequal[0]]
    yield Finding(
        code="MF009",
        severity=Severity.ERROR,
        message=f"config.json ties {unequal[0]} to {source}, and their values differ",
        place=facts.place(unequal[0]),
        cause=f"transformers 5 loads both; programs that follow the setting load only {source}",
        fix="tie_word_embeddings: false in config.json",
    )


def _files(facts: Facts) -> Iterator[Finding]:
    """Programs disagree on which files of the folder hold the weights."""
    checkpoint = facts.checkpoint
    if checkpoint.stale_files:
        yield Finding(
            code="MF010",
            severity=Severity.WARNING,
            message=(
                f"transformers does not load {pluralise(len(checkpoint.stale_files), 'file')} of"
                f" weights: {_names(checkpoint.stale_files)}"
            ),
            place=facts.place(file=checkpoint.stale_files[0]),
            cause="they are left from an earlier save; other programs may load them",
            fix="remove these files",
        )
    if checkpoint.missing_index:
        yield Finding(
            code="MF010",
            severity=Severity.ERROR,
            message=f"{pluralise(len(checkpoint.files), 'file')} of weights, and no index",
            place=facts.place(),
            cause="transformers finds the files by model.safetensors.index.json, and loads none",
            fix="save the model again; save_pretrained writes the index",
        )
    if checkpoint.duplicates:
        yield Finding(
            code="MF010",
            severity=Severity.ERROR,
            message=f"{pluralise(len(checkpoint.duplicates), 'tensor')} in two files: {_names(checkpoint.duplicates)}",
            place=facts.place(checkpoint.duplicates[0]),
            cause="the file that a program reads last decides which values the model has",
            fix=_FETCH,
        )


def _unlike_class(facts: Facts) -> Iterator[Finding]:
    """The files do not have the weights of the class in config.json."""
    loading = facts.loading
    if loading is None:
        return
    if loading.missing:
        yield Finding(
            code="MF011",
            severity=Severity.ERROR,
            message=f"{loading.class_name} has {pluralise(len(loading.missing), 'weight')} that the files lack: {_names(loading.missing)}",
            place=facts.place(file=CONFIG_FILE),
            cause="transformers gives these weights random values, with a warning only",
            fix=_FETCH,
        )
    if loading.mismatched:
        yield Finding(
            code="MF011",
            severity=Severity.ERROR,
            message=(
                f"{pluralise(len(loading.mismatched), 'tensor')} of another shape than in"
                f" {loading.class_name}: {_names(loading.mismatched)}"
            ),
            place=facts.place(file=CONFIG_FILE),
            cause="config.json belongs to another model",
            fix="the config.json that was written with these weights",
        )
    if loading.unexpected:
        yield Finding(
            code="MF011",
            severity=Severity.WARNING,
            message=f"{loading.class_name} does not use {pluralise(len(loading.unexpected), 'tensor')}: {_names(loading.unexpected)}",
            place=facts.place(loading.unexpected[0]),
            cause="transformers leaves them out; their names belong to another class or tool",
            fix="architectures in config.json, or names that the class has",
        )


def _narrowed(facts: Facts) -> Iterator[Finding]:
    """Weights that the class keeps in fp32 are stored in fewer bits."""
    narrowed = [] if facts.loading is None else facts.loading.narrowed
    if narrowed:
        yield Finding(
            code="MF012",
            severity=Severity.WARNING,
            message=(
                f"{pluralise(len(narrowed), 'weight')} stored in fewer bits than the class keeps:"
                f" {_names(narrowed)}"
            ),
            place=facts.place(narrowed[0]),
            cause="a cast of the whole model rounded them; loading in fp32 does not bring bits back",
            fix="save with save_pretrained, or cast all tensors except these",
        )


def _end_tokens(facts: Facts) -> Iterator[Finding]:
    """Programs end an answer at different tokens."""
    tokens = facts.tokens
    if tokens is None:
        return
    generation = tokens.end_ids.get(GENERATION_FILE) or tokens.end_ids.get(CONFIG_FILE) or ()
    tokenizer = tokens.end_ids.get(TOKENIZER, ())
    place = facts.place(file=GENERATION_FILE if facts.checkpoint.kind != GGUF else "")
    if generation and tokenizer and not set(tokenizer) & set(generation):
        yield Finding(
            code="MF013",
            severity=Severity.WARNING,
            message=(
                f"the tokenizer ends at {tokens.describe(tokenizer[0])}, and generation at"
                f" {', '.join(map(tokens.describe, generation))}"
            ),
            place=place,
            cause="transformers stops at the second, and other programs at the first",
            fix="eos_token_id in generation_config.json: a list of both",
        )
    turn_end = "" if facts.loading is None else facts.loading.turn_end
    end_names = {tokens.names.get(token) for ids in tokens.end_ids.values() for token in ids}
    if turn_end and tokens.end_ids and turn_end not in end_names:
        yield Finding(
            code="MF013",
            severity=Severity.WARNING,
            message=f"answers end with {turn_end} in the chat template, and no setting stops there",
            place=place,
            declared=", ".join(sorted(str(name) for name in end_names)),
            cause="the model writes this token and continues up to the limit of tokens",
            fix="its id in eos_token_id of generation_config.json, and as the tokenizer's eos_token",
        )


def _vocabulary(facts: Facts) -> Iterator[Finding]:
    """The tokenizer has more tokens than the embedding has rows."""
    tokens = facts.tokens
    tensors = facts.checkpoint.tensors
    embedding = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if tokens is None or embedding is None or not tokens.token_count:
        return
    rows = tensors[embedding].shape[0]
    is_dense = len(tensors[embedding].shape) == 2
    if is_dense and tokens.token_count > rows:
        yield Finding(
            code="MF014",
            severity=Severity.ERROR,
            message=f"the tokenizer has {tokens.token_count:,} tokens, and {embedding} has {rows:,} rows",
            place=facts.place(embedding),
            cause="a token without a row ends the program with an index error",
            fix="model.resize_token_embeddings(len(tokenizer)) before training and saving",
        )


def _incomplete_adapter(facts: Facts) -> Iterator[Finding]:
    """The matrices of an adapter do not fit each other or their settings."""
    adapter = facts.adapter
    if adapter is None:
        return
    if adapter.single:
        yield Finding(
            code="MF015",
            severity=Severity.ERROR,
            message=f"{pluralise(len(adapter.single), 'matrix', 'matrices')} without a partner: {_names(adapter.single)}",
            place=facts.place(adapter.single[0]),
            cause="a change needs both of its matrices",
            fix=_FETCH,
        )
    if adapter.problem:
        yield Finding(
            code="MF015",
            severity=Severity.ERROR,
            message=adapter.problem,
            place=facts.place(file=ADAPTER_CONFIG_FILE),
            cause="the settings belong to another adapter, or were changed after training",
            fix="the adapter_config.json that was written with these weights",
        )


# each yields the findings of one kind
_RULES: tuple[Callable[[Any], Iterator[Finding]], ...] = (
    _not_finite,
    _all_zero,
    _other_dtype,
    _wider_than_values,
    _overflows_in_fp16,
    _missing_scales,
    _orphaned_scales,
    _unlike_quantisation_config,
    _ties,
    _files,
    _unlike_class,
    _narrowed,
    _end_tokens,
    _vocabulary,
    _incomplete_adapter,
)
