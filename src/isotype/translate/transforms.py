"""What becomes of another tool's keys: the configuration that is being made, and the transforms
that the tools' tables are made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..config.keys import takes
from ..config.yaml_text import write_value

OFF = (None, "", "none", "None", "null", False, "false")  # a key with one of these is switched off
GPUS = "not set in the file: it says what a step is, not on how many GPUs"
IRRELEVANT = "nothing here depends on it"
NO_SETTING = "Isotype has no such setting"
OWN_OPS = "Isotype's own ops are used by default: model.optimize"
OTHER_OPTIMIZERS = (
    "train.optimizer has other ones (docs/optimizers.md); adamw is used, its learning rate may have"
    " to differ"
)
REFERENCE = (
    "the reference is the model as the run starts, with its adapter; its log-probabilities are"
    " computed once"
)


class Fate(StrEnum):
    TAKEN = "taken"  # the same key with the same value
    RENAMED = "renamed"  # the same value under another key
    CHANGED = "changed"  # another value, or another meaning of it: the note says which
    NO_EFFECT = "no effect"  # nothing here depends on it
    NOT_OFFERED = "not offered"  # the note says what to use


@dataclass(frozen=True)
class Given:
    """A key of the other tool; `name` is its name in the tables, `written` the name in the file."""

    name: str
    value: Any
    line: int | None = None
    written: str = ""


class Computed:
    """The value of a key that only running the program would tell."""


@dataclass(frozen=True)
class Outcome:
    """became: `train.learning_rate: 0.0002`, or "" where nothing came of the key."""

    given: Given
    fate: Fate
    became: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.given.written or self.given.name,
            "line": self.given.line,
            "value": self.given.value,
            "fate": str(self.fate),
            "became": self.became or None,
            "note": self.note or None,
        }


@dataclass
class Draft:
    """The configuration that is being made. A table's transforms call its methods, one for each
    key.

    settings  `train.learning_rate` -> value
    sources   `train.learning_rate` -> the key that it came from
    keys      every key of the file, for transforms that depend on another one
    folder    where the file lies, for those that name other files
    defaults  the settings that are the other tool's defaults
    notes     what no single key says
    """

    keys: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Given] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    about_precision: list[Given] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def default(self, target: str, value: Any) -> None:
        """The other tool's default where it differs from Isotype's and the file does not set the
        key.
        """
        if target not in self.settings:
            self.settings[target] = value
            self.defaults.add(target)

    def default_all(self, settings: Mapping[str, Any]) -> None:
        for target, value in settings.items():
            self.default(target, value)

    def default_adapter(
        self, kind: str, r: int | None = None, alpha: float | None = None, *, times: float = 1.0
    ) -> bool:
        """The defaults of an adapter; alpha is `times` the rank where the tool has no number for
        it. False where every weight is trained: an adapter's settings are dropped then.
        """
        self.default("adapter.kind", kind)
        if self.settings["adapter.kind"] == "none":
            self.settings = {
                key: value
                for key, value in self.settings.items()
                if not key.startswith("adapter.") or key == "adapter.kind"
            }
            return False
        if r is not None:
            self.default("adapter.r", r)
            self.default(
                "adapter.alpha", times * self.settings["adapter.r"] if alpha is None else alpha
            )
        return True

    def said(self, key: str) -> str:
        """The value of another key of the file, in small letters; "" where it is not set."""
        value = self.keys.get(key)
        return "" if value is None else str(value).lower()

    def set(self, given: Given, target: str, value: Any, note: str = "") -> None:
        """One setting from one key. A note, or a value that is not the given one, makes it
        `changed`.
        """
        self.settings[target] = value
        self.sources[target] = given
        fate = Fate.RENAMED
        if note or not _same(value, given.value):
            fate = Fate.CHANGED
        elif given.name == target.partition(".")[2]:
            fate = Fate.TAKEN
        self.outcomes.append(Outcome(given, fate, f"{target}: {write_value(value)}", note))

    def changed(self, given: Given, note: str) -> None:
        """Isotype does something else here, for which it has no setting."""
        self.outcomes.append(Outcome(given, Fate.CHANGED, note=note))

    def no_effect(self, given: Given, why: str) -> None:
        self.outcomes.append(Outcome(given, Fate.NO_EFFECT, note=why))

    def not_offered(self, given: Given, use: str) -> None:
        self.outcomes.append(Outcome(given, Fate.NOT_OFFERED, note=use))

    def precision(self, given: Given) -> None:
        """Keys that decide the precision together are reported when all of them are known."""
        self.about_precision.append(given)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether it is one value, written in two ways perhaps (`2e-4` and 0.0002)."""
    if ours == theirs or str(ours) == str(theirs):
        return True
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return False


Handler = Callable[[Draft, Given], None]


def as_number(value: Any) -> float | int:
    """1e-5 is text in YAML 1.1, and on a command line everything is."""
    parsed = float(value)
    if parsed == int(parsed) and "." not in str(value) and "e" not in str(value).lower():
        return int(parsed)
    return parsed


def is_on(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1", "auto")


def each(handler: Handler, names: str) -> dict[str, Handler]:
    """Rows of a table for keys of which the same becomes; a name that ends in `*` is a family of
    keys.
    """
    return dict.fromkeys(names.split(), handler)


def table(fate: Callable[[str], Handler], rows: Mapping[str, str]) -> dict[str, Handler]:
    """Rows of one fate: reason -> the keys, as `each` takes them."""
    return {
        name: handler
        for why, names in rows.items()
        for name, handler in each(fate(why), names).items()
    }


def to(target: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Handler:
    return lambda draft, given: draft.set(given, target, convert(given.value), note)


def number(target: str) -> Handler:
    return to(target, as_number)


def carried(**sections: str) -> dict[str, Handler]:
    """Rows of keys that keep their value, by section: `train="seed clip=max_grad_norm"`,
    ours=theirs, or one word for both.
    """
    pairs = [
        (section, *word.partition("="))
        for section, words in sections.items()
        for word in words.split()
    ]
    return {theirs or ours: _typed(f"{section}.{ours}") for section, ours, _, theirs in pairs}


def _typed(target: str) -> Handler:
    """The value as the schema types `target`: a whole number from 1 on, a number, a truth, text, or
    as it stands.
    """

    def handler(draft: Draft, given: Given) -> None:
        if takes(target, "integer"):
            count(target)(draft, given)
        elif takes(target, "number"):
            number(target)(draft, given)
        elif takes(target, "boolean"):
            draft.set(given, target, is_on(given.value))
        else:
            as_it_is = (
                isinstance(given.value, bool) or takes(target, "array") or takes(target, "object")
            )
            # a truth is no text: the schema refuses it
            draft.set(given, target, given.value if as_it_is else str(given.value))

    return handler


def either(target: str, yes: Any, no: Any) -> Handler:
    """One value where the key is on, another where it is off."""
    return to(target, lambda value: yes if is_on(value) else no)


def names(target: str) -> Handler:
    """A list, or text with commas."""
    return to(
        target,
        lambda value: (
            [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        ),
    )


def count(target: str) -> Handler:
    """A whole number from 1 on; 0 and -1 leave the default."""

    def handler(draft: Draft, given: Given) -> None:
        value = as_number(given.value)
        if value <= 0:
            draft.no_effect(given, f"{given.value}: the default")
        elif value != int(value):
            draft.not_offered(given, f"a share of the run; {target} is a number of steps")
        else:
            draft.set(given, target, int(value))

    return handler


def word(
    target: str, words: Mapping[str, Any], otherwise: str, *, fate: str = "not_offered"
) -> Handler:
    """The word's counterpart (`value`, or `(value, note)`); where there is none, `otherwise` with
    that fate.
    """

    def handler(draft: Draft, given: Given) -> None:
        said = re.sub(r"^.*(?:OptimizerNames|SchedulerType)\.", "", str(given.value)).lower()
        if said not in words:
            getattr(draft, fate)(given, otherwise)
        elif isinstance(words[said], tuple):
            draft.set(given, target, *words[said])
        else:
            draft.set(given, target, words[said])

    return handler


def when_on(target: str, value: Any, off: str = "switched off", note: str = "") -> Handler:
    """Sets `target` where the key is on."""
    return lambda draft, given: (
        draft.set(given, target, value, note) if is_on(given.value) else draft.no_effect(given, off)
    )


def where(key: str, words: str, then: Handler, otherwise: str) -> Handler:
    """`then` where another key of the file has one of these words (`on`: is switched on; none: is
    not set); else no effect.
    """

    def handler(draft: Draft, given: Given) -> None:
        if words == "on":
            holds = is_on(draft.keys.get(key))
        else:
            holds = draft.said(key) in (words.split() or [""])
        then(draft, given) if holds else draft.no_effect(given, otherwise)

    return handler


def when(holds: Callable[[Draft, Given], object], then: Handler, otherwise: Handler) -> Handler:
    """`then` where what the file says `holds`."""
    return lambda draft, given: (then if holds(draft, given) else otherwise)(draft, given)


# data.chat_template's names -> other tools' names of the same template
_TEMPLATE_WORDS = {
    "chatml": "chatml chatmltemplate",
    "llama3": "llama3 llama_3",
    "gemma": "gemma gemma2 gemma_2 gemma3 gemma_3",
    "mistral": "mistral mistral_v1 mistralchattemplate",
    "zephyr": "zephyr",
}
TEMPLATES = {theirs: ours for ours, words in _TEMPLATE_WORDS.items() for theirs in words.split()}
_TEMPLATES_WITHOUT_TOKENS = ("mistral", "zephyr")
_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


def template(draft: Draft, given: Given) -> None:
    """A chat template by its name or file; a template's text has no setting."""
    value = str(given.value)
    name = re.sub(r"[-. ]", "_", value.lower())
    is_text = "{%" in value or "{{" in value
    if given.value in OFF or name in ("tokenizer_default", "jinja"):
        draft.no_effect(given, "the tokenizer's own template, unless data.chat_template is set")
    elif is_text or not isinstance(given.value, str):
        draft.not_offered(
            given,
            "data.chat_template: a file with this text; without it the tokenizer's own template is"
            " used",
        )
    elif value.endswith(_TEMPLATE_FILES):
        draft.set(given, "data.chat_template", value)
    elif name in TEMPLATES:
        ours = TEMPLATES[name]
        tokens = "; model.add_tokens, where the tokenizer lacks its tokens"
        if ours in _TEMPLATES_WITHOUT_TOKENS:
            tokens = ""
        draft.set(given, "data.chat_template", ours, f"Isotype's own of this name{tokens}")
    else:
        draft.not_offered(
            given,
            f"data.chat_template is {', '.join(_TEMPLATE_WORDS)} or a Jinja file; the tokenizer's"
            f" own template is used, or a plain one where it has none, not {value}",
        )


def settle_template(draft: Draft) -> None:
    """Leaves out a chat template where every row is plain text: a run refuses it there."""
    sources = draft.settings.get("data.train")
    formats = {
        source.get("format") if isinstance(source, dict) else None
        for source in (sources if isinstance(sources, list) else ())
    }
    is_text = draft.settings.get("data.format") == "text" or formats == {"text"}
    if is_text and draft.settings.pop("data.chat_template", None) is not None:
        draft.notes.append("data.chat_template is left out: plain text is learnt as it is")


def always(target: str, value: Any, note: str = "") -> Handler:
    """The same value, whatever the key's is."""
    return to(target, lambda _: value, note)


def no_effect(why: str) -> Handler:
    return lambda draft, given: draft.no_effect(given, why)


def changed(note: str) -> Handler:
    """A note, in which {} is the value."""
    return lambda draft, given: draft.changed(given, note.replace("{}", str(given.value)))


def not_offered(use: str) -> Handler:
    """Only where the key is switched on; off, it changes nothing."""
    return lambda draft, given: (
        draft.no_effect(given, "switched off")
        if given.value in OFF or given.value in ([], {})
        else draft.not_offered(given, use)
    )


def only(words: str, why: str, use: str) -> Handler:
    """The one way that is offered has no effect; others are not offered: a note, in which {} is the
    value.
    """

    def handler(draft: Draft, given: Given) -> None:
        if str(given.value) in words.split():
            draft.no_effect(given, why)
        else:
            draft.not_offered(given, use.replace("{}", str(given.value)))

    return handler


_NOT_PAGED = "not paged: states stay on the GPU"
# ours -> other tools' words
_OPTIMIZER_WORDS = {
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
OPTIMIZERS = {
    theirs: ours for ours, words in _OPTIMIZER_WORDS.items() for theirs in words.split()
} | {
    **dict.fromkeys(
        ("paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.pagedadamw", "bnb-adamw-paged"),
        ("adamw", _NOT_PAGED),
    ),
    **dict.fromkeys(("paged_lion_32bit", "bnb-lion-paged"), ("lion", _NOT_PAGED)),
    **dict.fromkeys(
        ("paged_lion_8bit", "pagedlion8bit", "bnb-lion8bit-paged"), ("lion8bit", _NOT_PAGED)
    ),
}
optimizer = word("train.optimizer", OPTIMIZERS, OTHER_OPTIMIZERS)


def settle_optimizer(draft: Draft) -> None:
    """Leaves out or replaces what an optimizer refuses beside it, with a note for each."""
    name = draft.settings.get("train.optimizer", "adamw")
    settings = draft.settings
    asked = draft.sources.get("train.optimizer")
    if settings.get("precision.preset") == "bf16-pure" and name != "adamw":
        # PR018: the others round to the nearest and take bf16 gradients
        name = settings["train.optimizer"] = "adamw"
        why = "the others cannot round bf16 weights stochastically"
        draft.outcomes = [
            (
                Outcome(asked, Fate.CHANGED, "train.optimizer: adamw", why)
                if asked is not None and outcome.given is asked
                else outcome
            )
            for outcome in draft.outcomes
        ]
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


def start(draft: Draft, given: Given) -> None:
    """PEFT's `init_lora_weights`."""
    word = str(given.value).lower()
    if word == "true":
        draft.no_effect(given, "the default")
    elif word.partition("_niter_")[0] in ("pissa", "olora", "orthogonal"):
        draft.set(
            given,
            "adapter.start",
            word.partition("_niter_")[0],
            "its start is an exact SVD" if "_niter_" in word else "",
        )
    else:
        draft.not_offered(given, "adapter.start is default, orthogonal, pissa or olora")


def schedule_of(words: Mapping[str, Any]) -> Handler:
    choose = word(
        "train.schedule", words, "train.schedule is cosine, linear, constant or wsd; cosine is used"
    )

    def handler(draft: Draft, given: Given) -> None:
        choose(draft, given)
        # this schedule has no warm-up, and ignores warmup_ratio
        if str(given.value).lower().endswith("constant"):
            draft.settings["train.warmup"] = 0

    return handler


schedule = schedule_of(SCHEDULES)


def attention(draft: Draft, given: Given) -> None:
    words = {
        **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2"), "flash"),
        "sdpa": "sdpa",
        **dict.fromkeys(("eager", "disabled"), "eager"),
        **dict.fromkeys(("flex_attention", "flex"), "flex"),
    }
    if str(given.value).lower() in ("auto", "none", "null"):
        draft.no_effect(given, "the default, sdpa")
    else:
        word(
            "model.attention", words, "model.attention is sdpa, eager, flash or flex; sdpa is used"
        )(draft, given)


def trackers(draft: Draft, given: Given) -> None:
    asked = [
        str(one).lower()
        for one in (given.value if isinstance(given.value, list) else [given.value])
    ]
    known = [one for one in asked if one in ("tensorboard", "wandb")]
    other = [one for one in asked if one not in ("tensorboard", "wandb", "none", "[]", "null")]
    if known:
        draft.set(given, "run.trackers", known, f"{', '.join(other)}: not offered" if other else "")
    elif other and other != ["all"]:
        draft.not_offered(
            given, "run.trackers is tensorboard or wandb; metrics.jsonl is always written"
        )
    else:
        draft.no_effect(given, "metrics.jsonl and report.html are always written")


def held_out(draft: Draft, given: Given) -> None:
    """`val_set_size`, `val_size`: a share of the rows; a number of rows is not offered."""
    value = as_number(given.value or 0)
    if value >= 1:
        draft.not_offered(given, "data.eval_split is a share of the rows; data.eval names a file")
    else:
        draft.set(given, "data.eval_split", value)


def targets(draft: Draft, given: Given) -> None:
    value = given.value
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if value in ("all", "all-linear", ["all-linear"], ["all"]):
        value = "all-linear"
    draft.set(
        given,
        "adapter.targets",
        value.split() if isinstance(value, str) and value != "all-linear" else value,
    )
