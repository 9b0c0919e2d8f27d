"""What rules and records say of a library holds for its installed version: a newer one that does
otherwise fails here.

The sources are read, not imported: importing a trainer takes seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

# what check says -> library, file, a pattern that its source holds
CLAIMS = {
    "CF040: use_cpu replaces no_cuda": (
        "transformers",
        "training_args.py",
        r"(?m)^    use_cpu\s*:",
    ),
    "CF042: one quantisation only": (
        "transformers",
        "utils/quantization_config.py",
        r"both True, but only one can be used",
    ),
    "CF010: products in fp32 unless told otherwise": (
        "transformers",
        "utils/quantization_config.py",
        r"bnb_4bit_compute_dtype is None:\s+self\.bnb_4bit_compute_dtype = torch\.float32",
    ),
    "CF010: the 4-bit type is fp4": (
        "transformers",
        "utils/quantization_config.py",
        r"bnb_4bit_quant_type=\"fp4\"",
    ),
    "CF015: 4-bit weights are stored as uint8": (
        "transformers",
        "utils/quantization_config.py",
        r"bnb_4bit_quant_storage is None:\s+self\.bnb_4bit_quant_storage = torch\.uint8",
    ),
    "CF004: a checkpoint's dtype is the default": (
        "transformers",
        "modeling_utils.py",
        r"dtype = \"auto\"",
    ),
    "record: PEFT makes adapters fp32": (
        "peft",
        "mapping_func.py",
        r"autocast_adapter_dtype: bool = True",
    ),
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
    "CF030: bf16 logits keep their dtype": (
        "trl",
        "trainer/utils.py",
        r"else:\n.*\n.*\n.*\n +row_logps = F\.log_softmax\(row_logits, dim=-1\)",
    ),
    "CF030: ORPO": (
        "trl",
        "experimental/orpo/orpo_trainer.py",
        r"per_token_logps = selective_log_softmax\(logits, labels\)",
    ),
    "CF030: CPO": (
        "trl",
        "experimental/cpo/cpo_trainer.py",
        r"per_token_logps = selective_log_softmax\(logits, labels\)",
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
    "record: FSDP2 where the trainer's arguments name no version": (
        "transformers",
        "training_args.py",
        r"int\(self\.fsdp_config\.get\(\"version\", 2\)\)",
    ),
    "record: FSDP1 where accelerate's file names no version": (
        "accelerate",
        "commands/launch.py",
        r"\"--fsdp_version\",\s+type=str,\s+default=\"1\"",
    ),
}


@pytest.mark.parametrize("library", sorted({library for library, *_ in CLAIMS.values()}))
def test_the_installed_version_does_as_check_says(library: str):
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    for claim, (of, file, pattern) in CLAIMS.items():
        if of == library:
            assert re.search(
                pattern, (Path(spec.origin).parent / file).read_text(encoding="utf-8")
            ), f"{library}/{file}: {claim} is stale"
