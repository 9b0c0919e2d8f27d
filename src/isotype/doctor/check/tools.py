"""Identifies the tool to which the settings of a file belong. `tools.txt` lists the keys of each
tool. A file gets three points for each distinctive key of a tool and one point for each ordinary
key. The tool with the most points is chosen.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple


class ToolKeys(NamedTuple):
    """The keys of one tool in `tools.txt`.

    distinctive  keys that few other tools have
    ordinary     keys that other tools have too
    read         further keys that rules use
    """

    distinctive: list[str]
    ordinary: list[str]
    read: list[str]


def _load_tool_keys() -> dict[str, ToolKeys]:
    table: dict[str, ToolKeys] = {}
    keys: list[str] = []
    for line in Path(__file__).with_name("tools.txt").read_text(encoding="utf-8").splitlines()[1:]:
        tokens = line.split()
        if not line.startswith(" "):
            table[tokens[0]] = tool = ToolKeys([], [], [])
        elif tokens[0].endswith(":"):
            keys = getattr(tool, tokens[0].removesuffix(":"))
            keys += tokens[1:]
        else:
            keys += tokens
    return table


TOOL_KEYS = _load_tool_keys()
# tool -> the keys that rules may use
RULE_KEYS = {tool: frozenset(chain(*keys)) for tool, keys in TOOL_KEYS.items()}
# Keys of tools that the table does not contain. A file with such a key belongs to one of these tools,
# even if it shares its other keys with a tool of the table.
_KEYS_OF_UNKNOWN_TOOLS = {
    "actor_rollout_ref",  # verl
    "exp_manager",  # NeMo
    "model.megatron_amp_O2",
    "model.tensor_model_parallel_size",
    "pipeline_stages",  # diffusion-pipe
}
_ISOTYPE_SECTIONS = {"model", "data", "adapter", "precision", "train", "run"}
# if several tools have the same number of known keys, the first of them here is chosen
_TIE_ORDER = (
    "model",
    "checkpoint",
    "peft",
    "fsdp",
    "deepspeed",
    "accelerate",
    "kohya",
    "llamafactory",
    "axolotl",
    "hf",
    "simpletuner",
)


def identify_tool(data: Any, name: str = "") -> str | None:
    """Returns the name of the tool to which these settings belong, or None if they are not about
    training. If the name of the file is typical of a tool, this tool gets extra points.
    """
    if not isinstance(data, dict) or not data:
        return None
    if _is_isotype_config(data):
        return "isotype"
    if _is_environment(data):
        return "env"
    if _mentions_component(data):
        return "torchtune"
    keys = _collect_keys(data)
    if keys & _KEYS_OF_UNKNOWN_TOOLS:
        return None
    scores = _score_tools(data, keys, name.lower())
    best = max(scores.values())
    if best >= 3 and not _has_enough_keys(
        data, keys, [tool for tool, score in scores.items() if score == best]
    ):
        return None
    if best == 0 or (best == 1 and "mixed_precision" not in keys):
        if keys & {"dtype", "torch_dtype", "model_name_or_path"}:
            return "model"
        return None
    is_model_file = best in (scores["model"], scores["peft"])
    if is_model_file and keys & {"bf16", "fp16"} and "output_dir" in keys:
        # a flat file with the arguments of a trainer and of its model, as TRL's scripts use it
        return "hf"
    if best == 1:
        return "accelerate"
    best_tools = [tool for tool, score in scores.items() if score == best]
    return next((tool for tool in _TIE_ORDER if tool in best_tools), best_tools[0])


# in a file with at least this many keys, the tool is recognised only if it
_MANY_KEYS = 12
_MIN_KNOWN_SHARE = 0.25  # knows this share of the keys,
_MIN_DISTINCTIVE = 4  # or this many keys that belong to no other tool


def _has_enough_keys(data: dict[str, Any], keys: set[str], tools: list[str]) -> bool:
    """True if enough keys of the file are settings of one of the tools. Only large files are
    checked. If a large file shares only a few keys with a tool, it may belong to a tool that is not
    in the table.
    """
    if len(data) < _MANY_KEYS or {"checkpoint", "model"} & set(tools):
        return True
    for tool in tools:
        distinctive, ordinary, read = (set(names) for names in TOOL_KEYS[tool])
        known = {key.partition(".")[0] for key in keys & (distinctive | ordinary | read)}
        has_share = len(known) >= _MIN_KNOWN_SHARE * len(data)
        if has_share or len(keys & distinctive) >= _MIN_DISTINCTIVE:
            return True
    return False


def _collect_keys(data: dict[str, Any]) -> set[str]:
    """Returns the top-level keys of the tree, and the keys of the next level as `outer.inner`."""
    keys = {str(key).removeprefix("--") for key in data}
    for key, value in data.items():
        if isinstance(value, dict):
            keys |= {f"{key}.{inner}" for inner in value}
    return keys


def _score_tools(data: dict[str, Any], keys: set[str], file_name: str) -> dict[str, int]:
    """Returns for each tool how many points it gets for the keys of a file. `file_name` must be in
    lower case.
    """
    scores = {
        tool: 3 * len(keys & set(tool_keys.distinctive)) + len(keys & set(tool_keys.ordinary))
        for tool, tool_keys in TOOL_KEYS.items()
    }
    if sum(str(key).startswith("--") for key in data) * 2 > len(data):
        scores["simpletuner"] += 6
    if "accelerate" in file_name or file_name == "default_config.yaml":
        scores["accelerate"] += 2
    if "deepspeed" in file_name or file_name.startswith(("ds_", "zero")):
        scores["deepspeed"] += 2
    if not keys & {*TOOL_KEYS["deepspeed"].distinctive, "bf16", "fp16", "amp", "train_batch_size"}:
        scores["deepspeed"] = 0  # other tools clip and accumulate gradients too
    if "base_model" not in keys and scores["axolotl"] < 6:
        scores["axolotl"] = 0
    if not keys & {"checkpointer", "tokenizer.path"}:
        scores["torchtune"] = 0  # torchtune's other keys are too common
    if not _is_torchtitan(data):
        scores["torchtitan"] = 0
    if not _is_aitoolkit(data):
        scores["aitoolkit"] = 0
    if not keys & {"training_method", "train_dtype"}:
        scores["onetrainer"] = 0
    if "peft_type" not in keys and scores["peft"] <= 3:
        scores["peft"] = 0  # other tools have a `lora_alpha` too
    if not keys & _LLAMAFACTORY_KEYS:
        scores["llamafactory"] = 0
    if keys & {"finetuning_type", "pure_bf16"}:
        scores["llamafactory"] += 10
    elif keys & {"train_type", "tuner_type"}:
        # ms-swift has a `template` and a `lora_rank` too; its arguments are those of the Trainer
        scores["llamafactory"] = 0
        scores["hf"] += 3
    return scores


_LLAMAFACTORY_KEYS = {
    "finetuning_type",
    "pure_bf16",
    "quantization_bit",
    "upcast_layernorm",
    "template",
    "stage",
}


def _is_isotype_config(data: dict[str, Any]) -> bool:
    if not {str(key).removeprefix("--") for key in data} <= _ISOTYPE_SECTIONS:
        return False
    has_sections = all(isinstance(value, dict) or value is None for value in data.values())
    return has_sections and not _is_torchtitan(data)


def _is_environment(data: dict[str, Any]) -> bool:
    if any(isinstance(value, dict) for value in data.values()):
        return False
    return all(str(key).isupper() for key in data)


def _is_torchtitan(data: dict[str, Any]) -> bool:
    """True if the file has the sections of torchtitan, such as a table `training`."""
    training = data.get("training")
    if not isinstance(training, dict):
        return False
    has_precision = any(str(key).startswith("mixed_precision") for key in training)
    has_job = isinstance(data.get("job"), dict)
    return has_precision or has_job or "parallelism" in data


def _is_aitoolkit(data: dict[str, Any]) -> bool:
    """True if the file is a configuration file of ai-toolkit (a job). Such a file has a word as the
    value of `job`, and a list of processes.
    """
    config = data.get("config")
    return "job" in data and isinstance(config, dict) and isinstance(config.get("process"), list)


def _mentions_component(node: Any) -> bool:
    if isinstance(node, dict):
        return any(
            str(v).startswith("torchtune.") for k, v in node.items() if k == "_component_"
        ) or any(_mentions_component(value) for value in node.values())
    return False
