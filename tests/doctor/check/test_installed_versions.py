"""What rules and records say of a library holds for its installed version: a newer one that does otherwise fails here.

The sources are read, not imported: importing a trainer takes seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

# what check says -> library, file, a pattern that its source holds (with "not ", that it does not)
CLAIMS = {
    "CF040: the arguments are gone": (
        "transformers",
        "training_args.py",
        r"not (?m)^    (?:half_precision_backend|fp16_backend|fp16_opt_level|no_cuda)\s*:",
    ),
    "CF040: use_cpu replaces no_cuda": ("transformers", "training_args.py", r"(?m)^    use_cpu\s*:"),
    "CF042: one quantisation only": ("transformers", "utils/quantization_config.py", r"both True, but only one can be used"),
    "CF010: products in fp32 unless told otherwise": (
        "transformers",
        "utils/quantization_config.py",
        r"bnb_4bit_compute_dtype is None:\s+self\.bnb_4bit_compute_dtype = torch\.float32",
    ),
    "CF010: the 4-bit type is fp4": ("transformers", "utils/quantization_config.py", r"bnb_4bit_quant_type=\"fp4\""),
    "CF015: 4-bit weights are stored as uint8": (
        "transformers",
        "utils/quantization_config.py",
        r"bnb_4bit_quant_storage is None:\s+self\.bnb_4bit_quant_storage = torch\.uint8",
    ),
    "CF004: a checkpoint's dtype is the default": ("transformers", "modeling_utils.py", r"dtype = \"auto\""),
    "record: PEFT makes adapters fp32": ("peft", "mapping_func.py", r"autocast_adapter_dtype: bool = True"),
    "record: SFTConfig is bf16 where fp16 is off": (
        "trl",
        "trainer/base_config.py",
        r"self\.bf16 = not .*if self\.bf16 is None",
    ),
    "record: TRL casts adapters on a quantised base": (
        "trl",
        "trainer/sft_trainer.py",
        r"if _is_quantized_model:(?:.*\n){1,4}?\s+param\.data = param\.data\.to\(torch\.bfloat16\)",
    ),
    "record: FSDP reduces in the mixed precision": (
        "accelerate",
        "utils/dataclasses.py",
        r"\"param_dtype\": dtype, \"reduce_dtype\": dtype",
    ),
    "CF060: buffer_dtype for FSDP1, output_dtype for FSDP2": (
        "accelerate",
        "utils/dataclasses.py",
        r"\[\"buffer_dtype\"\] if self\.fsdp_version == 1 else \[\"output_dtype\"\]",
    ),
    "CF014: the modes in lower case": (
        "accelerate",
        "utils/dataclasses.py",
        r"NO = \"no\"\s+FP8 = \"fp8\"\s+FP16 = \"fp16\"\s+BF16 = \"bf16\"\s*\n\n",
    ),
    "CF058: fp8_config is read for fp8 only": (
        "accelerate",
        "utils/launch.py",
        r"if args\.mixed_precision\.lower\(\) == \"fp8\":\n(?:.*\n){3,6}?\s+\w+ = setup_fp8_env",
    ),
    "CF058: accelerate config writes amax_history_length": (
        "accelerate",
        "commands/config/cluster.py",
        r"fp8_config\[\"amax_history_length\"\]",
    ),
    "CF058: a recipe reads AMAX_HISTORY_LEN": ("accelerate", "utils/dataclasses.py", r"env_prefix \+ \"AMAX_HISTORY_LEN\""),
    "CF058: a recipe reads AMAX_COMPUTE_ALGO": ("accelerate", "utils/dataclasses.py", r"env_prefix \+ \"AMAX_COMPUTE_ALGO\""),
    "CF058: a recipe reads OPT_LEVEL": ("accelerate", "utils/dataclasses.py", r"env_prefix \+ \"OPT_LEVEL\""),
    "CF058: the first three characters": ("accelerate", "utils/launch.py", r"FP8_OVERRIDE_FPROP\"\] = str\(value\[0\]\)"),
    "CF059: fp8 needs a library": ("accelerate", "state.py", r"Using `fp8` precision requires"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_installed_version_does_as_check_says(claim: str):
    library, file, pattern = CLAIMS[claim]
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    source = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    if pattern.startswith("not "):
        assert not re.search(pattern.removeprefix("not "), source), f"{library}/{file}: {claim} is stale"
    else:
        assert re.search(pattern, source), f"{library}/{file}: {claim} is stale"
