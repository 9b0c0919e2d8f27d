"""Defines the draft of the translated configuration (`ConfigDraft`), and the functions that
translate single keys (handlers). For each tool, a table assigns one of these handlers to each key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..config.keys import accepts_type
from ..config.yaml_text import write_value

# values that switch a key off
OFF_VALUES = (None, "", "none", "None", "null", False, "false")
# notes of outcomes that several tables share
NO_GPU_COUNT_NOTE = "not set in the file: it says what a step is, not on how many GPUs"
IRRELEVANT_NOTE = "nothing here depends on it"
NO_SETTING_NOTE = "Isotype has no such setting"
OWN_OPS_NOTE = "Isotype's own ops are used by default: model.optimize"
OTHER_OPTIMIZER_NOTE = (
    "train.optimizer has other ones (docs/optimizers.md); adamw is used, its learning rate may have"
    " to differ"
)
REFERENCE_NOTE = (
    "the reference is the model as the run starts, with its adapter; its log-probabilities are"
    " computed once"
)


# prefix of the options of a launcher (accelerate, torchrun, DeepSpeed)
LAUNCHER_PREFIX = "launcher."


class Fate(StrEnum):
    """What happens to a key of the other tool's configuration."""

    UNCHANGED = "taken"  # the same key with the same value
    RENAMED = "renamed"  # the same value under another key
    CHANGED = "changed"  # another value or another meaning; the note explains it
    NO_EFFECT = "no effect"  # Isotype does not need this key
    NOT_OFFERED = "not offered"  # the note names an alternative


@dataclass(frozen=True)
class SourceKey:
    """A key in the other tool's configuration, with its value. `name` is the name of the key in the
    table of handlers, and `name_in_file` is its name in the file.
    """

    name: str
    value: Any
    line: int | None = None
    name_in_file: str = ""


class Computed:
    """Represents a value that the program computes, so that the value is unknown before the program
    runs.
    """


@dataclass(frozen=True)
class Outcome:
    """Describes how one key of the file was translated. `result` is the resulting setting with its
    value, or "" if no setting results.
    """

    source_key: SourceKey
    fate: Fate
    result: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.source_key.name_in_file or self.source_key.name,
            "line": self.source_key.line,
            "value": self.source_key.value,
            "fate": str(self.fate),
            "became": self.result or None,
            "note": self.note or None,
        }


@dataclass
class ConfigDraft:
    """Collects the configuration of Isotype while a file is translated. The handler of each key
    calls one of the methods of the draft.

    source_values   all keys of the file with their values, for handlers that need the values of
                    other keys
    folder          the folder of the file, for keys that name other files
    settings        the value of each setting, such as `train.learning_rate`
    sources         for each setting, the key of the other tool from which its value comes
    outcomes        the outcome of each key that was handled
    precision_keys  the keys that together decide the precision; they are handled last
    defaults        the settings whose values are defaults of the other tool
    notes           notes that do not belong to a single key
    """

    source_values: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, SourceKey] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    precision_keys: list[SourceKey] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def set_default(self, target: str, value: Any) -> None:
        """Sets `target` to the other tool's default if the file did not set it."""
        if target not in self.settings:
            self.settings[target] = value
            self.defaults.add(target)

    def set_defaults(self, settings: Mapping[str, Any]) -> None:
        for target, value in settings.items():
            self.set_default(target, value)

    def set_adapter_defaults(
        self,
        kind: str,
        r: int | None = None,
        alpha: float | None = None,
        *,
        alpha_per_rank: float = 1.0,
    ) -> bool:
        """Sets the defaults that the other tool has for an adapter. If `alpha` is None, the default
        of alpha is `alpha_per_rank` times the rank. If every weight is trained, the function
        removes the settings of the adapter and returns False.
        """
        self.set_default("adapter.kind", kind)
        if self.settings["adapter.kind"] == "none":
            self.settings = {
                key: value
                for key, value in self.settings.items()
                if not key.startswith("adapter.") or key == "adapter.kind"
            }
            return False
        if r is not None:
            self.set_default("adapter.r", r)
            self.set_default(
                "adapter.alpha",
                alpha_per_rank * self.settings["adapter.r"] if alpha is None else alpha,
            )
        return True

    def lowercase_value(self, key: str) -> str:
        """Returns the value of a key in lower case, or "" if the file does not set the key."""
        value = self.source_values.get(key)
        return "" if value is None else str(value).lower()

    def set(self, source_key: SourceKey, target: str, value: Any, note: str = "") -> None:
        """Sets the setting `target`, and records the key from which its value comes. The key is
        reported as `changed` if there is a note, or if the new value differs from the value in the
        file.
        """
        self.settings[target] = value
        self.sources[target] = source_key
        fate = Fate.RENAMED
        if note or not _is_same_value(value, source_key.value):
            fate = Fate.CHANGED
        elif source_key.name == target.partition(".")[2]:
            fate = Fate.UNCHANGED
        self.outcomes.append(Outcome(source_key, fate, f"{target}: {write_value(value)}", note))

    def report_changed(self, source_key: SourceKey, note: str) -> None:
        """Reports that Isotype has no setting for this key and behaves differently."""
        self.outcomes.append(Outcome(source_key, Fate.CHANGED, note=note))

    def report_no_effect(self, source_key: SourceKey, reason: str) -> None:
        self.outcomes.append(Outcome(source_key, Fate.NO_EFFECT, note=reason))

    def report_not_offered(self, source_key: SourceKey, alternative: str) -> None:
        self.outcomes.append(Outcome(source_key, Fate.NOT_OFFERED, note=alternative))

    def add_precision_key(self, source_key: SourceKey) -> None:
        """Stores a key that affects the choice of the precision. Several such keys together decide
        the precision, so they are reported only when all of them are known.
        """
        self.precision_keys.append(source_key)


def _is_same_value(value: Any, source_value: Any) -> bool:
    """True if two values are the same, even if they are written differently (`2e-4` and 0.0002)."""
    if value == source_value or str(value) == str(source_value):
        return True
    try:
        return float(value) == float(source_value)
    except (TypeError, ValueError):
        return False


# translates one key of the other tool into the configuration
Handler = Callable[[ConfigDraft, SourceKey], None]


def parse_number(value: Any) -> float | int:
    """Converts a value to a number. `1e-5` is text in YAML 1.1, and every value on a command line
    is text.
    """
    parsed = float(value)
    if parsed == int(parsed) and "." not in str(value) and "e" not in str(value).lower():
        return int(parsed)
    return parsed


def is_enabled(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1", "auto")


def same_handler(handler: Handler, names: str) -> dict[str, Handler]:
    """Returns table entries that give several keys the same handler. A name that ends in `*`
    matches every key that begins with the text before it.
    """
    return dict.fromkeys(names.split(), handler)


def handlers_by_reason(
    make_handler: Callable[[str], Handler], keys_by_reason: Mapping[str, str]
) -> dict[str, Handler]:
    """Returns a handler for each key in `keys_by_reason`. `keys_by_reason` maps a reason to a text
    with the keys, separated by spaces.
    """
    return {
        name: handler
        for reason, names in keys_by_reason.items()
        for name, handler in same_handler(make_handler(reason), names).items()
    }


def convert_to(
    target: str, convert: Callable[[Any], Any] = lambda value: value, note: str = ""
) -> Handler:
    return lambda draft, source_key: draft.set(source_key, target, convert(source_key.value), note)


def convert_number(target: str) -> Handler:
    return convert_to(target, parse_number)


def copy_values(**sections: str) -> dict[str, Handler]:
    """Returns table entries for keys whose value is copied unchanged. An argument such as
    `train="seed clip=max_grad_norm"` lists the keys for one section. `clip=max_grad_norm` means
    that the setting is called `clip` in Isotype and `max_grad_norm` in the other tool. `seed` has
    the same name in both tools.
    """
    pairs = [
        (section, *pair.partition("="))
        for section, pairs_text in sections.items()
        for pair in pairs_text.split()
    ]
    return {
        source_name or setting: _convert_by_schema(f"{section}.{setting}")
        for section, setting, _, source_name in pairs
    }


def _convert_by_schema(target: str) -> Handler:
    """Returns a handler that converts the value to the type that `target` has in the schema. The
    type may be a positive integer, a number, a boolean or text. Values for lists and mappings are
    not changed.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if accepts_type(target, "integer"):
            convert_count(target)(draft, source_key)
        elif accepts_type(target, "number"):
            convert_number(target)(draft, source_key)
        elif accepts_type(target, "boolean"):
            draft.set(source_key, target, is_enabled(source_key.value))
        else:
            # a boolean is not converted to text, so that the schema refuses it
            keeps_value = (
                isinstance(source_key.value, bool)
                or accepts_type(target, "array")
                or accepts_type(target, "object")
            )
            value = source_key.value if keeps_value else str(source_key.value)
            draft.set(source_key, target, value)

    return handler


def convert_switch(target: str, enabled_value: Any, disabled_value: Any) -> Handler:
    """Returns a handler that sets one value if the key is switched on, and another value if it is
    switched off.
    """
    return convert_to(target, lambda value: enabled_value if is_enabled(value) else disabled_value)


def convert_list(target: str) -> Handler:
    """Returns a handler for a list, or for a text whose items are separated by commas."""

    def split_commas(value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",")]
        return value

    return convert_to(target, split_commas)


def convert_count(target: str) -> Handler:
    """Returns a handler for a positive integer. If the value is 0 or -1, Isotype's default is kept."""

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        value = parse_number(source_key.value)
        if value <= 0:
            draft.report_no_effect(source_key, f"{source_key.value}: the default")
        elif value != int(value):
            draft.report_not_offered(
                source_key, f"a share of the run; {target} is a number of steps"
            )
        else:
            draft.set(source_key, target, int(value))

    return handler


def convert_choice(
    target: str,
    choices: Mapping[str, Any],
    fallback_note: str,
    *,
    fallback: str = "report_not_offered",
) -> Handler:
    """Returns a handler that looks up the value in `choices`, which maps a value of the other tool
    to Isotype's value, or to (value, note). If the value is not in `choices`, the handler calls the
    draft's method `fallback` with `fallback_note`.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        choice = re.sub(r"^.*(?:OptimizerNames|SchedulerType)\.", "", str(source_key.value)).lower()
        if choice not in choices:
            getattr(draft, fallback)(source_key, fallback_note)
        elif isinstance(choices[choice], tuple):
            draft.set(source_key, target, *choices[choice])
        else:
            draft.set(source_key, target, choices[choice])

    return handler


def set_if_enabled(
    target: str, value: Any, *, off_note: str = "switched off", note: str = ""
) -> Handler:
    """Returns a handler that sets `target` to `value` if the key is switched on.

    off_note  the note to report if the key is switched off
    note      the note to report if the key is switched on
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if is_enabled(source_key.value):
            draft.set(source_key, target, value, note)
        else:
            draft.report_no_effect(source_key, off_note)

    return handler


def require_key(key: str, accepted: str, convert: Handler, reason: str) -> Handler:
    """Returns a handler for a key that has an effect only together with another key. The handler
    calls `convert` if the value of `key` in the file is one of the `accepted` values. If `accepted`
    is `on`, `key` must be switched on. If `accepted` is empty, `key` must not be set. In all other
    cases the handler reports that its own key has no effect.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if accepted == "on":
            is_accepted = is_enabled(draft.source_values.get(key))
        else:
            is_accepted = draft.lowercase_value(key) in (accepted.split() or [""])
        if is_accepted:
            convert(draft, source_key)
        else:
            draft.report_no_effect(source_key, reason)

    return handler


def choose_handler(
    condition: Callable[[ConfigDraft, SourceKey], object], handler: Handler, alternative: Handler
) -> Handler:
    """Returns a handler that calls `handler` if `condition` returns true, and `alternative` if not."""

    def choose(draft: ConfigDraft, source_key: SourceKey) -> None:
        if condition(draft, source_key):
            handler(draft, source_key)
        else:
            alternative(draft, source_key)

    return choose


# data.chat_template's names -> other tools' names of the same template
_TEMPLATE_ALIASES = {
    "chatml": "chatml chatmltemplate",
    "llama3": "llama3 llama_3",
    "gemma": "gemma gemma2 gemma_2 gemma3 gemma_3",
    "mistral": "mistral mistral_v1 mistralchattemplate",
    "zephyr": "zephyr",
}
# another tool's name of a chat template -> Isotype's
TEMPLATES = {
    alias: name for name, aliases in _TEMPLATE_ALIASES.items() for alias in aliases.split()
}
_TEMPLATES_WITHOUT_TOKENS = ("mistral", "zephyr")
_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


def convert_template(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates a chat template that is given by its name or its file. A template that is written
    as text is not translated, because Isotype has no setting for it.
    """
    value = str(source_key.value)
    name = re.sub(r"[-. ]", "_", value.lower())
    is_text = "{%" in value or "{{" in value
    if source_key.value in OFF_VALUES or name in ("tokenizer_default", "jinja"):
        draft.report_no_effect(
            source_key, "the tokenizer's own template, unless data.chat_template is set"
        )
    elif is_text or not isinstance(source_key.value, str):
        draft.report_not_offered(
            source_key,
            "data.chat_template: a file with this text; without it the tokenizer's own template is"
            " used",
        )
    elif value.endswith(_TEMPLATE_FILES):
        draft.set(source_key, "data.chat_template", value)
    elif name in TEMPLATES:
        template = TEMPLATES[name]
        tokens = "; model.add_tokens, where the tokenizer lacks its tokens"
        if template in _TEMPLATES_WITHOUT_TOKENS:
            tokens = ""
        draft.set(source_key, "data.chat_template", template, f"Isotype's own of this name{tokens}")
    else:
        draft.report_not_offered(
            source_key,
            f"data.chat_template is {', '.join(_TEMPLATE_ALIASES)} or a Jinja file; the tokenizer's"
            f" own template is used, or a plain one where it has none, not {value}",
        )


def resolve_template_conflict(draft: ConfigDraft) -> None:
    """Removes the chat template if every row is plain text, because Isotype refuses to train with
    this combination.
    """
    sources = draft.settings.get("data.train")
    formats = {
        source.get("format") if isinstance(source, dict) else None
        for source in (sources if isinstance(sources, list) else ())
    }
    is_text = draft.settings.get("data.format") == "text" or formats == {"text"}
    if is_text and draft.settings.pop("data.chat_template", None) is not None:
        draft.notes.append("data.chat_template is left out: plain text is learnt as it is")


def set_constant(target: str, value: Any, note: str = "") -> Handler:
    """Returns a handler that always sets the same value, whatever the value of the key is."""
    return convert_to(target, lambda _: value, note)


def report_no_effect(reason: str) -> Handler:
    """Returns a handler that reports that the key has no effect."""
    return lambda draft, source_key: draft.report_no_effect(source_key, reason)


def report_changed(note: str) -> Handler:
    """Returns a handler that reports a key for which Isotype behaves differently, with this note.
    In the note, {} is replaced by the value of the key.
    """
    return lambda draft, source_key: draft.report_changed(
        source_key, note.replace("{}", str(source_key.value))
    )


def report_not_offered(alternative: str) -> Handler:
    """Returns a handler for a feature that Isotype does not offer. If the key is switched on, the
    handler reports that Isotype does not offer it. If the key is not switched on, the handler
    reports that it has no effect.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if source_key.value in OFF_VALUES or source_key.value in ([], {}):
            draft.report_no_effect(source_key, "switched off")
        else:
            draft.report_not_offered(source_key, alternative)

    return handler


def accept_only(accepted: str, reason: str, alternative: str) -> Handler:
    """Returns a handler for a key that Isotype does not need, because Isotype always behaves in the
    same way. The `accepted` values of the key ask for this behaviour, so the handler reports that
    they have no effect. For all other values, it reports that Isotype does not offer them. In
    `alternative`, {} is replaced by the value of the key.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if str(source_key.value) in accepted.split():
            draft.report_no_effect(source_key, reason)
        else:
            draft.report_not_offered(source_key, alternative.replace("{}", str(source_key.value)))

    return handler


# options of accelerate, torchrun and DeepSpeed's launcher, by the note of their outcome
_LAUNCHER_NO_EFFECT = {
    "isotype train finds the machine's own processes, or --processes N starts them": (
        "multi_gpu cpu gpu_ids same_network rdzv_* rdzv_id run_path standalone module no_python"
        " main_training_function max_restarts monitor_interval tee log_dir redirects"
    ),
    "torchrun and SLURM start isotype train on several machines (docs/many-processes.md)": (
        "machine_rank node_rank main_process_ip main_process_port master_addr master_port hostfile"
        " include exclude deepspeed_hostfile"
    ),
    "part of run.log_every and of the terminal": "quiet debug",
}
# what to use instead -> the launcher's keys that Isotype does not offer
_LAUNCHER_NOT_OFFERED = {
    "isotype train --processes N: the file says what a step is, not on how many GPUs": (
        "num_processes num_machines nproc_per_node nnodes num_gpus num_nodes num_cpu_threads_per_process"
    ),
    "accelerate's file is not read: precision.*, parallel.kind and isotype train --processes take its"
    " place": "config_file",
    "parallel.kind: shard is FSDP2, and isotype plan counts its memory": (
        "use_fsdp fsdp_* use_deepspeed deepspeed_* zero_stage zero3_* offload_* use_megatron_lm"
    ),
    "train without it: the fused ops are used by default (model.optimize)": "dynamo_*",
}


def _convert_launcher_precision(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Uses the precision that the launcher sets, unless the options of the program set a precision."""
    program_key = next(
        (key for key in ("bf16", "fp16", "mixed_precision") if key in draft.source_values), None
    )
    if program_key:
        draft.report_no_effect(source_key, f"{program_key} of the program decides")
    else:
        draft.add_precision_key(source_key)


# setting of the launcher (accelerate) -> the function that translates it
LAUNCHER: dict[str, Handler] = {
    f"{LAUNCHER_PREFIX}{name}": handler
    for name, handler in {
        **handlers_by_reason(report_no_effect, _LAUNCHER_NO_EFFECT),
        **handlers_by_reason(report_not_offered, _LAUNCHER_NOT_OFFERED),
        "mixed_precision": _convert_launcher_precision,
        "*": report_not_offered(
            "an option of the launcher; isotype train starts its own processes"
        ),
    }.items()
}


_NOT_PAGED_NOTE = "not paged: states stay on the GPU"
# Isotype's name of an optimizer -> other tools' names
_OPTIMIZER_ALIASES = {
    "adamw": (
        "adamw adamw_torch adamw_torch_fused adamw_hf adamw_torch_xla torch.optim.adamw fused_adamw"
        " adamw_apex_fused optimi-adamw bnb-adamw"
    ),
    "adamw8bit": (
        "adamw8bit adamw_8bit adamw_bnb_8bit bitsandbytes.optim.adamw8bit torchao.optim.adamw8bit"
        " adamw_torch_8bit adamw8bitkahan ao-adamw8bit bnb-adamw8bit"
    ),
    "adamw8bit-paged": (
        "paged_adamw_8bit bitsandbytes.optim.pagedadamw8bit pagedadamw8bit bnb-adamw8bit-paged"
    ),
    "lion": "lion lion_32bit bitsandbytes.optim.lion bnb-lion optimi-lion",
    "lion8bit": "lion8bit lion_8bit bitsandbytes.optim.lion8bit bnb-lion8bit",
    "schedule-free": "schedule_free_adamw adamw_schedulefree adamwschedulefree",
    "muon": "muon torch.optim.muon",
    "adafactor": "adafactor torch.optim.adafactor",
    "prodigy": "prodigy",
}
# another tool's name of an optimizer -> Isotype's
OPTIMIZERS = {
    alias: name for name, aliases in _OPTIMIZER_ALIASES.items() for alias in aliases.split()
} | {
    **dict.fromkeys(
        ("paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.pagedadamw", "bnb-adamw-paged"),
        ("adamw", _NOT_PAGED_NOTE),
    ),
    **dict.fromkeys(("paged_lion_32bit", "bnb-lion-paged"), ("lion", _NOT_PAGED_NOTE)),
    **dict.fromkeys(
        ("paged_lion_8bit", "pagedlion8bit", "bnb-lion8bit-paged"), ("lion8bit", _NOT_PAGED_NOTE)
    ),
}
convert_optimizer = convert_choice("train.optimizer", OPTIMIZERS, OTHER_OPTIMIZER_NOTE)


def resolve_optimizer_conflicts(draft: ConfigDraft) -> None:
    """Removes or replaces the settings that the optimizer does not support, and adds a message for
    each of them.
    """
    name = draft.settings.get("train.optimizer", "adamw")
    settings = draft.settings
    optimizer_key = draft.sources.get("train.optimizer")
    if settings.get("precision.preset") == "bf16-pure" and name != "adamw":
        # PR018: the others round to the nearest and take bf16 gradients
        name = settings["train.optimizer"] = "adamw"
        reason = "the others cannot round bf16 weights stochastically"
        for i, outcome in enumerate(draft.outcomes):
            if optimizer_key is not None and outcome.source_key is optimizer_key:
                draft.outcomes[i] = Outcome(
                    optimizer_key, Fate.CHANGED, "train.optimizer: adamw", reason
                )
    if name == "schedule-free" and settings.get("train.schedule", "constant") != "constant":
        settings["train.schedule"] = "constant"
        draft.notes.append(
            "train.schedule: constant; the average of schedule-free takes the place of a schedule"
        )
    if name == "schedule-free" and settings.pop("train.ema", None) is not None:
        draft.notes.append("train.ema is left out: schedule-free averages the weights itself")
    if name == "prodigy" and settings.get("train.learning_rate", 1) != 1:
        settings["train.learning_rate"] = 1
        draft.notes.append("train.learning_rate: 1; prodigy finds the rate itself")
    if name == "adafactor" and settings.pop("train.learning_rate", None) is not None:
        draft.notes.append(
            "train.learning_rate is left out: torch's Adafactor multiplies it by each weight's"
            " size; its own is 0.01"
        )
    for key in {
        "adafactor": ("beta1", "beta2", "epsilon"),
        "lion": ("epsilon",),
        "lion8bit": ("epsilon",),
    }.get(name, ()):
        if settings.pop(f"train.{key}", None) is not None:
            draft.notes.append(f"train.{key} is left out: {name} does not read it")


# another tool's name of a schedule -> Isotype's
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": ("cosine", "its end is train.min_learning_rate"),
    "cosine_warmup_with_min_lr": ("cosine", "its end is train.min_learning_rate"),
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
}


def convert_lora_init(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates PEFT's `init_lora_weights`."""
    method = str(source_key.value).lower()
    if method == "true":
        draft.report_no_effect(source_key, "the default")
    elif method.partition("_niter_")[0] in ("pissa", "olora", "orthogonal"):
        note = "its start is an exact SVD" if "_niter_" in method else ""
        draft.set(source_key, "adapter.start", method.partition("_niter_")[0], note)
    else:
        draft.report_not_offered(source_key, "adapter.start is default, orthogonal, pissa or olora")


def schedule_converter(choices: Mapping[str, Any]) -> Handler:
    convert = convert_choice(
        "train.schedule",
        choices,
        "train.schedule is cosine, linear, constant or wsd; cosine is used",
    )

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        convert(draft, source_key)
        # this schedule has no warm-up, and ignores warmup_ratio
        if str(source_key.value).lower().endswith("constant"):
            draft.settings["train.warmup"] = 0

    return handler


convert_schedule = schedule_converter(SCHEDULES)


def convert_attention(draft: ConfigDraft, source_key: SourceKey) -> None:
    choices = {
        **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2"), "flash"),
        "sdpa": "sdpa",
        **dict.fromkeys(("eager", "disabled"), "eager"),
        **dict.fromkeys(("flex_attention", "flex"), "flex"),
    }
    if str(source_key.value).lower() in ("auto", "none", "null"):
        draft.report_no_effect(source_key, "the default, sdpa")
    else:
        convert_choice(
            "model.attention",
            choices,
            "model.attention is sdpa, eager, flash or flex; sdpa is used",
        )(draft, source_key)


def convert_trackers(draft: ConfigDraft, source_key: SourceKey) -> None:
    names = source_key.value if isinstance(source_key.value, list) else [source_key.value]
    requested = [str(name).lower() for name in names]
    supported = [name for name in requested if name in ("tensorboard", "wandb")]
    unsupported = [
        name for name in requested if name not in ("tensorboard", "wandb", "none", "[]", "null")
    ]
    if supported:
        note = f"{', '.join(unsupported)}: not offered" if unsupported else ""
        draft.set(source_key, "run.trackers", supported, note)
    elif unsupported and unsupported != ["all"]:
        draft.report_not_offered(
            source_key, "run.trackers is tensorboard or wandb; metrics.jsonl is always written"
        )
    else:
        draft.report_no_effect(source_key, "metrics.jsonl and report.html are always written")


def convert_eval_split(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `val_set_size` and `val_size` if they are a fraction of the rows. A number of rows
    cannot be translated.
    """
    value = parse_number(source_key.value or 0)
    if value >= 1:
        draft.report_not_offered(
            source_key, "data.eval_split is a share of the rows; data.eval names a file"
        )
    else:
        draft.set(source_key, "data.eval_split", value)


def convert_targets(draft: ConfigDraft, source_key: SourceKey) -> None:
    value = source_key.value
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if value in ("all", "all-linear", ["all-linear"], ["all"]):
        value = "all-linear"
    elif isinstance(value, str):
        value = value.split()
    draft.set(source_key, "adapter.targets", value)
