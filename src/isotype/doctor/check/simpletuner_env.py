"""SimpleTuner's config.env, as a shell reads it and as SimpleTuner's own line reader does; where they differ on precision is a finding."""

from __future__ import annotations

from .readers import shell
from .settings import Document

# Variables that SimpleTuner maps to arguments, of those that precision rests on.
MAPPED = {
    "MODEL_TYPE": "model_type", "MODEL_FAMILY": "model_family", "MODEL_NAME": "pretrained_model_name_or_path",
    "MIXED_PRECISION": "mixed_precision", "OPTIMIZER": "optimizer", "LEARNING_RATE": "learning_rate",
    "BASE_MODEL_PRECISION": "base_model_precision", "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps", "USE_EMA": "use_ema",
    "ALLOW_TF32": "allow_tf32", "USE_DORA": "use_dora", "LORA_TYPE": "lora_type", "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "ACCELERATE_EXTRA_ARGS": "accelerate_extra_args",
}  # fmt: skip
_ONLY_HERE = {
    "TRAINER_EXTRA_ARGS", "BASE_MODEL_PRECISION", "PURE_BF16", "TRAINING_NUM_PROCESSES", "VALIDATION_PROMPT", "MODEL_FAMILY", "FLUX",
    "DATALOADER_CONFIG",
}  # fmt: skip


def is_config_env(names: set[str]) -> bool:
    return bool(names & _ONLY_HERE) or {"MODEL_TYPE", "MIXED_PRECISION"} <= names or {"OPTIMIZER", "MIXED_PRECISION"} <= names


def read_config_env(text: str, file: str) -> Document | None:
    """The document, or None when the variables are not SimpleTuner's.

    attributes  `own`: variable -> the value its own reader takes, where the shell's differs
    """
    variables = shell.read(text).variables
    own = shell.read_line_by_line(text)
    if not is_config_env(set(variables) | set(own)):
        return None
    document = Document("simpletuner", file, attributes={"reader": "config.env"})
    for name, assignment in variables.items():
        document.add(f"variable.{name}", assignment.value, assignment.line, written=name)
        if name in MAPPED and assignment.value != "":
            document.add(MAPPED[name], assignment.value, assignment.line, written=name)
    extra = variables.get("TRAINER_EXTRA_ARGS")
    if extra:
        for key, value in shell.arguments(extra.value.split()).items():
            document.add(key, value, extra.line, written=f"TRAINER_EXTRA_ARGS:--{key}")
    document.attributes["own"] = {
        name: (assignment.value, own[name].value, assignment.line)
        for name, assignment in variables.items()
        if name in own and " ".join(assignment.value.split()) != own[name].value and (name in MAPPED or name == "TRAINER_EXTRA_ARGS")
    }
    return document
