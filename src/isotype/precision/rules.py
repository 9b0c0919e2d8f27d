"""Finds contradictions between precision settings before anything is loaded. Imports no torch; the doctor uses the same rules.

A rule is a function from `Facts` to findings; its docstring is its page. It names both settings, where each was set, why they
conflict, and the fix. Errors refuse the run; warnings are shown in its header. The list is long because it is a table of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..dtypes import itemsize
from ..finding import Finding, Place, Severity
from ..pages.docstrings import docstring_page


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and who decided it. `given`: a person wrote it, it did not come from a preset or a default."""

    value: str
    where: str = "default"
    given: bool = False

    def __str__(self) -> str:
        return f"{self.value} ({self.where})"


@dataclass(frozen=True)
class Facts:
    """What the rules look at: every role of `Precision`, and the settings around it.

    settings  role or `adapter` (lora, none), `frozen` (yes, no: whether weights of the model are not trained), `optimizer_name` (adamw,
              adamw8bit), `preset` -> Setting
    device    what the hardware is called in messages; `bf16` is native, emulated or none there
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    device: str = "this device"
    device_kind: str = "cpu"
    bf16: str = "native"

    def __getitem__(self, key: str) -> Setting:
        return self.settings[key]

    def value(self, key: str) -> str:
        return self.settings[key].value


Rule = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def rule(code: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        assert code not in RULES, code
        RULES[code] = function
        return function

    return register


def check(facts: Facts) -> list[Finding]:
    """Every finding of every rule."""
    return [finding for function in RULES.values() for finding in function(facts)]


def codes() -> list[str]:
    return sorted(RULES)


def page(code: str) -> str | None:
    """The page of a rule, from its docstring."""
    return docstring_page(code, RULES[code]) if code in RULES else None


def _finding(
    code: str, facts: Facts, keys: tuple[str, ...], message: str, *, cause: str, fix: str, severity: Severity = Severity.ERROR
) -> Finding:
    """Makes a finding that lists each setting with its source. Its place is the first one that the user wrote, else the first."""
    written = next((k for k in keys if facts[k].given), keys[0])
    file, _, line = facts[written].where.rpartition(", ")[2].rpartition(":")  # "run.yaml:3", or "preset nf4-lora, run.yaml:3"
    place = Place(
        file=file if line.isdigit() else None,
        line=int(line) if line.isdigit() and file else None,
        symbol=_key(written),
    )
    details = tuple((_key(k), str(facts[k])) for k in keys)
    return Finding(code=code, severity=severity, message=message, place=place, cause=cause, fix=fix, details=details)


def _key(name: str) -> str:
    return {"adapter": "adapter.kind", "optimizer_name": "train.optimizer"}.get(name, f"precision.{name}")


@rule("PR001")
def bf16_without_hardware(f: Facts) -> Iterator[Finding]:
    """bf16 was asked for on a device that has none

    **Why it matters.** GPUs before Ampere (compute capability 8.0) emulate bf16 or refuse it, several times slower than fp32. Many
    trainers replace it with fp16 in silence, and fp16 overflows where bf16 does not.

    **Example.** `preset: bf16-lora` on a T4.

    **What to do.** `preset: fp16-mixed` (fast, with loss scaling; activations above 65504 overflow) or `preset: fp32` (slow, safe).
    """
    asked = [role for role in ("compute", "base", "trainable", "generate") if f.value(role) == "bf16"]
    if asked and f.bf16 == "none":
        yield _finding(
            "PR001", f, tuple(asked), f"bf16 was asked for, and {f.device} has no bf16",
            cause="bf16 needs compute capability 8.0 (Ampere), CDNA, or a CPU",
            fix="precision.preset: fp16-mixed (fast, may overflow), or precision.preset: fp32 (slow, safe)",
        )  # fmt: skip


@rule("PR002")
def gradients_narrower_than_weights(f: Facts) -> Iterator[Finding]:
    """Gradients narrower than the weights they belong to

    **Why it matters.** autograd gives every gradient its parameter's dtype. A narrower `grads` would round what is already there, and
    save nothing; accumulating 256 micro-batches in bf16 is 1.5% off, in fp32 0.02%.

    **Example.** `trainable: fp32` with `grads: bf16`.

    **What to do.** Leave `grads` at fp32, or make `trainable` bf16 too (preset `bf16-pure`).
    """
    if itemsize(f.value("grads")) < itemsize(f.value("trainable")):
        yield _finding(
            "PR002", f, ("grads", "trainable"), f"{f.value('grads')} gradients of {f.value('trainable')} weights",
            cause="autograd makes each gradient in its parameter's dtype; storing it narrower loses accuracy and saves nothing",
            fix=f"precision.grads: {f.value('trainable')}, or precision.preset: bf16-pure",
        )  # fmt: skip


@rule("PR003")
def quantised_base_without_adapter(f: Facts) -> Iterator[Finding]:
    """A 4-bit base without an adapter has nothing to train

    **Why it matters.** 4-bit weights take no gradient.

    **Example.** `preset: nf4-lora` with `adapter: {kind: none}`.

    **What to do.** `adapter.kind: lora`, or a preset with weights that can be trained (`bf16-mixed`, `bf16-pure`).
    """
    if f.value("base") == "nf4" and f.value("adapter") == "none":
        yield _finding(
            "PR003", f, ("base", "adapter"), "a 4-bit base is frozen, and there is no adapter to train",
            cause="nf4 weights are integers with scales; they take no gradient",
            fix="adapter.kind: lora, or precision.preset: bf16-mixed",
        )  # fmt: skip


@rule("PR004")
def fp16_weights_trained(f: Facts) -> Iterator[Finding]:
    """Weights that are trained cannot be fp16

    **Why it matters.** Gradient scalers refuse fp16 gradients ("Attempting to unscale FP16 gradients"), and updates below 2^-11 of a
    weight vanish.

    **Example.** `trainable: fp16`.

    **What to do.** `trainable: fp32` (preset `fp16-mixed`).
    """
    if f.value("trainable") == "fp16":
        yield _finding(
            "PR004", f, ("trainable", "loss_scaling"), "weights that are trained cannot be fp16",
            cause="fp16 gradients cannot be unscaled without overflow, and small updates vanish in fp16 weights",
            fix="precision.trainable: fp32",
        )  # fmt: skip


@rule("PR005")
def fp16_without_loss_scaling(f: Facts) -> Iterator[Finding]:
    """fp16 products without loss scaling

    **Why it matters.** fp16 gradients below 6e-8 flush to zero: with a mean over 8192 tokens most of a head's gradient does.

    **Example.** `compute: fp16` with `loss_scaling: none`.

    **What to do.** `loss_scaling: dynamic`, or `compute: bf16`.
    """
    if f.value("compute") == "fp16" and f.value("loss_scaling") == "none":
        yield _finding(
            "PR005", f, ("compute", "loss_scaling"), "fp16 products need loss scaling",
            cause="fp16 gradients below 6e-8 become zero",
            fix="precision.loss_scaling: dynamic, or precision.preset: fp16-mixed",
        )  # fmt: skip


@rule("PR006")
def loss_scaling_without_fp16(f: Facts) -> Iterator[Finding]:
    """Loss scaling without fp16 does nothing but skip steps

    **Why it matters.** bf16 and fp32 have the same exponent range: nothing underflows, and a scaler can only hide a real overflow by
    skipping the step.

    **Example.** `compute: bf16` with `loss_scaling: dynamic`.

    **What to do.** Leave `loss_scaling` out.
    """
    if f.value("loss_scaling") == "dynamic" and f.value("compute") != "fp16":
        yield _finding(
            "PR006", f, ("loss_scaling", "compute"), f"loss scaling has no use with {f.value('compute')} products",
            cause=f"{f.value('compute')} has fp32's exponent range; a scaler would only hide a real overflow",
            fix="precision.loss_scaling: none, or precision.compute: fp16",
        )  # fmt: skip


@rule("PR007")
def stochastic_rounding_without_effect(f: Facts) -> Iterator[Finding]:
    """Stochastic rounding of fp32 weights does nothing

    **Why it matters.** Updates are computed in fp32; there is nothing to round into an fp32 weight.

    **Example.** `trainable: fp32` with `rounding: stochastic`.

    **What to do.** Leave `rounding` out, or train bf16 weights (preset `bf16-pure`).
    """
    if f.value("rounding") == "stochastic" and f.value("trainable") == "fp32":
        yield _finding(
            "PR007", f, ("rounding", "trainable"), "stochastic rounding has no effect on fp32 weights",
            cause="the update is computed in fp32 and stored in fp32: nothing is rounded",
            fix="precision.rounding: nearest, or precision.preset: bf16-pure",
        )  # fmt: skip


@rule("PR008")
def updates_vanish(f: Facts) -> Iterator[Finding]:
    """bf16 weights with rounding to nearest stop learning

    **Why it matters.** A bf16 weight has 8 significant bits. AdamW moves bf16 weights 0.3% / 2.2% / 22.7% of what it should at
    learning rate 1e-5 / 1e-4 / 1e-3; with stochastic rounding 93-107%.

    **Example.** `trainable: bf16` with `rounding: nearest`.

    **What to do.** `rounding: stochastic`, or `trainable: fp32`.
    """
    if f.value("trainable") == "bf16" and f.value("rounding") == "nearest":
        yield _finding(
            "PR008", f, ("trainable", "rounding"), "most updates of bf16 weights will round away",
            cause="an update below 1/256 of a bf16 weight rounds to nothing",
            fix="precision.rounding: stochastic, or precision.trainable: fp32",
            severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR009")
def two_half_formats(f: Facts) -> Iterator[Finding]:
    """bf16 and fp16 in one run

    **Why it matters.** fp16 cannot hold bf16's range and bf16 drops fp16's last three bits; each conversion between them loses one or
    the other, and torch promotes the mixture to fp32.

    **Example.** `base: fp16` with `compute: bf16`.

    **What to do.** One of them: `bf16` where the device has it.
    """
    roles = ("base", "trainable", "compute")
    halves = {role: f.value(role) for role in roles if f.value(role) in ("bf16", "fp16")}
    if len(set(halves.values())) > 1:
        yield _finding(
            "PR009", f, tuple(halves), "bf16 and fp16 in one run",
            cause="each conversion between them loses range or precision, and torch promotes their mixture to fp32",
            fix=f"give {' and '.join('precision.' + r for r in halves)} the same one",
        )  # fmt: skip


@rule("PR010")
def loss_in_low_precision(f: Facts) -> Iterator[Finding]:
    """The loss in low precision

    **Why it matters.** torch's bf16 cross-entropy keeps log-probabilities in bf16: single gradient elements are up to 5.9% off.

    **Example.** `loss: bf16`.

    **What to do.** `loss: fp32`.
    """
    if f.value("loss") != "fp32":
        yield _finding(
            "PR010", f, ("loss", "compute"), f"log-probabilities in {f.value('loss')}",
            cause="a softmax over a large vocabulary in low precision: gradient elements are several percent off",
            fix="precision.loss: fp32", severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR011")
def states_another_dtype_than_the_optimizers(f: Facts) -> Iterator[Finding]:
    """`precision.optimizer` names a dtype in which the optimizer does not keep its states

    **Why it matters.** One of the two settings would have no effect: `adamw8bit` keeps its states in 8 bits (`int8`, with a scale for each
    block, and fp32 below 4,096 elements), and `adamw` keeps them in a floating dtype.

    **Example.** `train.optimizer: adamw8bit` with `precision.optimizer: bf16`; `train.optimizer: adamw` with `precision.optimizer: int8`.

    **What to do.** Leave `precision.optimizer` out: it is resolved from the optimizer. Or name the other optimizer.
    """
    optimizer, states = f.value("optimizer_name"), f.value("optimizer")
    if optimizer == "adamw8bit" and f["optimizer"].given and states != "int8":
        yield _finding(
            "PR011", f, ("optimizer", "optimizer_name"), f"adamw8bit keeps its states in int8: precision.optimizer: {states} has no effect",
            cause="bitsandbytes quantises the states block by block",
            fix="remove precision.optimizer (it becomes int8), or train.optimizer: adamw",
        )  # fmt: skip
    elif optimizer == "adamw" and states == "int8":
        yield _finding(
            "PR011", f, ("optimizer", "optimizer_name"), "adamw keeps no states in int8",
            cause="its moments are floating numbers; 8-bit states need a scale for each block",
            fix="train.optimizer: adamw8bit, or precision.optimizer: fp32",
        )  # fmt: skip


@rule("PR012")
def lora_preset_without_adapter(f: Facts) -> Iterator[Finding]:
    """A LoRA preset without an adapter

    **Why it matters.** `bf16-lora` declares a frozen bf16 base. Without an adapter every weight is trained, and nothing is frozen.

    **Example.** `preset: bf16-lora` with `adapter: {kind: none}`.

    **What to do.** `preset: bf16-mixed` (fp32 weights) or `bf16-pure` (bf16 weights), or `adapter.kind: lora`.
    """
    if f["preset"].value == "bf16-lora" and f["preset"].given and f.value("adapter") == "none":
        yield _finding(
            "PR012", f, ("preset", "adapter"), "a LoRA preset, and no adapter",
            cause="without an adapter every weight is trained, and the preset declares a frozen base",
            fix="precision.preset: bf16-mixed or bf16-pure, or adapter.kind: lora",
        )  # fmt: skip


@rule("PR013")
def generate_wider_than_weights(f: Facts) -> Iterator[Finding]:
    """Sampling in a wider dtype than the weights have

    **Why it matters.** It would need a second, wider copy of every weight, and its samples would not be the trained model's.

    **Example.** `base: bf16` with `generate: fp32`.

    **What to do.** `generate` as `compute`.
    """
    held = f.value("trainable") if f.value("adapter") == "none" else f.value("base")
    held = f.value("compute") if held == "nf4" else held
    generate = f.value("generate")
    if generate != held and generate != f.value("compute") and itemsize(generate) >= itemsize(held):
        yield _finding(
            "PR013", f, ("generate", "base", "compute"), f"sampling in {generate} from {held} weights",
            cause="it would need a second copy of every weight",
            fix=f"precision.generate: {f.value('compute')}",
        )  # fmt: skip


@rule("PR014")
def norms_not_fp32(f: Facts) -> Iterator[Finding]:
    """Norms compute in fp32 inside

    **Why it matters.** The norms of transformers' models widen their input to fp32 whatever the settings say, and a sum of squares in
    bf16 would be percents off: a narrower `norms` would have no effect.

    **Example.** `norms: bf16`.

    **What to do.** Leave `norms` out. Their output is `compute` in any case.
    """
    if f.value("norms") != "fp32":
        yield _finding(
            "PR014", f, ("norms", "compute"), f"norms compute in fp32 inside; {f.value('norms')} would have no effect",
            cause="the models' own norms widen to fp32, and their sums need it; the output is `compute` in any case",
            fix="precision.norms: fp32",
        )  # fmt: skip


@rule("PR015")
def reduce_narrower_than_gradients(f: Facts) -> Iterator[Finding]:
    """Gradients are narrowed before they are summed across ranks

    **Why it matters.** fp32 gradients rounded to bf16 for the all-reduce lose what accumulating in fp32 gained.

    **Example.** `grads: fp32` with `reduce: bf16`.

    **What to do.** `reduce: fp32`, unless the network is what limits the run.
    """
    if itemsize(f.value("reduce")) < itemsize(f.value("grads")):
        yield _finding(
            "PR015", f, ("reduce", "grads"), f"{f.value('grads')} gradients are summed across ranks in {f.value('reduce')}",
            cause="each rank's gradient is rounded before the sum",
            fix=f"precision.reduce: {f.value('grads')}", severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR016")
def fp32_weights_frozen_under_low_compute(f: Facts) -> Iterator[Finding]:
    """fp32 frozen weights under half-precision products

    **Why it matters.** Every product casts the weight down first: the memory of fp32 and the accuracy of bf16.

    **Example.** `base: fp32` with `compute: bf16` and a LoRA adapter.

    **What to do.** `base: bf16`, or `compute: fp32`.
    """
    if f.value("adapter") == "lora" and f.value("base") == "fp32" and f.value("compute") != "fp32":
        yield _finding(
            "PR016", f, ("base", "compute"), f"fp32 frozen weights are cast to {f.value('compute')} in every product",
            cause="the memory of fp32 with the accuracy of half precision",
            fix=f"precision.base: {f.value('compute')}, or precision.compute: fp32", severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR017")
def compute_wider_than_base(f: Facts) -> Iterator[Finding]:
    """Products wider than the frozen weights

    **Why it matters.** An fp32 product needs an fp32 copy of each half-precision weight in every pass. torch refuses the mixture
    ("mat1 and mat2 must have the same dtype"), and its autocast cannot widen.

    **Example.** `base: bf16` with `compute: fp32`.

    **What to do.** `base: fp32`, or `compute` as `base`.
    """
    keys = ("compute", "base") if f.value("adapter") == "lora" else ("compute", "trainable")
    held = f.value(keys[1])
    if held in ("bf16", "fp16") and f.value("compute") == "fp32":
        yield _finding(
            "PR017", f, keys, f"fp32 products of {held} weights",
            cause="autocast does not widen: torch would refuse the product of two dtypes",
            fix=f"precision.{keys[1]}: fp32, or precision.compute: {held}",
        )  # fmt: skip


@rule("PR018")
def eight_bit_optimizer_on_bf16_weights(f: Facts) -> Iterator[Finding]:
    """`adamw8bit` on bf16 weights has neither fp32 gradients nor stochastic rounding

    **Why it matters.** bitsandbytes reads each gradient in its weight's dtype and rounds the update to nearest: `grads: fp32` and
    `rounding: stochastic` would have no effect, and most updates of bf16 weights would vanish.

    **Example.** `preset: bf16-pure` with `train.optimizer: adamw8bit`.

    **What to do.** `train.optimizer: adamw`, or fp32 weights (`bf16-mixed`).
    """
    if f.value("optimizer_name") == "adamw8bit" and f.value("trainable") == "bf16":
        lost = [role for role, plain in (("grads", "bf16"), ("rounding", "nearest")) if f.value(role) != plain]
        if lost:
            yield _finding(
                "PR018", f, ("optimizer_name", "trainable", *lost),
                f"adamw8bit on bf16 weights ignores {' and '.join('precision.' + role for role in lost)}",
                cause="bitsandbytes takes gradients in the weight's dtype and rounds updates to nearest",
                fix="train.optimizer: adamw, or precision.preset: bf16-mixed",
            )  # fmt: skip


@rule("PR029")
def base_without_frozen_weights(f: Facts) -> Iterator[Finding]:
    """A dtype for frozen weights, and every weight is trained

    **Why it matters.** `base` is the dtype of weights that are not trained. In full fine-tuning there are none: the setting would have no
    effect, and the memory that it seems to save is not saved.

    **Example.** `adapter.kind: none` with `base: fp32`.

    **What to do.** Leave `base` out. `trainable` is the dtype of weights that are trained, `compute` that of their products.
    """
    if f["base"].given and f.value("base") != "nf4" and f.value("frozen") == "no":
        yield _finding(
            "PR029", f, ("base", "adapter"), f"every weight is trained: precision.base: {f.value('base')} has no effect",
            cause="base is the dtype of frozen weights, and there are none",
            fix="remove precision.base (precision.trainable and precision.compute are the roles of trained weights), or adapter.kind: lora",
        )  # fmt: skip


@rule("PR025")
def noise_levels_in_low_precision(f: Facts) -> Iterator[Finding]:
    """The noise level of a diffusion model in half precision

    **Why it matters.** bf16 has 8 significant bits: of 1000 noise levels 498 remain apart, and one is moved by up to 3.5. The model is then
    told another level than the one its picture was mixed with, in training and in every denoising step.

    **Example.** `precision.timesteps: bf16`.

    **What to do.** Leave `timesteps` at fp32; it is one number a picture.
    """
    if "timesteps" in f.settings and f.value("timesteps") != "fp32":
        yield _finding(
            "PR025", f, ("timesteps", "compute"), f"noise levels in {f.value('timesteps')}",
            cause="a model would be told another noise level than its picture has: up to 3.5 of 1000 off in bf16",
            fix="precision.timesteps: fp32",
        )  # fmt: skip


@rule("PR026")
def latents_narrower_than_the_loss(f: Facts) -> Iterator[Finding]:
    """Latents, noise and target narrower than the loss that compares them

    **Why it matters.** The noise level and the target would be rounded before the loss sees them: sigma is up to 1.94 of 1000 off in bf16,
    as in example scripts that cast it to the latents' dtype. A loss in fp32 cannot bring that back.

    **Example.** `precision.latents: bf16` with `loss: fp32`.

    **What to do.** Leave `latents` at fp32: a latent is small beside one activation.
    """
    if "latents" in f.settings and itemsize(f.value("latents")) < itemsize(f.value("loss")):
        yield _finding(
            "PR026", f, ("latents", "loss"), f"latents, noise and target in {f.value('latents')} under a loss in {f.value('loss')}",
            cause="noise level and target are rounded before the loss is computed",
            fix=f"precision.latents: {f.value('loss')}",
        )  # fmt: skip


@rule("PR028")
def average_in_low_precision(f: Facts) -> Iterator[Finding]:
    """A moving average of the weights in half precision

    **Why it matters.** An average with decay 0.999 moves by a thousandth of the difference at each step, which bf16 (8 significant bits)
    rounds away: in bf16 such an average moved by 6% of what it should.

    **Example.** `train.ema: 0.999` with `precision.ema: bf16`.

    **What to do.** Leave `ema` at fp32.
    """
    if "ema" in f.settings and f.value("ema") != "fp32":
        yield _finding(
            "PR028", f, ("ema",), f"the moving average of the weights in {f.value('ema')}",
            cause="its small steps are rounded away: with decay 0.999 it moves by 6% of what it should in bf16",
            fix="precision.ema: fp32",
        )  # fmt: skip


@rule("PR027")
def bf16_parts_without_hardware(f: Facts) -> Iterator[Finding]:
    """bf16 or fp16 for a part of a diffusion pipeline on a device without it

    **Why it matters.** A VAE or text encoder in bf16 on a GPU without bf16 is emulated or refused.

    **Example.** `precision.text_encoder: bf16` on a T4.

    **What to do.** `fp32`, or `fp16` for the text encoders.
    """
    asked = [role for role in ("vae", "text_encoder") if role in f.settings and f.value(role) == "bf16"]
    if asked and f.bf16 == "none":
        yield _finding(
            "PR027", f, tuple(asked), f"bf16 was asked for, and {f.device} has no bf16",
            cause="bf16 needs compute capability 8.0 (Ampere), CDNA, or a CPU",
            fix=f"precision.{asked[0]}: fp32",
        )  # fmt: skip
