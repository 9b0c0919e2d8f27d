"""Rules about transformers, TRL, PEFT and bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import BNB, CHECKPOINT_DTYPE
from ..readers.python_calls import Name
from ..record import Record
from ..settings import dtype_of, truth
from ..sharded import fsdp_version, uses_fsdp
from ..versions import release
from .base import ERROR, NOTE, WARNING, found, rule


@rule("CF015")
def one_dtype_in_a_unit(r: Record) -> Iterator[Finding]:
    """FSDP units, and weights of two dtypes in them

    **Why it matters.** FSDP1 flattens a unit's weights into one tensor and needs one dtype, frozen weights included; FSDP2 needs
    one among the
    trained weights. 4-bit weights stored as uint8 (the default) cannot be flattened, and under FSDP2 stay whole on every rank.

    **Example.** QLoRA with FSDP and no `bnb_4bit_quant_storage`; LLaMA-Factory's `upcast_layernorm` with FSDP; LoRA with
    `modules_to_save` on a bf16
    base under FSDP2.

    **What to do.** `bnb_4bit_quant_storage: bfloat16`, equal to the model's dtype; no upcast norms; `bf16: true`.
    """
    f = r.facts
    fsdp = uses_fsdp(f)
    if fsdp is None:
        return
    version, version_by = fsdp_version(f)
    storage = f.get(
        f"model.{BNB}.bnb_4bit_quant_storage",
        f"hf.{BNB}.bnb_4bit_quant_storage",
        "axolotl.bnb_config_kwargs.bnb_4bit_quant_storage",
        "axolotl.bnb_4bit_quant_storage",
        f"hf.model_init_kwargs.{BNB}.bnb_4bit_quant_storage",
    )
    stored = dtype_of(storage.value) if storage else "uint8"
    if (
        r.tool == "hf"
        and r.quantised == 4
        and f.on(f"model.{BNB}.load_in_4bit", "hf.load_in_4bit", f"hf.{BNB}.load_in_4bit", "model.load_in_4bit")
    ):
        half = r.value("parameters") if r.value("parameters") in ("bf16", "fp16", "fp32") else None
        if stored in ("uint8", "int8", None) or (half and stored != half):
            yield found(
                "CF015",
                WARNING if version == 2 else ERROR,
                f"FSDP with 4-bit weights stored as {stored or 'uint8'}",
                storage or r.quantised_by,
                fsdp,
                r.by("parameters"),
                version_by,
                cause="FSDP2 leaves uint8 4-bit weights out of sharding: every rank keeps the whole model"
                if version == 2
                else (
                    f"FSDP needs a uniform dtype in a unit: {stored or 'uint8'} storage beside {half or 'float'} weights "
                    "cannot be flattened"
                ),
                fix=(
                    "bnb_4bit_quant_storage: "
                    f"{'bfloat16' if half in (None, 'bf16') else 'float16' if half == 'fp16' else 'float32'}, equal to "
                    "the model's dtype"
                ),
            )
    elif storage is not None and r.quantised == 4 and r.value("parameters") in ("bf16", "fp16", "fp32") and stored != r.value("parameters"):
        yield found(
            "CF015",
            ERROR,
            f"FSDP with 4-bit weights stored as {stored}",
            storage,
            r.quantised_by,
            fsdp,
            r.by("parameters"),
            cause=f"FSDP needs a uniform dtype in a unit: {stored} storage beside {r.value('parameters')} weights cannot be flattened",
            fix=(
                "bnb_4bit_quant_storage: "
                f"{'bfloat16' if r.value('parameters') == 'bf16' else 'float16' if r.value('parameters') == 'fp16' else 'float32'}, "
                "equal to the model's dtype"
            ),
        )
    norms = f.on("llamafactory.upcast_layernorm")
    if norms is not None:
        yield found(
            "CF015",
            ERROR,
            "upcast_layernorm with FSDP",
            norms,
            fsdp,
            cause="fp32 norms in a half-precision FSDP unit: the dtype of a unit must be uniform",
            fix="upcast_layernorm: false",
        )
    bits = f.get("llamafactory.quantization_bit")
    if bits is not None and r.adapter and f.on("llamafactory.bf16", "llamafactory.fp16", "llamafactory.pure_bf16") is None:
        yield found(
            "CF015",
            ERROR,
            "QLoRA with FSDP, and neither bf16 nor fp16",
            bits,
            fsdp,
            cause="the quantised storage follows a compute dtype of fp16 while the model is bf16: FSDP finds two dtypes in a unit",
            fix="bf16: true",
            wins='"Must flatten tensors with uniform dtype"',
        )
    saved = f.get("peft.modules_to_save")
    if (
        saved is not None
        and saved.value
        and version == 2
        and r.adapter
        and r.value("parameters") in ("bf16", "fp16")
        and not f.off("peft.autocast_adapter_dtype")
    ):
        yield found(
            "CF015",
            ERROR,
            "fp32 adapters and half-precision modules_to_save in one FSDP2 group",
            saved,
            fsdp,
            r.by("parameters"),
            cause=(
                f"PEFT makes adapters fp32 and leaves modules_to_save {r.value('parameters')}: FSDP2 expects one "
                "dtype among a group's trained weights"
            ),
            fix="autocast_adapter_dtype=False, or fully_shard the saved modules on their own",
        )


_REMOVED = {
    "half_precision_backend": "remove it: native autocast is the only backend",
    "fp16_backend": "remove it: native autocast is the only backend",
    "fp16_opt_level": "remove it: it was apex's",
    "no_cuda": "use_cpu: true",
}


@rule("CF040")
def removed_arguments(r: Record) -> Iterator[Finding]:
    """An argument that transformers 5 removed

    **Why it matters.** `TrainingArguments` raises "unexpected keyword argument".

    **Example.** `half_precision_backend: auto`, `no_cuda: true`.

    **What to do.** Remove it; `use_cpu` replaces `no_cuda`.
    """
    pinned = r.facts.get("versions.transformers")
    if pinned is not None and release(str(pinned.value))[:1] < (5,):
        return
    document = r.facts.tool("hf")
    if document is None or document.attributes.get("reader") == "pickle":
        return
    for key, fix in _REMOVED.items():
        setting = document.settings.get(key)
        if setting is not None:
            yield found(
                "CF040",
                ERROR,
                f"{key} no longer exists",
                setting,
                pinned,
                cause="transformers 5 removed this argument: TypeError, unexpected keyword argument",
                fix=fix,
                holds="transformers >= 5",
            )


@rule("CF041")
def checkpointed_twice(r: Record) -> Iterator[Finding]:
    """Activation checkpointing by FSDP and by the trainer

    **Why it matters.** transformers refuses both together.

    **Example.** `fsdp_config: {activation_checkpointing: true}` with `gradient_checkpointing: true`.

    **What to do.** Keep FSDP's.
    """
    f = r.facts
    fsdp = f.on(
        "hf.fsdp_config.activation_checkpointing",
        "fsdp.activation_checkpointing",
        "accelerate.fsdp_config.fsdp_activation_checkpointing",
        "hf.fsdp_config.fsdp_activation_checkpointing",
    )
    own = f.on("hf.gradient_checkpointing")
    if fsdp and own:
        yield found(
            "CF041",
            ERROR,
            "gradient checkpointing is set twice",
            own,
            fsdp,
            cause="FSDP's activation_checkpointing and gradient_checkpointing cannot both be true",
            fix="gradient_checkpointing: false, FSDP's stays",
            wins="transformers refuses to start",
        )


@rule("CF042")
def two_quantisations(r: Record) -> Iterator[Finding]:
    """load_in_4bit and load_in_8bit are both on

    **Why it matters.** transformers refuses: only one can be used at the same time.

    **Example.** `{"load_in_4bit": true, "load_in_8bit": true}`.

    **What to do.** Keep one.
    """
    f = r.facts
    for prefix in (f"model.{BNB}", "model", "hf", "axolotl", f"hf.{BNB}", f"hf.model_init_kwargs.{BNB}"):
        four, eight = f.on(f"{prefix}.load_in_4bit"), f.on(f"{prefix}.load_in_8bit")
        if four and eight:
            yield found(
                "CF042",
                ERROR,
                "load_in_4bit and load_in_8bit are both true",
                four,
                eight,
                cause="a weight is stored one way: only one of load_in_4bit and load_in_8bit can be used",
                fix="keep one of them, the other false",
                wins="loading stops",
            )
            return


@rule("CF043")
def dtype_with_prefix(r: Record) -> Iterator[Finding]:
    """A dtype written as the text `torch.bfloat16`

    **Why it matters.** The word is given to `getattr(torch, ...)`: "module torch has no attribute torch.bfloat16".

    **Example.** `"bnb_4bit_compute_dtype": "torch.bfloat16"`.

    **What to do.** `"bfloat16"`.
    """
    for document in r.facts.documents:
        if document.tool not in ("model", "hf", "peft", "axolotl"):
            continue
        done = set()
        for key, setting in document.settings.items():
            last = key.rpartition(".")[2]
            if (
                last in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
                and isinstance(setting.value, str)
                and not isinstance(setting.value, Name)
                and (last, setting.line) not in done
            ):
                done.add((last, setting.line))
                word = setting.value
                short = word.removeprefix("torch.")
                known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
                if word.startswith("torch.") or word in known:
                    yield found(
                        "CF043",
                        ERROR,
                        f"{last}: {word!r} is not a name in torch",
                        setting,
                        cause="the string is looked up as an attribute of torch, and must be torch's own word without prefix",
                        fix=f'{last}: "{known.get(short, short)}"',
                        wins="loading stops with an AttributeError",
                    )


@rule("CF044")
def prequantised_checkpoint(r: Record) -> Iterator[Finding]:
    """A compute dtype given for a checkpoint that is quantised already

    **Why it matters.** The checkpoint's own quantization_config wins, with a warning.

    **Example.** A bnb-4bit checkpoint (fp16 compute) loaded with `bnb_4bit_compute_dtype: bfloat16`.

    **What to do.** Set `module.compute_dtype` after loading, or quantise from the original weights.
    """
    f = r.facts
    own, asked = f.get(f"checkpoint.{BNB}.bnb_4bit_compute_dtype"), f.get(f"model.{BNB}.bnb_4bit_compute_dtype")
    if own and asked and dtype_of(own.value) != dtype_of(asked.value):
        yield found(
            "CF044",
            WARNING,
            f"the checkpoint computes in {own.value}, {asked.value} is asked for",
            asked,
            own,
            cause="a pre-quantised checkpoint's quantization_config wins over the one given",
            fix=f"after loading: set module.compute_dtype on each Linear4bit; or load the unquantised weights with {asked.key}",
            wins=f"the checkpoint: {own.value}",
        )


@rule("CF045")
def adapters_in_flat_units(r: Record) -> Iterator[Finding]:
    """fp32 adapters on a half-precision base under FSDP1

    **Why it matters.** PEFT makes adapters fp32. FSDP1 needs one dtype in a unit: the trainer's PEFT wrapping policy gives
    adapters units of their own, a
    policy by transformer layer alone does not. A note, because the policy decides.

    **Example.** `fsdp: full_shard` with LoRA on a bf16 model.

    **What to do.** `autocast_adapter_dtype=False`, or FSDP2, or PEFT's `fsdp_auto_wrap_policy`.
    """
    fsdp = uses_fsdp(r.facts)
    if (
        fsdp
        and r.tool == "hf"
        and r.adapter
        and r.value("parameters") in ("bf16", "fp16")
        and r.value("trained") == "fp32"
        and fsdp_version(r.facts)[0] != 2
    ):
        yield found(
            "CF045",
            NOTE,
            "fp32 adapters on a half-precision base under FSDP1",
            r.adapter_by,
            fsdp,
            r.by("parameters"),
            cause="FSDP1 flattens a unit's weights, which need a uniform dtype",
            fix="autocast_adapter_dtype=False, or PEFT's fsdp_auto_wrap_policy",
        )


@rule("CF046")
def stored_and_said(r: Record) -> Iterator[Finding]:
    """A checkpoint's config.json and its weights disagree

    **Why it matters.** "auto" takes the dtype of config.json; the weights were saved in another, and are cast when loaded.

    **Example.** `"torch_dtype": "float16"` beside a safetensors file of bf16.

    **What to do.** Correct config.json, or give `dtype` yourself.
    """
    f = r.facts
    stored, said = f.get(CHECKPOINT_DTYPE[0]), f.get(*CHECKPOINT_DTYPE[1:])
    if (
        stored
        and said
        and dtype_of(said.value)
        and dtype_of(said.value) != stored.value
        and not f.get("model.dtype", "model.torch_dtype", "hf.dtype")
    ):
        yield found(
            "CF046",
            WARNING,
            f"config.json says {said.value}, the weights are {stored.value}",
            said,
            stored,
            cause="the weights were saved in another dtype than config.json names",
            fix=f"dtype: {said.value} given by yourself, or correct config.json",
            wins="config.json, when dtype is auto",
        )


@rule("CF047")
def two_accelerators(r: Record) -> Iterator[Finding]:
    """Two Accelerators of different mixed precision in one process

    **Why it matters.** The state is shared: "AcceleratorState has already been initialized and cannot be changed".

    **Example.** `Accelerator(mixed_precision="bf16")`, later `Accelerator(mixed_precision="fp16")`.

    **What to do.** One Accelerator, or `AcceleratorState._reset_state()` between.
    """
    first, second = r.facts.get("code.accelerators.0"), r.facts.get("code.accelerators.1")
    if first and second:
        yield found(
            "CF047",
            ERROR,
            f"Accelerator is made with mixed_precision {first.value} and {second.value}",
            second,
            first,
            cause="AcceleratorState is shared in a process and cannot be changed",
            fix="one Accelerator, or AcceleratorState._reset_state() between them",
            wins="the first; the second raises",
        )


@rule("CF048")
def scaler_without_fp16(r: Record) -> Iterator[Finding]:
    """A GradScaler under bf16 autocast

    **Why it matters.** bf16 has fp32's exponent range: nothing underflows, and a scaler can only skip steps. With bf16 gradients
    its CUDA kernel raises on many versions.

    **Example.** `torch.autocast("cuda", dtype=torch.bfloat16)` with `GradScaler()`.

    **What to do.** Drop the scaler, or `GradScaler(enabled=False)`.
    """
    f = r.facts
    scaler, dtype = f.get("code.GradScaler"), f.get("code.autocast.dtype")
    if scaler and truth(scaler.value) is True and dtype and dtype_of(dtype.value) == "bf16":
        yield found(
            "CF048",
            WARNING,
            "a GradScaler under bf16 autocast",
            scaler,
            dtype,
            cause="bf16 needs no loss scaling, and the scaler's CUDA kernel has no bf16 on many versions",
            fix="remove the GradScaler, or GradScaler(enabled=False)",
        )
