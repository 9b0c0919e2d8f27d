"""Installed or locked versions: requirements, constraints and lock files; and what became of a setting in which release of a tool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from .settings import Document, Facts, Setting

_REQUIREMENT = re.compile(r"^\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*==\s*(?P<version>[0-9][\w.+!-]*)")
_CONDA = re.compile(r"^\s*-\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*={1,2}\s*(?P<version>[0-9][\w.+]*)")
_NAME = re.compile(r"^\s*-?\s*([A-Za-z0-9][\w.-]*)")
WATCHED = (
    "torch", "transformers", "accelerate", "bitsandbytes", "deepspeed", "peft", "trl", "triton", "torchtune", "lightning", "torchtitan",
    "simpletuner", "axolotl", "llamafactory",
)  # fmt: skip


def is_version_file(name: str) -> bool:
    return bool(
        re.match(r"^(?:requirements|constraints)[\w.-]*\.(?:txt|in|lock)$|^(?:poetry|uv|pdm)\.lock$|^environment[\w.-]*\.ya?ml$", name)
    )


def read_versions(text: str, name: str, file: str) -> Document | None:
    """Exact pins only: a range does not say what is installed."""
    document = Document("versions", file)
    if name.endswith(".lock") and "[[package]]" in text:
        import tomllib

        try:
            packages = tomllib.loads(text).get("package", [])
        except tomllib.TOMLDecodeError:
            return None
        lines = {m[1]: text.count("\n", 0, m.start()) + 1 for m in re.finditer(r'^name = "([^"]+)"', text, re.M)}
        document.attributes["names"] = {str(package.get("name")) for package in packages}
        for package in packages:
            if package.get("name") in WATCHED and package.get("version"):
                document.add(
                    package["name"], package["version"], lines.get(package["name"]), written=f"{package['name']}=={package['version']}"
                )
        return document
    for number, line in enumerate(text.splitlines(), 1):
        if name_only := _NAME.match(line):
            document.attributes.setdefault("names", set()).add(name_only[1].lower())
        match = _REQUIREMENT.match(line) or (_CONDA.match(line) if name.endswith(("yml", "yaml")) else None)
        if match and match["name"].lower() in WATCHED:
            document.add(match["name"].lower(), match["version"], number, written=f"{match['name']}=={match['version']}")
    return document


def installed() -> Document:
    """What importlib finds beside this Python."""
    from importlib import metadata

    document = Document("versions", "this Python")
    for name in WATCHED:
        try:
            document.add(name, metadata.version(name), None, written=f"{name} (installed)")
        except metadata.PackageNotFoundError:
            continue
    return document


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): enough to compare releases."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


# tool.setting | package | first-last release, open where it is not known to end | words that are taken, * for any | what replaces it
_TABLE = """
axolotl.attn_implementation               | axolotl      | 0.12-0.16.1    | *
axolotl.attn_implementation               | axolotl      | 0.17-          | ATTENTION
axolotl.qat.weight_dtype                  | axolotl      | 0.10-0.12.2    | int4 int8
axolotl.qat.weight_dtype                  | axolotl      | 0.13-0.14      | int4 int8 float8_e4m3fn fp8 float8 nvfp4
axolotl.qat.weight_dtype                  | axolotl      | 0.15-          | int4 int8 float8_e4m3fn fp8 float8 nvfp4 mxfp4
axolotl.qat.activation_dtype              | axolotl      | 0.10-0.12.2    | int4 int8
axolotl.qat.activation_dtype              | axolotl      | 0.13-0.14      | int4 int8 float8_e4m3fn fp8 float8 nvfp4
axolotl.qat.activation_dtype              | axolotl      | 0.15-          | int4 int8 float8_e4m3fn fp8 float8 nvfp4 mxfp4
axolotl.quantization.weight_dtype         | axolotl      | 0.10-0.12.2    | int4 int8
axolotl.quantization.weight_dtype         | axolotl      | 0.13-0.14      | int4 int8 float8_e4m3fn fp8 float8 nvfp4
axolotl.quantization.weight_dtype         | axolotl      | 0.15-          | int4 int8 float8_e4m3fn fp8 float8 nvfp4 mxfp4
axolotl.model_quantization_config         | axolotl      | 0.12-0.16.1    | Mxfp4Config
axolotl.model_quantization_config         | axolotl      | 0.17-          | Mxfp4Config FineGrainedFP8Config
axolotl.tf32                              | axolotl      | -0.15          | true false
axolotl.tf32                              | axolotl      | 0.16-          | true false auto
axolotl.fp8                               | axolotl      | 0.8.1-         | *
axolotl.fp8_enable_fsdp_float8_all_gather | axolotl      | 0.12-          | *
axolotl.embeddings_skip_upcast            | axolotl      | 0.9.1-         | *
axolotl.peft_autocast_adapter_dtype       | axolotl      | 0.13.1-        | *
axolotl.quantize_moe_experts              | axolotl      | 0.15-          | *
axolotl.fp32_norms                        | axolotl      | 0.17-          | *
axolotl.unsloth_rms_norm                  | axolotl      | -0.16.1        | *     | no kernel of that name; remove it
axolotl.unsloth_lora_mlp                  | axolotl      | -0.16.1        | *     | lora_mlp_kernel
axolotl.unsloth_lora_qkv                  | axolotl      | -0.16.1        | *     | lora_qkv_kernel
axolotl.unsloth_lora_o                    | axolotl      | -0.16.1        | *     | lora_o_kernel
axolotl.flash_attn_rms_norm               | axolotl      | -0.16.1        | *     | remove it
llamafactory.quantization_method          | llamafactory | 0.8.3-0.9.2    | bitsandbytes hqq eetq
llamafactory.quantization_method          | llamafactory | 0.9.3-0.9.3    | bnb gptq awq aqlm quanto eetq hqq
llamafactory.quantization_method          | llamafactory | 0.9.4-         | bnb gptq awq aqlm quanto eetq hqq mxfp4 fp8
llamafactory.quantization_type            | llamafactory | 0.6-           | fp4 nf4
llamafactory.flash_attn                   | llamafactory | -0.6.3         | true false
llamafactory.flash_attn                   | llamafactory | 0.7-0.8.2      | off sdpa fa2 auto
llamafactory.flash_attn                   | llamafactory | 0.8.3-0.9.3    | auto disabled sdpa fa2
llamafactory.flash_attn                   | llamafactory | 0.9.4-         | auto disabled sdpa fa2 fa3
llamafactory.infer_dtype                  | llamafactory | 0.8.2-         | auto float16 bfloat16 float32
llamafactory.vllm_dtype                   | llamafactory | 0.8-0.8.1      | *     | infer_dtype
llamafactory.fp8                          | llamafactory | 0.9.4-         | *
llamafactory.fp8_enable_fsdp_float8_all_gather | llamafactory | 0.9.4-    | *
accelerate.fp8_config                     | accelerate   | 0.34-          | *
accelerate.fp8_config.backend             | accelerate   | 0.34-1.8.1     | TE MSAMP te msamp
accelerate.fp8_config.backend             | accelerate   | 1.9-           | TE MSAMP AO
accelerate.fp8_config.use_mxfp8_block_scaling | accelerate | 1.11-        | *
accelerate.fp8_config.enable_fsdp_float8_all_gather | accelerate | 1.13-  | *
accelerate.fsdp_config.fsdp_version       | accelerate   | 1.6-           | 1 2
hf.use_liger_loss                         | trl          | 0.17-0.27.2    | *     | use_liger_kernel
hf.use_liger                              | trl          | -0.17          | *     | use_liger_kernel
hf.vllm_dtype                             | trl          | -0.17          | *     | remove it
hf.cast_lm_head_to_fp32                   | trl          | 0.25-          | *
hf.half_precision_backend                 | transformers | -4             | *     | remove it: native autocast is the only backend
hf.fp16_backend                           | transformers | -4             | *     | remove it: native autocast is the only backend
hf.fp16_opt_level                         | transformers | -4             | *     | remove it: it was apex's
hf.no_cuda                                | transformers | -4             | *     | use_cpu
simpletuner.base_model_precision          | simpletuner  | -              | QUANTISED
simpletuner.text_encoder_1_precision      | simpletuner  | -              | QUANTISED
simpletuner.text_encoder_2_precision      | simpletuner  | -              | QUANTISED
simpletuner.text_encoder_3_precision      | simpletuner  | -              | QUANTISED
simpletuner.text_encoder_4_precision      | simpletuner  | -              | QUANTISED
simpletuner.gradient_precision            | simpletuner  | -              | unmodified fp32
simpletuner.vae_dtype                     | simpletuner  | -              | default fp32 fp16 bf16
simpletuner.base_model_default_dtype      | simpletuner  | -              | bf16 fp32
"""
_LISTS = {
    # a name with a slash is a kernel of the hub
    "ATTENTION": "eager sdpa flash_attention_2 flash_attention_3 flex_attention xformers sage fp8 /",
    "QUANTISED": "no_change int8-quanto int4-quanto int2-quanto int8-torchao int8dq-torchao int8dq-int4-torchao int8-sdnq uint8-sdnq "
    "int16-sdnq uint16-sdnq fp16-sdnq fp8-sdnq int6-sdnq int5-sdnq uint5-sdnq uint4-sdnq uint3-sdnq uint2-sdnq nf4-bnb int4-torchao "
    "fp8-quanto fp8uz-quanto fp8-native fp8-torchao fp8wo-torchao fp8-int4-torchao fp8-transformerengine",
}
NEWEST = {
    "axolotl": "0.18", "llamafactory": "0.9.5", "accelerate": "1.15", "trl": "1.16", "transformers": "5.23", "simpletuner": "of 2026-08",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """One setting over the releases in which it was the same. since and until are inclusive; () is open."""

    setting: str
    package: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    words: tuple[str, ...]
    instead: str

    def holds(self, version: tuple[int, ...]) -> bool:
        return self.since <= version and (not self.until or version[: len(self.until)] <= self.until)

    def takes(self, word: str) -> bool:
        return not self.words or word in self.words or ("/" in self.words and "/" in word)

    @property
    def releases(self) -> str:
        """`axolotl 0.13 to 0.14`, `trl up to 0.17`, `accelerate since 1.9`."""
        since, until = (".".join(map(str, v)) for v in (self.since, self.until))
        if not since and not until:
            return f"{self.package} {NEWEST[self.package]}"
        return f"{self.package} {f'since {since}' if not until else f'up to {until}' if not since else f'{since} to {until}'}"


@cache
def spans() -> dict[str, list[Span]]:
    """The spans of each setting, the oldest first."""
    found: dict[str, list[Span]] = {}
    for line in _TABLE.strip().splitlines():
        setting, package, releases, words, *instead = (cell.strip() for cell in line.split("|"))
        since, _, until = releases.partition("-")
        taken = () if words == "*" else tuple(_LISTS.get(words, words).split())
        found.setdefault(setting, []).append(Span(setting, package, release(since), release(until), taken, "".join(instead)))
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """A setting of the table that a run gives. span: where the pinned release lies, or the newest one; None where it lies outside."""

    setting: Setting
    span: Span | None
    spans: list[Span]
    pinned: Setting | None

    @property
    def gone(self) -> bool:
        """Whether releases before the one that counts had it."""
        return self.pinned is None or release(str(self.pinned.value)) > self.spans[0].since


def given(facts: Facts) -> Iterator[Given]:
    """Each setting of the table that a run gives. Pickled arguments are left out: they hold every field of the version that wrote them."""
    pickled = {d.file for d in facts.documents if d.attributes.get("reader") == "pickle"}
    for name, lives in spans().items():
        setting = facts.get(name) or next((s for s in facts.under(name) if s.value is not None), None)
        if setting is None or setting.file in pickled:
            continue
        pinned = facts.get(f"versions.{lives[0].package}")
        if pinned is not None:
            version = release(str(pinned.value))
            span = next((s for s in lives if s.holds(version)), None)
        else:
            span = lives[-1] if not lives[-1].until else None
        yield Given(setting, span, lives, pinned)
