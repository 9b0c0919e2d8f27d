"""The schema of a run: ten sections, every key with a default, a unit and a sentence; unknown keys
are forbidden. Imports no torch.

The sentences become `isotype init --schema`, the comments that `isotype init` writes, and the
reference in the documentation.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
SIZE = r"^[0-9]+(\.[0-9]+)? ?(GiB|MiB|GB|MB)$"


def size_in_bytes(size: str) -> int:
    """Of a text that matches SIZE."""
    match = re.match(SIZE, size)
    assert match is not None, size
    unit = match.group(2)
    return int(float(size.removesuffix(unit)) * UNITS[unit])


Dtype = Literal["fp32", "bf16", "fp16"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
EveryKth = Annotated[str, Field(pattern=r"^every [1-9][0-9]*$", examples=["every 2"])]

MemorySize = Annotated[str, Field(pattern=SIZE, examples=["20GiB"])]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelSection(Section):
    name: str | None = None
    """Folder or hub id of a causal language model, or of a diffusers pipeline. Not needed when
    `config` builds a language model.
    """
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the architecture of `name` or `config` with fresh weights, from `train.seed`.
    """
    config: dict[str, Any] | str | None = None
    """With `init: random`: a config.json, or its content (`model_type: llama`, `hidden_size: 128`,
    ...). One of a diffusers model (`_class_name: FluxTransformer2DModel`, ...) takes the place of
    the denoiser's in the pipeline `name`, whose other parts are used.
    """
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, when it is not the model's."""
    add_tokens: list[str] = []
    """Special tokens added to the vocabulary (`["<|im_start|>"]`). Their embeddings begin at the
    mean of the others; embedding and head are trained in full and saved with the adapter, and the
    base with its new rows is kept in the run folder.
    """
    attention: Literal["auto", "sdpa", "eager", "flash", "flex"] = "auto"
    """Attention implementation. `auto` takes sdpa where the family has it, else eager. `flash`
    needs a GPU and flash-attn.
    """
    rope_parameters: dict[str, Any] | None = None
    """Changes to the rotary embedding, by the names of the model's own config.json (`{rope_type:
    yarn, factor: 4.0}`), for rows longer than the model was made for. A saved model has them in its
    config.json; an adapter needs a base loaded with the same.
    """
    optimize: bool = True
    """Replace norms, rotary, gated MLP, and head with loss by Isotype's ops if their results agree;
    the manifest lists the replacements.
    """
    lora_branch: Literal["compute", "fp32"] = "compute"
    """With `optimize`: dtype of a LoRA adapter's own two small products. `fp32` is slower, and
    loses less where `compute` is narrower.
    """
    allow_unquantised: bool = False
    """Train on a 4-bit base of which more than 10% stays unquantised, such as stacked experts,
    which bitsandbytes does not quantise.
    """
    offload: Literal["none", "blocks"] = "none"
    """`blocks`: the frozen weights of the model's blocks wait in host memory and are fetched one
    block ahead (GPU only, with an adapter): two blocks are on the device at a time. Every block
    recomputes. Losses and gradients are the same, bit for bit.
    """
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources you trust."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes CUDA or ROCm where there is one, else the CPU."""


class DataSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training data: a file, folder, glob, `hf:NAME` (a dataset of the hub) or `stdlib` (made from
    Python's own docstrings); or a list of these, each perhaps a mapping with `name`, `weight`,
    `format`, `columns`, `limit`, `subset`, `split`, `revision`.
    """
    eval: str | list[str | dict[str, Any]] | dict[str, str | list[str | dict[str, Any]]] | None = (
        None
    )
    """Evaluation data, named as in `train`, or several sets by name (`{chat: chats.jsonl, code:
    [a.jsonl, b.jsonl]}`), each with a loss of its own, `eval_loss_NAME`; without it `eval_split` of
    the training rows are held out.
    """
    eval_split: Fraction = 0.05
    """Share of the training rows held out when `eval` is not given; 0 for none."""
    format: Literal[
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "preference",
        "labelled",
        "text",
    ] = "auto"
    """The format of a row; `auto` detects it from the keys and prints the reason. `preference`: for
    objectives that learn from pairs, `labelled`: for kto.
    """
    columns: dict[str, str | None] | None = None
    """The data's own names for keys: `{prompt: question, completion: answer}` reads `question` as
    the prompt. `{label: null}` does not read the data's key `label`, and says nothing of it.
    """
    max_length: PositiveInt = 1024
    """Longest row in tokens; longer ones are cut at the end and counted."""
    packing: bool = False
    """Join several training rows into one of `max_length` tokens, in which each row attends only to
    itself: no padding, the same loss.
    """
    loss_on: Literal["assistant", "all"] = "assistant"
    """`assistant`: loss on answers and their end-of-turn token only. Plain text is always learnt
    whole.
    """
    min_pixels: PositiveInt | None = None
    """Vision-language: a picture with fewer pixels is made larger, its shape kept, before the
    model's processor sees it.
    """
    max_pixels: PositiveInt | None = None
    """Vision-language: a picture with more pixels is made smaller: fewer tokens, where the family
    has a number of them for each size.
    """
    chat_template: str | None = None
    """Replaces the tokenizer's own chat template: a Jinja file, or one of chatml, llama3, gemma,
    mistral, zephyr.
    """
    template_kwargs: dict[str, Any] = {}
    """Settings of the chat template (`{enable_thinking: false}`), in training, evaluation, samples
    and in the template of the result.
    """
    thoughts: Literal["template", "last", "all", "none"] = "template"
    """Thoughts of answers (`<think>...</think>`, `reasoning_content`, `thinking`): `template`
    leaves them to the chat template, `last` keeps and learns those behind the last question, `all`
    those of every answer, `none` removes them.
    """
    limit: PositiveInt | None = None
    """Use only this many rows, from the beginning: for a trial run."""
    shuffle: bool = True
    """Shuffle the rows of every epoch, from `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used (broken, wrong keys or types, refused by the template): `error`
    names all of them before training, `skip` leaves them out, counts them and lists them in
    bad_rows.jsonl. Rows with an empty answer are always left out and counted.
    """
    stream: bool = False
    """Tokenise while training instead of before: for data that no disk holds. Needs `train.steps`.
    """
    shuffle_buffer: PositiveInt = 4096
    """With `stream`: rows read, tokenised and shuffled at a time."""
    cache: str = "auto"
    """Cache of tokenised rows for later runs: a folder, `none`, or `auto`: the user's cache folder,
    for sources of 1 MB and more.
    """


class ImagesSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training pictures of a diffusion run: a folder (each picture with its captions in a .txt of
    the same name, a caption a line), a file of rows that name pictures (JSONL, CSV, Parquet), or a
    list of these, each perhaps a mapping with `name`, `caption` (of all its pictures), `columns`,
    `repeats`, `resolution` (its own, or several, `[512, 768]`, of which each picture comes in
    each).
    """
    eval: str | list[str | dict[str, Any]] | None = None
    """Evaluation pictures, named as in `train`; without it `eval_split` of the training pictures
    are held out.
    """
    eval_split: Fraction = 0.05
    """Share of the training pictures held out when `eval` is not given; 0 for none."""
    regularisation: str | list[str | dict[str, Any]] | None = None
    """Pictures of what the model shall still draw as before (prior preservation), named as in
    `train`. They are trained on with the others, their loss times `weight`, a key of a mapping, 1
    by default. With `draw: 100` and a `caption` the base model draws so many into the folder before
    training, once, and they come one to one with the others.
    """
    masks: str | None = None
    """Folder of grey pictures, named as those of `train`: the loss counts where the mask is white.
    A row may name its own (`mask`).
    """
    controls: str | None = None
    """Of a model that edits: folder of the pictures before the edit, named as those of `train`,
    which are the edited ones; instructions are captions. A row may name its own (`control`), a
    source its own folder.
    """
    columns: dict[str, str] | None = None
    """The data's own names for `image`, `text`, `mask`, `control`: `{image: file, text: prompt}`.
    By default common names are tried.
    """
    resolution: PositiveInt = 512
    """Side in pixels: a picture is scaled to cover a square of it, and `crop` is taken. A source
    may have a `resolution` of its own.
    """
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """Above 1: pictures keep their shape, up to so many times longer than wide or wider than long.
    They are put into aspect buckets of about `resolution` x `resolution` pixels, and the pictures
    of a step come from one bucket where there are enough.
    """
    crop: Literal["center"] | PositiveInt = "center"
    """What is cut off where a picture does not fit: `center` keeps the middle; a number keeps so
    many windows, placed at random, of which one is drawn each time a picture is seen.
    """
    flip: bool = False
    """Mirror half of the pictures, drawn anew each time one is seen."""
    captions: Literal["files", "names"] = "files"
    """Of a folder without a metadata file: `files` reads each picture's .txt, `names` takes the
    picture's name, with spaces for _ and -.
    """
    uncaptioned: Literal["error", "empty", "skip"] = "error"
    """Pictures without a caption: `error` names them, `empty` trains on them with the empty
    caption, `skip` leaves all of them out.
    """
    trigger: str | None = None
    """A word that is put before every caption of `train`, with a comma behind it."""
    tag_orders: PositiveInt | None = None
    """For captions of tags that commas separate: so many random orders of each caption are encoded,
    of which one is drawn each time a picture is seen. By default captions stay as they are.
    """
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """With `tag_orders`: so many first tags stay in front, and are never left out."""
    tag_dropout: Fraction = 0.0
    """With `tag_orders`: the share of the other tags that each of the orders leaves out."""
    caption_dropout: Fraction = 0.0
    """Share of the captions that are replaced by an empty one, drawn anew each time: what guidance
    needs.
    """
    limit: PositiveInt | None = None
    """Use only the first pictures: for a trial."""
    shuffle: bool = True
    """Shuffle the pictures of every epoch, from `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A picture that cannot be used (cut, no picture, without caption): `error` names all of them
    before training, `skip` leaves them out and lists them in bad_rows.jsonl; more than 5% are
    refused all the same.
    """
    cache: str = "auto"
    """Where latents and text embeddings are kept for the next run: a folder, `none` (memory only),
    or `auto`, the user's cache folder.
    """


class DiffusionSection(Section):
    objective: Literal["auto", "flow_matching", "epsilon", "v"] = "auto"
    """What the denoiser predicts. `auto`: what its scheduler declares."""
    timesteps: Literal["auto", "logit_normal", "uniform", "mode"] = "auto"
    """How the noise level of a training picture is drawn, before the shift. `auto`: logit_normal
    for flow matching, else uniform. `mode`: SD3's density with heavy tails.
    """
    logit_mean: float = 0.0
    """`logit_normal`: the mean; above 0 more noise."""
    logit_std: PositiveFloat = 1.0
    """`logit_normal`: the deviation, which others call sigmoid scale; below 1 more levels in the
    middle.
    """
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = 1.29
    """`mode`: above 0 more levels in the middle, below 0 more at the ends."""
    least_noise: Fraction = 0.0
    """Levels are drawn from here on, as a share of all (0.2: timestep 200 of 1000)."""
    most_noise: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Levels are drawn up to here."""
    noise_offset: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Adds so many deviations of one random number a channel to the noise (epsilon and v), for
    darker and brighter pictures: 0.05.
    """
    loss: Literal["l2", "huber"] = "l2"
    """`l2`: the squared error. `huber`: the smooth one, 2 c (sqrt(error^2 + c^2) - c), which weighs
    outliers less.
    """
    huber_c: PositiveFloat = 0.1
    """c of `huber`."""
    shift: Literal["auto"] | PositiveFloat = "auto"
    """Flow matching: moves noise levels towards more noise, s t / (1 + (s - 1) t). `auto`: the
    scheduler's own, by resolution where it has that.
    """
    weighting: Literal["none", "min_snr"] = "none"
    """Weight of a picture's loss by its noise level. `min_snr` (epsilon and v) weighs levels with
    little noise down.
    """
    snr_gamma: PositiveFloat = 5.0
    """`min_snr`: the signal-to-noise ratio above which a level is weighed down."""
    guidance: Annotated[float, Field(ge=0.0)] = 1.0
    """The guidance given to a guidance-distilled model (Flux.1-dev) in training."""
    eval_draws: PositiveInt = 4
    """Noise levels at which each evaluation picture is denoised, spread evenly; the same in every
    evaluation.
    """
    max_text_length: PositiveInt | None = None
    """Longest caption in tokens of the largest text encoder; by default the model family's own."""


class AdapterSection(Section):
    kind: Literal["lora", "lokr", "none"] = "lora"
    """`lora` trains a PEFT adapter; `lokr`, of pictures, one whose change of a weight is a
    Kronecker product, computed by PEFT's code; `none` trains every weight.
    """
    r: PositiveInt = 16
    """Rank."""
    alpha: PositiveFloat = 32.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with rslora)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """`all-linear`, or names of modules as PEFT understands them (`[q_proj, v_proj]`). In a mixture
    of experts `all-linear` includes the experts and leaves the routers as they are.
    """
    parameters: list[str] = []
    """Parameters to adapt besides the modules, by the end of their names: stacked experts
    (`[experts.down_proj]`) or a router's weight.
    """
    factor: PositiveInt | None = None
    """Of lokr: the side of the small factor, where it divides a weight's side; by default near the
    root of that side.
    """
    rslora: bool = False
    """Rank-stabilised scale."""
    dora: bool = False
    """DoRA: each row of the adapted weight gets a length that is trained. Not on experts; `dropout`
    leaves it to PEFT's slower code. Of pictures also, but not in a ComfyUI file.
    """
    rank_pattern: dict[str, PositiveInt] = {}
    """Other ranks for some modules: names, or ends of names as regular expressions (`{down_proj:
    32, "layers.0.*q_proj": 4}`).
    """
    alpha_pattern: dict[str, PositiveFloat] = {}
    """The same of `alpha`."""
    plus: Annotated[float, Field(ge=1.0)] | None = None
    """LoRA+: B's learning rate as a multiple of A's, which is `train.learning_rate` (16 in the
    paper).
    """
    start: Literal["default", "orthogonal", "pissa", "olora"] = "default"
    """Where A and B begin: B at zero, both orthogonal with product zero, or (pissa, olora) at the
    base weight's largest singular vectors or at its QR, which are taken off the base. Such an
    adapter is saved as an ordinary one of twice the rank, for the untouched base. Not on experts,
    not on a packed base.
    """
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapter (`[lm_head, embed_tokens]`); nf4 leaves
    them as they are, packed ones are refused.
    """
    train_tokens: list[str] = []
    """Tokens of the vocabulary whose embeddings are trained, and their rows of a head that is the
    embedding (`["<|im_start|>"]`). The other rows stay frozen.
    """
    start_from: str | None = None
    """Folder of a PEFT adapter to continue training."""
    text_encoders: bool = False
    """Diffusion, SDXL and Stable Diffusion: the CLIP text encoders' attention and MLPs get an
    adapter too, and captions are encoded in each step.
    """
    text_encoder_rate: PositiveFloat | list[PositiveFloat] | None = None
    """Their learning rate, or one for each of them in the pipeline's order (`[5e-5, 2e-5]`); by
    default train.learning_rate.
    """
    vision: Literal["none", "lora", "full"] = "none"
    """Vision-language: what is trained of the tower that sees the pictures; `none` leaves it
    frozen, also with `kind: none`.
    """
    projector: Literal["none", "lora", "full"] = "none"
    """Vision-language: the same of the layers between tower and language model (Qwen's merger is
    part of its tower).
    """


class PrecisionSection(Section):
    preset: Literal[
        "auto", "fp32", "bf16-mixed", "bf16-lora", "nf4-lora", "bf16-pure", "fp16-mixed"
    ] = "auto"
    """A named precision; `isotype plan` shows what each role becomes and why."""
    base: (
        Literal["fp32", "bf16", "fp16", "nf4", "fp8", "int8", "int4", "nvfp4", "mxfp4", "gguf"]
        | None
    ) = None
    """Frozen weights. A checkpoint that was published quantised is taken as it is; a declared word
    must be what it is.
    """
    trainable: Dtype | None = None
    """Weights that are trained."""
    compute: Dtype | None = None
    """Matrix products and activations."""
    grads: Dtype | None = None
    """Gradients as accumulated. `fp32` with `trainable: bf16` accumulates in fp32 buffers."""
    reduce: Dtype | None = None
    """Gradient sums across ranks."""
    optimizer: Literal["fp32", "bf16", "fp16", "int8"] | None = None
    """Optimizer states; `int8` is what `train.optimizer: adamw8bit` and `lion8bit` keep, and is
    resolved from them.
    """
    loss: Dtype | None = None
    """Log-probabilities and loss."""
    norms: Dtype | None = None
    """Arithmetic inside norms; their output is always `compute`."""
    generate: Dtype | None = None
    """Sampling during and after training."""
    vae: Dtype | None = None
    """Diffusion: weights and arithmetic of the VAE."""
    text_encoder: Dtype | None = None
    """Diffusion: weights of the text encoders, and their embeddings as kept."""
    timesteps: Dtype | None = None
    """Diffusion: the noise level as the model is told, and its sinusoidal embedding."""
    latents: Dtype | None = None
    """Diffusion: latents, noise, noise level and target, before the model."""
    ema: Dtype | None = None
    """Diffusion: the moving average that `train.ema` keeps."""
    vision: Dtype | None = None
    """Vision-language: frozen weights of tower and projector, and the pixels that they are given.
    Follows `compute`.
    """
    save: str | None = None
    """Files: one dtype, or `model bf16, adapter fp32`."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How an update is rounded into `trainable`; `stochastic` keeps bf16 weights learning."""
    loss_scaling: Literal["none", "dynamic"] | None = None
    """`dynamic` is what fp16 gradients need."""


class PreferenceSection(Section):
    beta: PositiveFloat = 0.1
    """How strongly the answers' log-probabilities are told apart: of dpo, ipo and kto, also how
    near the model stays to its start. simpo's paper has 2 to 10.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Of dpo and cpo, the share of the pairs that is taken to be labelled the wrong way round."""
    simpo_gamma: Annotated[float, Field(ge=0.0)] = 0.5
    """Of simpo, the margin by which the chosen answer shall be ahead, after `beta`."""
    desirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Of kto, the weight of the losses of wanted answers."""
    undesirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Of kto, the weight of the losses of unwanted answers."""
    center_rewards_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Of reward, the weight of (s + t)^2, which keeps the mean of a pair's scores near 0; 0.01 is
    usual.
    """
    nll: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the chosen answer's negative log-likelihood, the mean over its tokens, added to a
    pair's loss. Default: 1 for orpo and cpo, 0 for the others.
    """


class DistilSection(Section):
    teacher: str | None = None
    """The teacher: a folder or a hub id, of the same vocabulary. It is frozen, in the dtype of
    products.
    """
    revision: str | None = None
    """Branch, tag or commit of the teacher."""
    beta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The divergence of a token: 0 is KL(teacher || student), 1 is KL(student || teacher), between
    them the generalised Jensen-Shannon.
    """
    temperature: PositiveFloat = 1.0
    """Divides the logits of both; the loss is not multiplied by its square."""
    cross_entropy: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the loss that is the cross-entropy of the data's own tokens."""


# where an optimizer needs another default than AdamW: bitsandbytes' beta2 and a quarter of AdamW's
# rate for Lion (Chen et al. 2023 advise a third to a tenth), torch's rate for Adafactor, which is
# relative to the weights, and 1 for Prodigy, a factor of the rate that it finds
DEFAULTS: dict[str, dict[str, Any]] = {
    "lion": {"learning_rate": 5e-5, "beta2": 0.99},
    "lion8bit": {"learning_rate": 5e-5, "beta2": 0.99},
    "adafactor": {"learning_rate": 1e-2},
    "schedule-free": {"schedule": "constant"},
    "prodigy": {"learning_rate": 1.0},
}


class TrainSection(Section):
    objective: Literal["sft", "dpo", "ipo", "simpo", "orpo", "cpo", "kto", "reward", "distil"] = (
        "sft"
    )
    """What is learnt. `sft`: the answers. dpo, ipo, simpo, orpo and cpo learn from pairs of a
    chosen and a rejected answer, kto from answers with a label; dpo, ipo and kto beside the model
    as the run starts. reward trains a score head on pairs. distil learns from a teacher (section
    `distil`).
    """
    steps: PositiveInt | None = None
    """Optimizer steps; overrides `epochs`, unless the command line sets only that."""
    epochs: PositiveFloat = 1.0
    """Passes over the training data."""
    batch_size: PositiveInt = 4
    """Rows in one forward pass."""
    accumulate: PositiveInt = 1
    """Forward passes in one optimizer step; normalised by tokens, so 1 x 8 equals 8 x 1."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 2e-4
    """Peak learning rate; by default 5e-5 with lion and lion8bit, 0.01 with adafactor, 1 with
    prodigy.
    """
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate after warm-up; `wsd`: constant, then linear decay over `decay` of
    the steps. By default constant with schedule-free.
    """
    warmup: Annotated[float, Field(ge=0.0)] = 0.03
    """Warm-up: a share of the steps below 1, a number of steps from 1 on."""
    decay: Fraction = 0.2
    """With `wsd`: the share of the steps that decays."""
    min_learning_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Where cosine, linear and wsd end, as a share of the peak."""
    aux_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Coefficient of a mixture's balancing loss, which is logged as `aux_loss`. By default the
    model's own, where its config asks for the loss (`output_router_logits`); 0 leaves it out.
    """
    optimizer: Literal[
        "adamw",
        "adamw8bit",
        "adamw8bit-paged",
        "lion",
        "lion8bit",
        "muon",
        "adafactor",
        "schedule-free",
        "prodigy",
    ] = "adamw"
    """`adamw8bit` (bitsandbytes) keeps its states in 8 bits, `adamw8bit-paged` in memory that the
    GPU shares with the host; `lion` has one state, `adafactor` a row and a column for each matrix.
    `muon` takes the matrices, and AdamW the rest. `schedule-free` averages the weights in place of
    a schedule, `prodigy` finds its rate. All but `adamw` need fp32 weights and gradients.
    Stochastic rounding comes with `precision.rounding`.
    """
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    embedding_noise: PositiveFloat | None = None
    """NEFTune: noise on the embeddings of a training step, uniform in alpha / sqrt(tokens of a row
    x width) of this alpha; 5 to 15 in the paper. Evaluation and samples have none. Of sft only.
    """
    beta1: Fraction = 0.9
    """Decay of the first moment; not with adafactor."""
    beta2: Fraction = 0.999
    """Decay of the second moment, with lion (0.99 by default) of its one; not with adafactor."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment; not with lion and adafactor."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Diffusion: decay of an exponential moving average of the trained weights (0.999), saved as a
    second result beside the trained one.
    """
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm; 0 for no clipping."""
    gradient_checkpointing: Literal["auto", "none", "layers", "layers+offload"] = "auto"
    """`layers` recomputes layers in backward: less memory, up to a third more time, the same
    numbers. `layers+offload` also moves the inputs of these layers to host memory (GPU only).
    `auto`: `none` if the memory plan fits, else the fewest layers that fit, else all with offload.
    `true` means `layers`, `false` means `none`.
    """
    checkpointed_layers: (
        Literal["all"] | PositiveInt | EveryKth | list[Annotated[int, Field(ge=0)]]
    ) = "all"
    """Which layers: `all`, a number (the first ones, which save most), `every 2`, or a list of
    positions from 0.
    """
    keep_attention: bool = False
    """With `layers`: attention's output and logsumexp are kept, and backward does not compute
    attention again; with `layers+offload` they wait in host memory. About twice what a layer keeps
    otherwise. `gradient_checkpointing: auto` keeps them where they fit.
    """
    memory: MemorySize | None = None
    """What the step may take at its peak, by its plan (`20GiB`, `800MiB`): a target for
    `gradient_checkpointing: auto`, which otherwise takes all the memory there is to be fast.
    """
    seed: int = 0
    """Seed of the random weights, the held-out rows, the data order, dropout and sampling."""
    deterministic: bool = False
    """Deterministic algorithms only; slower on a GPU."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations of all rows. By default a run has at most ten, one of them at the
    end, and one before step 1, and all together take about a fifth of the rows that are trained:
    there are fewer, or each takes one row of so many, and the last one also takes all.
    """
    eval_batch_size: PositiveInt | None = None
    """Rows in one evaluation pass; the result does not depend on it. Default: `batch_size`."""
    patience: PositiveInt | None = None
    """Stop after so many evaluations without a better loss."""
    stop_on: str | None = None
    """The set of `data.eval` whose loss `patience` and the best step go by; default: all of them
    together.
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_optimizer_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {**DEFAULTS.get(str(values.get("optimizer")), {}), **values}
        return values


class RunSection(Section):
    folder: str = "runs/{name}"
    """The run folder, for all files of the run; `{name}` becomes model, data and time."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; by default `eval_every`, else a tenth of the run; one at the end."""
    keep: PositiveInt = 2
    """Checkpoints kept, besides the best."""
    save: Literal["last", "best"] | None = None
    """Which weights are the result: those of the last step, or of the step with the best evaluation
    loss. Default: `best` with `train.patience`, else `last`.
    """
    adapters_every: PositiveInt | None = None
    """Steps between adapters that are written as the run goes, each to `adapters/step_N` in the run
    folder, complete as the result is. By default only the last one is written.
    """
    adapters_keep: PositiveInt | None = None
    """How many of these adapters are kept, the newest; by default all."""
    adapter_format: Literal["diffusers", "comfyui"] = "diffusers"
    """Diffusion: with `comfyui` each adapter's folder has one more file, comfyui.safetensors, with
    the names and `.alpha` tensors that ComfyUI reads.
    """
    log_every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    sample_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between samples, 0 for none; by default a quarter of the run. The first are taken
    before step 1, the last after the last.
    """
    samples: list[str | dict[str, Any]] = []
    """Prompts answered (or drawn) during training; by default the first evaluation rows, and for
    diffusion none. Of pictures each may be a mapping: `{prompt: a dog, negative: blurry, size: 768,
    steps: 30, guidance: 5, seed: 7}`.
    """
    sample_tokens: PositiveInt = 64
    """Longest sample in new tokens."""
    sample_steps: PositiveInt = 20
    """Diffusion: denoising steps of a sample."""
    sample_size: PositiveInt | None = None
    """Diffusion: side of a sample in pixels; by default `images.resolution`."""
    sample_guidance: Annotated[float, Field(ge=0.0)] = 3.5
    """Diffusion: guidance scale of a sample."""
    observe_every: PositiveInt = 100
    """Steps between observations of every dtype (step 1 is always observed)."""
    report: bool = True
    """Write report.html."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where the metrics go besides metrics.jsonl; each needs the extra of its name
    (`pip install '.[wandb]'` in the checkout). wandb is offline without a key.
    """
    push_to_hub: str | None = None
    """Repository of the hub that gets the result after the run: `ORG/NAME`, or a name of your own.
    Token and name are checked before the run; an upload that fails does not fail it.
    """
    push_merged: bool = False
    """Push the adapter merged into its base, instead of the adapter."""
    push_private: bool = True
    """Whether a repository that is made for it is private."""


class ParallelSection(Section):
    kind: Literal["auto", "replicate", "shard", "hybrid"] = "auto"
    """What several processes share. `replicate`: each holds the whole model and computes its share
    of a step's rows; gradients are summed once a step. `shard`: each holds a part of every weight,
    gradient and state, and a layer's weights are gathered while it runs. `hybrid`: the processes of
    a machine share the model, and each machine has all of it. `auto` asks the memory plan:
    `replicate` where it fits.
    """
    timeout: PositiveFloat = 1800.0
    """Seconds to wait for another process before it is named and the run ends: longer than samples
    of the whole run's prompts take.
    """


class RunConfig(Section):
    """One run: what `isotype train FILE.yaml` reads."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    images: ImagesSection = ImagesSection()
    diffusion: DiffusionSection = DiffusionSection()
    adapter: AdapterSection = AdapterSection()
    precision: PrecisionSection = PrecisionSection()
    preference: PreferenceSection = PreferenceSection()
    distil: DistilSection = DistilSection()
    train: TrainSection = TrainSection()
    run: RunSection = RunSection()
    parallel: ParallelSection = ParallelSection()
