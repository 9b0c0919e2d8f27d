"""Translates a configuration file of another tool into a configuration of Isotype. Each key is
translated by the handler that the table of the tool contains for this key. The precision is chosen
from several keys together. At the end the translated configuration is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..config.keys import key_schemas, section_names
from ..config.load import parse_config
from ..config.yaml_text import write_value
from ..doctor.check import check
from ..doctor.check.settings import Record
from ..errors import UsageError
from ..finding import Finding, Severity, sort_findings
from . import (
    ai_toolkit,
    axolotl,
    diffusers_scripts,
    diffusion_pipe,
    hugging_face,
    kohya,
    llamafactory,
    musubi,
    onetrainer,
    simpletuner,
    torchtune,
)
from .pictures import redact_text
from .source import Source, read_source
from .transforms import (
    LAUNCHER,
    LAUNCHER_PREFIX,
    OFF_VALUES,
    Computed,
    ConfigDraft,
    Fate,
    Handler,
    Outcome,
    SourceKey,
    resolve_optimizer_conflicts,
    resolve_template_conflict,
)

# name of a tool -> its module with HANDLERS (key -> its handler), refusal_reason (why a source cannot
# be translated) and add_defaults (adds the tool's defaults)
TOOLS: dict[str, Any] = {
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "trl": hugging_face,
    "hf": hugging_face,
    "torchtune": torchtune,
    "unsloth": hugging_face,
    "simpletuner": simpletuner,
    "kohya": kohya,
    "ai-toolkit": ai_toolkit,
    "onetrainer": onetrainer,
    "diffusers": diffusers_scripts,
    "musubi-tuner": musubi,
    "diffusion-pipe": diffusion_pipe,
}
# tools whose tables choose the preset themselves; for other tools it follows from the record of
# `isotype doctor check`
_OWN_PRECISION_TOOLS = (
    kohya,
    ai_toolkit,
    onetrainer,
    diffusers_scripts,
    musubi,
    diffusion_pipe,
)
_PICTURE_TOOLS = (simpletuner, *_OWN_PRECISION_TOOLS)
# internal name of a tool -> the name in messages
_TOOL_TITLES = {
    "trl": "TRL",
    "hf": "Hugging Face TrainingArguments",
    "llamafactory": "LLaMA-Factory",
    "unsloth": "an Unsloth notebook",
    "simpletuner": "SimpleTuner",
    "kohya": "kohya's sd-scripts",
    "onetrainer": "OneTrainer",
    "diffusers": "a script of diffusers",
}


@dataclass
class Translation:
    """Contains the result of translating a file.

    text      the configuration as YAML; a comment after each setting names the key from which it
              was translated
    outcomes  the outcome of each key, in the order of the file
    findings  contradictions that `isotype doctor check` found in the file
    notes     notes that do not belong to a single key
    """

    tool: str
    file: str
    text: str
    outcomes: list[Outcome]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        counter = Counter(outcome.fate for outcome in self.outcomes)
        return {str(fate): counter[fate] for fate in Fate}


def translate(path: Path | str, tool: str | None = None) -> Translation:
    """Translates a file of another tool. Raises UsageError if the file cannot be read, the tool is
    unknown, or Isotype does not offer the training method.
    """
    path = Path(path)
    source = read_source(path, tool)
    if (
        source.tool is None
        and source.called_names
        and (reason := hugging_face.refusal_reason(source))
    ):
        raise UsageError(f"{path}: {reason}")
    name = _choose_tool(source, tool)
    module = TOOLS[name]
    if reason := module.refusal_reason(source):
        raise UsageError(f"{path}: {reason}")
    draft = ConfigDraft(source_values=_resolve_references(source), folder=str(path.parent))
    for source_key in source.keys:
        _translate_key(
            draft,
            replace(source_key, value=draft.source_values[source_key.name]),
            module.HANDLERS,
            name,
        )
    module.add_defaults(draft, source)
    findings: list[Finding] = []
    if module not in _OWN_PRECISION_TOOLS:
        findings, record = _check_source(path, module is torchtune, source)
        if module is simpletuner:
            _refuse_contradictions(path, findings)
        _set_precision(draft, record)
    resolve_optimizer_conflicts(draft)
    resolve_template_conflict(draft)
    _add_required_settings(draft, "images.train" if module in _PICTURE_TOOLS else "data.train")
    order = {
        (source_key.name, source_key.line): index for index, source_key in enumerate(source.keys)
    }
    outcomes = sorted(
        draft.outcomes,
        key=lambda outcome: order.get(
            (outcome.source_key.name, outcome.source_key.line), len(order)
        ),
    )
    text = _write_yaml(draft, source, _TOOL_TITLES.get(name, name))
    try:
        parse_config(text, "the configuration made of it")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return Translation(name, str(path), text, outcomes, findings, draft.notes)


def _choose_tool(source: Source, requested: str | None) -> str:
    if requested is not None and requested not in TOOLS:
        near = get_close_matches(requested, TOOLS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TOOLS)}"
        raise UsageError(f"--from {requested}: not a tool that isotype import reads; {hint}")
    if requested is None and source.tool == "isotype":
        raise UsageError(
            f"{source.file}: is a configuration of Isotype: isotype plan {source.file}"
        )
    if requested is None and source.tool not in TOOLS:
        if source.tool:
            description = f"looks like {source.tool}, which"
        else:
            description = "has no key of a tool that"
        raise UsageError(
            f"{source.file}: {description} isotype import does not translate",
            fix=f"--from names the tool: {', '.join(TOOLS)}",
        )
    if requested and source.tool in TOOLS and TOOLS[requested] is not TOOLS[source.tool]:
        raise UsageError(
            f"{source.file}: --from {requested}, and the keys are those of {source.tool}",
            fix=f"--from {source.tool}",
        )
    if not source.keys:
        raise UsageError(f"{source.file}: no training setting found in it")
    return requested or str(source.tool)


def _resolve_references(source: Source) -> dict[str, Any]:
    """Returns the value of each key. References such as `${output_dir}` are replaced by the value
    of the key that they name. (torchtune's files have such references, because torchtune uses
    OmegaConf.)
    """
    values = {source_key.name: source_key.value for source_key in source.keys}
    for name, value in values.items():
        if isinstance(value, str) and "${" in value:
            for referenced, replacement in list(values.items()):
                value = value.replace(f"${{{referenced}}}", str(replacement))
            values[name] = value
    return values


def _translate_key(
    draft: ConfigDraft, source_key: SourceKey, table: Mapping[str, Handler], tool: str
) -> None:
    if source_key.name.startswith(LAUNCHER_PREFIX):
        table = {**LAUNCHER, **table}
    handler = _find_handler(source_key.name, table)
    if handler is None:
        near = get_close_matches(source_key.name, table, n=1, cutoff=0.85)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"what it does is in {_TOOL_TITLES.get(tool, tool)}'s documentation; nothing came of it"
        draft.report_not_offered(source_key, f"isotype import does not know this key: {hint}")
    elif source_key.value is None:
        draft.report_no_effect(source_key, "not set")
    elif source_key.value is Computed:
        computed_key = replace(source_key, value="computed")
        # `bf16=is_bfloat16_supported()` does the same as `precision.preset: auto`
        if source_key.name in ("bf16", "fp16", "dtype", "torch_dtype"):
            draft.report_no_effect(
                computed_key, "known when the program runs; precision.preset decides by the device"
            )
        else:
            draft.report_not_offered(
                computed_key, "its value is only known when the program runs: set it by hand"
            )
    else:
        try:
            handler(draft, source_key)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            draft.report_not_offered(
                source_key,
                f"{_shorten(source_key.value)} is not a value that isotype import understands: set it by"
                " hand",
            )


def _find_handler(name: str, table: Mapping[str, Handler]) -> Handler | None:
    """Returns the handler of a key. The table is searched first for the key itself, then for a key
    above it (`profiler` for `profiler.enabled`), and last for a pattern (`galore_*` for
    `galore_rank`).
    """
    prefix = name
    while prefix:
        if prefix in table:
            return table[prefix]
        prefix = prefix.rpartition(".")[0]
    return next(
        (
            handler
            for key, handler in table.items()
            if key.endswith("*") and name.startswith(key[:-1])
        ),
        None,
    )


def _check_source(
    path: Path, is_torchtune: bool, source: Source
) -> tuple[list[Finding], Record | None]:
    """Runs `isotype doctor check` on the file. Returns its warnings and errors, and the precision
    that it determined for the run.
    """
    checked = check([source.config or str(path)])
    findings = [finding for finding in checked.findings if finding.severity > Severity.NOTE]
    record = checked.records[0] if checked.records else None
    if record is not None and is_torchtune and "qlora" in str(source.get("model._component_")):
        record.set("storage", "nf4", "qlora_ components quantise the base")
    return sort_findings(map(_redact_finding, findings)), record


def _redact_finding(finding: Finding) -> Finding:
    texts: dict[str, Any] = {
        finding_field.name: redact_text(text)
        for finding_field in fields(finding)
        if finding_field.name != "code"
        and isinstance(text := getattr(finding, finding_field.name), str)
    }
    return replace(
        finding, **texts, details=tuple((name, redact_text(text)) for name, text in finding.details)
    )


def _refuse_contradictions(path: Path, findings: list[Finding]) -> None:
    """Raises UsageError if `isotype doctor check` found errors. The settings of the file then
    contradict each other, and the translation would have to guess which of them is meant.
    """
    errors = [
        finding
        for finding in findings
        if finding.severity == Severity.ERROR and finding.code not in simpletuner.HARMLESS_CODES
    ]
    if errors:
        raise UsageError(
            "\n".join(
                f"{finding.place.file or path}:{finding.place.line or 1}: {finding.code} {finding.message}; {finding.fix}"
                for finding in errors
            ),
            fix=f"mend these, then import again; isotype doctor check {path} explains them",
        )


def _set_precision(draft: ConfigDraft, record: Record | None) -> None:
    """Sets the precision preset that corresponds to the settings of the other tool. The function
    uses the precision that `isotype doctor check` determined (`record`). Then the function reports
    how each key about the precision was translated.
    """
    chosen, note = _choose_precision(draft, record)
    draft.settings.update(chosen)
    result = (
        ", ".join(f"{key}: {value}" for key, value in chosen.items()) or "precision.preset: auto"
    )
    for source_key in draft.precision_keys:
        if source_key.value in OFF_VALUES:
            draft.outcomes.append(Outcome(source_key, Fate.NO_EFFECT, note="switched off"))
        else:
            draft.outcomes.append(
                Outcome(source_key, Fate.CHANGED, result, _precision_note(source_key.name, note))
            )


def _precision_note(name: str, note: str) -> str:
    notes = {
        "tf32": (
            "fp32 products use TF32 if PyTorch's setting allows it; Isotype does not change that"
            " setting"
        ),
        "bnb_4bit_use_double_quant": "nf4 with double quantisation",
        "fp8": "fp8 is not offered: products are bf16",
        "load_in_fp8": "fp8 is not offered: products are bf16",
        "bnb_4bit_quant_type": "always nf4",
    }
    return notes.get(name.rpartition(".")[2], note)


def _choose_precision(draft: ConfigDraft, record: Record | None) -> tuple[dict[str, str], str]:
    """Returns the settings for the section `precision`, and the reason for them."""
    if record is None:
        return {}, _PRESET_REASONS[""]
    has_adapter = draft.settings.get("adapter.kind", "lora") == "lora"
    storage = record.value("storage") or ""
    compute = record.value("compute")
    is_four_bit = "4" in storage and "int8" not in storage
    if is_four_bit and not has_adapter:
        return {"precision.preset": "bf16-mixed"}, "a 4-bit base is trained through an adapter only"
    if is_four_bit and compute == "fp16":
        roles = {
            "precision.compute": "fp16",
            "precision.loss_scaling": "dynamic",
            "precision.generate": "fp16",
        }
        return {"precision.preset": "nf4-lora", **roles}, "4-bit base, fp16 products"
    if is_four_bit:
        preset = "nf4-lora"
    else:
        preset = _choose_preset(
            compute, record.value("trained"), record.value("parameters"), has_adapter=has_adapter
        )
    settings = {"precision.preset": preset} if preset else {}
    if "int8" in storage and has_adapter:
        settings["precision.base"] = "int8"
        return (
            settings,
            (
                f"{_PRESET_REASONS[preset]}; the base is int8 with one scale per channel, which does not round"
                " activations"
            ),
        )
    return settings, _PRESET_REASONS[preset]


_PRESET_REASONS = {
    "": "from the device",
    "nf4-lora": "nf4 base, fp32 adapters, bf16 products",
    "fp16-mixed": "fp32 trained weights, fp16 products, loss scaling",
    "bf16-lora": "bf16 base and products, fp32 adapters",
    "bf16-pure": "weights, gradients and optimizer states in bf16; updates are rounded stochastically, there to"
    " the nearest",
    "bf16-mixed": "fp32 weights, bf16 products",
    "fp32": "everything fp32",
}


def _choose_preset(
    compute: str | None, trained: str | None, parameters: str | None, *, has_adapter: bool
) -> str:
    """Chooses a preset from the dtypes of matrix products, of the trained weights and of the loaded
    weights. Returns "" if the preset should depend on the device.
    """
    if compute == "fp16":
        return "fp16-mixed"
    if has_adapter and "bf16" in (compute, parameters, trained):
        return "bf16-lora"
    if not has_adapter and "bf16" in (trained, compute):
        return "bf16-pure" if trained == "bf16" else "bf16-mixed"
    if "fp32" in (compute, parameters, *([] if has_adapter else [trained])):
        return "fp32"
    return ""


def _add_required_settings(draft: ConfigDraft, data_key: str) -> None:
    """Isotype requires some settings that the file may not have. Adds such settings with example
    values, and messages that ask the user to replace these values.
    """
    if "model.name" not in draft.settings:
        draft.settings["model.name"] = "path/to/model"
        draft.notes.append("model.name: the file names no model; put its folder or hub id there")
    if data_key not in draft.settings:
        if data_key == "data.train":
            draft.settings[data_key] = "path/to/data.jsonl"
        else:
            draft.settings[data_key] = "path/to/pictures"
        hub = " or hf:NAME" if data_key == "data.train" else ""
        draft.notes.append(f"{data_key}: the file names no data; put a file, a folder{hub} there")
    if draft.settings.get("data.stream") and "train.steps" not in draft.settings:
        draft.settings["train.steps"] = 1000
        draft.notes.append(
            "train.steps: a stream has no end; 1000 stands there for the number that you mean"
        )
    if "{" in str(draft.settings.get("run.folder", "")):
        draft.settings.pop("run.folder")
    for key in ("train.batch_size", "train.accumulate"):
        if key in draft.settings:
            draft.settings[key] = max(1, int(draft.settings[key]))


def _write_yaml(draft: ConfigDraft, source: Source, tool: str) -> str:
    """Writes the YAML. The sections are in the order of Isotype's schema. A comment after each
    setting names the key and the line from which it was translated.
    """
    lines = [
        f"# From {source.file} ({tool}), by `isotype import`. See what it would do: isotype plan"
        " FILE"
    ]
    for section in section_names():
        settings = {
            key: draft.settings[key]
            for key in key_schemas()
            if key.startswith(f"{section}.") and key in draft.settings
        }
        if not settings:
            continue
        lines += ["", f"{section}:"]
        for key, value in settings.items():
            setting = f"  {key.partition('.')[2]}: {write_value(value)}"
            origin = draft.sources.get(key)
            comment = f"{tool}'s default" if key in draft.defaults else ""
            if origin is not None:
                line = f", line {origin.line}" if origin.line else ""
                comment = f"{origin.name_in_file or origin.name}{line}"
            elif key.startswith("precision."):
                comment = ", ".join(
                    sorted(
                        {
                            source_key.name_in_file or source_key.name
                            for source_key in draft.precision_keys
                            if source_key.value not in OFF_VALUES
                        }
                    )
                )
            if comment:
                setting = f"{setting:<40}  # {' '.join(comment.split())}"
            lines.append(setting)
    return "\n".join(lines) + "\n"


def _shorten(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
