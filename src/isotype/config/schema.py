"""The schema of a run's configuration: sections of keys, each key with a type, a default and a
description. Unknown keys are errors. Imports no torch.

The descriptions appear in `isotype init --schema`, in the comments that `isotype init` writes, and
in docs/configuration.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BYTES_PER_UNIT = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(GiB|MiB|GB|MB)$"


def size_in_bytes(size: str) -> int:
    """Returns the bytes of a text that matches SIZE, such as `20GiB`."""
    match = re.match(SIZE_PATTERN, size)
    assert match is not None, size
    unit = match.group(2)
    return int(float(size.removesuffix(unit)) * BYTES_PER_UNIT[unit])


Dtype = Literal["fp32", "bf16", "fp16"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
EveryKth = Annotated[str, Field(pattern=r"^every [1-9][0-9]*$", examples=["every 2"])]

MemorySize = Annotated[str, Field(pattern=SIZE_PATTERN, examples=["20GiB"])]


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
    """Folder or hub id of a causal language model or of a diffusers pipeline. Not needed for a
    language model that `config` describes.
    """
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the architecture of `name` or `config` with random weights, seeded by
    `train.seed`.
    """
    config: dict[str, Any] | str | None = None
    """With `init: random`: a config.json, or its content (`model_type: llama`, `hidden_size: 128`,
    ...). The config of a diffusers model (`_class_name: FluxTransformer2DModel`, ...) replaces the
    denoiser of the pipeline `name`; the other parts of the pipeline stay.
    """
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. By default the model's."""
    add_tokens: list[str] = []
    """Special tokens to add to the vocabulary (`["<|im_start|>"]`). Their embeddings begin as the
    mean of the other embeddings. Embedding and head are trained in full and saved with the adapter.
    The run folder keeps the base model with the new rows.
    """
    attention: Literal["auto", "sdpa", "eager", "flash", "flex"] = "auto"
    """Attention implementation. `auto` uses sdpa where the model family supports it, else eager.
    `flash` needs a GPU and the package flash-attn.
    """
    rope_parameters: dict[str, Any] | None = None
    """Changes to the rotary embedding (`{rope_type: yarn, factor: 4.0}`), with the names of
    config.json, for rows longer than the model's context. A saved model has these values in its
    config.json. An adapter needs a base model that is loaded with the same values.
    """
    optimize: bool = True
    """Replace norms, rotary embedding, gated MLP, and head with loss by Isotype's ops where the
    results agree. The manifest lists the replacements.
    """
    lora_branch: Literal["compute", "fp32"] = "compute"
    """With `optimize`: dtype of the two products of a LoRA adapter, x A and (x A) B. `fp32` is
    slower, and more exact where `compute` is narrower.
    """
    allow_unquantised: bool = False
    """Train on a 4-bit base even if more than 10% of it stays unquantised. bitsandbytes does not
    quantise stacked experts, for example.
    """
    offload: Literal["none", "blocks"] = "none"
    """`blocks` keeps the frozen weights of the model's blocks in host memory and fetches each block
    while the previous one computes, so that two blocks are on the device at a time. Needs a GPU and
    an adapter. Every block is recomputed in backward. Losses and gradients are bit-identical.
    """
    trust_remote_code: bool = False
    """Run Python code from the model's repository. Use it only for sources you trust."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` uses CUDA or ROCm if a GPU is present, else the CPU."""


class DataSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training data: a file, folder, glob, `hf:NAME` (a dataset of the hub) or `stdlib` (questions
    and answers from Python's docstrings), or a list of these. An entry of the list can be a mapping
    with `name`, `weight`, `format`, `columns`, `roles`, `limit`, `subset`, `split`, `revision`.
    """
    eval: str | list[str | dict[str, Any]] | dict[str, str | list[str | dict[str, Any]]] | None = (
        None
    )
    """Evaluation data, named as in `train`, or several sets by name (`{chat: chats.jsonl, code:
    [a.jsonl, b.jsonl]}`). Each named set has its own metric, `eval_loss_NAME`. Without this key,
    the share `eval_split` of the training rows is held out.
    """
    eval_split: Fraction = 0.05
    """Share of the training rows that is held out for evaluation when `eval` is not given; 0 for
    none.
    """
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
    """The format of a row. `auto` detects it from the row's keys and prints the reason. Objectives
    that learn from pairs need `preference`, kto needs `labelled`.
    """
    columns: dict[str, str | None] | None = None
    """Renames keys of the data: `{prompt: question, completion: answer}` reads `question` as the
    prompt. `{label: null}` ignores the data's key `label` without a warning. `role`, `content`,
    `tool_calls`, `reasoning_content`, `weight` and `train` are keys of a turn: `{messages: dialog,
    role: speaker, content: text}`.
    """
    roles: dict[str, str | list[str]] | None = None
    """The data's words for the roles of turns: `{user: [customer, caller], assistant: agent}`. Common
    words (`human`, `gpt`) are known.
    """
    max_length: PositiveInt = 1024
    """Longest row in tokens. Longer rows are cut at the end, and counted."""
    packing: bool = False
    """Join several training rows into one row of `max_length` tokens, without padding. Each of them
    attends only to itself, so the loss is the same.
    """
    loss_on: Literal["assistant", "all"] = "assistant"
    """`assistant`: only the tokens of answers and their end-of-turn tokens give a loss. All tokens
    of plain text always give a loss.
    """
    min_pixels: PositiveInt | None = None
    """Vision-language: a picture with fewer pixels is scaled up before the model's processor gets
    it. Its aspect ratio is kept.
    """
    max_pixels: PositiveInt | None = None
    """Vision-language: a picture with more pixels is scaled down. It then has fewer tokens in
    families whose number of tokens depends on the size.
    """
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja file, or one of chatml, llama3, gemma,
    mistral, zephyr.
    """
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template (`{enable_thinking: false}`). They apply in training,
    evaluation and samples, and are written into the template of the result.
    """
    thoughts: Literal["template", "last", "all", "none"] = "template"
    """How to treat the thoughts of answers (`<think>...</think>`, `reasoning_content`, `thinking`).
    `template` lets the chat template decide. `last` keeps and learns the thoughts after the last
    question, `all` the thoughts of every answer. `none` removes them.
    """
    limit: PositiveInt | None = None
    """Use only this many rows from the beginning of the data, for a trial run."""
    shuffle: bool = True
    """Shuffle the rows of every epoch, from `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with rows that cannot be used (broken, wrong keys or types, refused by the
    template). `error` names all of them before training and stops. `skip` leaves them out, counts
    them and lists them in bad_rows.jsonl. Rows with an empty answer are always left out and
    counted.
    """
    stream: bool = False
    """Tokenise during training instead of before it, for data that is larger than the disk. Needs
    `train.steps`.
    """
    shuffle_buffer: PositiveInt = 4096
    """With `stream`: number of rows that are read, tokenised and shuffled together."""
    cache: str = "auto"
    """Cache of tokenised rows for later runs: a folder, `none` or `auto`. `auto` uses the user's
    cache folder for sources of 1 MB and more.
    """


class ImagesSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training pictures of a diffusion run: a folder, a file of rows that name pictures (JSONL,
    CSV, Parquet), or a list of these. In a folder, the captions of a picture are in a .txt file of
    the same name, one per line. An entry of the list can be a mapping with `name`, `caption` (for
    all its pictures), `columns`, `repeats`, `resolution`. With several resolutions (`[512, 768]`),
    each picture comes once at each of them.
    """
    eval: str | list[str | dict[str, Any]] | None = None
    """Evaluation pictures, named as in `train`. Without this key, the share `eval_split` of the
    training pictures is held out.
    """
    eval_split: Fraction = 0.05
    """Share of the training pictures that is held out for evaluation when `eval` is not given; 0
    for none.
    """
    regularisation: str | list[str | dict[str, Any]] | None = None
    """Regularisation pictures, named as in `train`: they show things that the model shall still
    draw as before (prior preservation). They are trained together with the other pictures, and
    their loss is multiplied by the entry's `weight` (default 1). With `draw: 100` and a `caption`,
    the base model draws pictures into the folder before training until it has 100. Training then
    uses as many of them as of the other pictures.
    """
    masks: str | None = None
    """Folder of greyscale masks, each with the name of its training picture. The loss counts where
    the mask is white. A row can name its mask with the key `mask`.
    """
    controls: str | None = None
    """For models that edit pictures: folder with the pictures before the edit. Each has the name of
    its training picture, which shows the result of the edit; the captions are the instructions. A
    row can name its picture with the key `control`, and a source can name its own folder with
    `controls`.
    """
    columns: dict[str, str] | None = None
    """Names of the data's columns for `image`, `text`, `mask`, `control`: `{image: file, text:
    prompt}`. By default common names are tried.
    """
    resolution: PositiveInt = 512
    """Side of the training pictures in pixels. A picture is scaled until it covers a square of this
    side, then cropped as `crop` says. A source can have its own `resolution`.
    """
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """Above 1, pictures keep their aspect ratio up to this limit in both directions. They are
    sorted into aspect buckets of about `resolution` x `resolution` pixels. The pictures of a step
    come from one bucket if it has enough of them.
    """
    crop: Literal["center"] | PositiveInt = "center"
    """Which part of a picture is kept if its shape does not fit. `center` keeps the middle. A
    number prepares that many windows at random positions, and each use of the picture draws one of
    them.
    """
    flip: bool = False
    """Mirror pictures with probability 1/2, drawn at each use of a picture."""
    captions: Literal["files", "names"] = "files"
    """Where the captions of a folder without a metadata file come from. `files` reads the .txt file
    of each picture. `names` uses the picture's file name, with spaces in place of _ and -.
    """
    uncaptioned: Literal["error", "empty", "skip"] = "error"
    """What to do with pictures that have no caption. `error` names them and stops, `empty` trains
    on them with an empty caption, `skip` leaves them out.
    """
    trigger: str | None = None
    """A trigger word. It is put before every caption of `train`, followed by a comma."""
    tag_orders: PositiveInt | None = None
    """For captions that are tags separated by commas: the number of random tag orders that are
    encoded for each caption. Each use of a picture draws one of them. By default captions are not
    changed.
    """
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """With `tag_orders`: this many first tags stay at the beginning and are never left out."""
    tag_dropout: Fraction = 0.0
    """With `tag_orders`: the share of the other tags that each order leaves out."""
    caption_dropout: Fraction = 0.0
    """Probability that an empty caption replaces a picture's caption, drawn at each use.
    Classifier-free guidance needs a model that was trained with empty captions too.
    """
    limit: PositiveInt | None = None
    """Use only this many pictures from the beginning of the data, for a trial run."""
    shuffle: bool = True
    """Shuffle the pictures of every epoch, from `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with pictures that cannot be used (truncated file, no picture, no caption).
    `error` names all of them before training and stops. `skip` leaves them out and lists them in
    bad_rows.jsonl; with more than 5% of such pictures the run stops in any case.
    """
    cache: str = "auto"
    """Cache of latents and text embeddings for later runs: a folder, `none` (memory only), or
    `auto` (the user's cache folder).
    """


class DiffusionSection(Section):
    objective: Literal["auto", "flow_matching", "epsilon", "v"] = "auto"
    """What the denoiser predicts. `auto` reads it from the pipeline's scheduler."""
    timesteps: Literal["auto", "logit_normal", "uniform", "mode"] = "auto"
    """Distribution of the noise levels of training pictures, before `shift`. `auto`: logit_normal
    for flow matching, else uniform. `mode`: the density with heavy tails from the SD3 paper.
    """
    logit_mean: float = 0.0
    """The mean of `logit_normal`. Values above 0 give more noise."""
    logit_std: PositiveFloat = 1.0
    """The standard deviation of `logit_normal`; other tools call it sigmoid scale. Values below 1
    give more levels in the middle.
    """
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = 1.29
    """The scale of `mode`. Values above 0 give more levels in the middle, values below 0 more at
    both ends.
    """
    least_noise: Fraction = 0.0
    """Smallest noise level that is drawn, as a share of the whole range (0.2: timestep 200 of
    1000).
    """
    most_noise: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Largest noise level that is drawn, as a share of the whole range."""
    noise_offset: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Adds one random number per channel to the noise, scaled by this factor (0.05 is usual), so
    that the model learns darker and brighter pictures. Only for epsilon and v.
    """
    loss: Literal["l2", "huber"] = "l2"
    """`l2` is the squared error. `huber` is the smooth Huber loss, 2 c (sqrt(error^2 + c^2) - c),
    which gives outliers less weight.
    """
    huber_c: PositiveFloat = 0.1
    """The constant c of `huber`."""
    shift: Literal["auto"] | PositiveFloat = "auto"
    """Flow matching: moves noise levels towards more noise, s t / (1 + (s - 1) t). `auto` uses the
    scheduler's shift, which depends on the resolution for some models.
    """
    weighting: Literal["none", "min_snr"] = "none"
    """Weight of a picture's loss by its noise level. `min_snr` gives levels with little noise less
    weight. Only for epsilon and v.
    """
    snr_gamma: PositiveFloat = 5.0
    """`min_snr`: levels with a signal-to-noise ratio above this get less weight."""
    guidance: Annotated[float, Field(ge=0.0)] = 1.0
    """Guidance value that a guidance-distilled model (Flux.1-dev) gets as input in training."""
    eval_draws: PositiveInt = 4
    """Number of noise levels at which each evaluation picture is denoised. They are evenly spaced,
    and the same in every evaluation.
    """
    max_text_length: PositiveInt | None = None
    """Longest caption, in tokens of the largest text encoder. By default the model family's limit.
    75, 150 or 225 for Stable Diffusion 1.5, 2 and XL, which read a caption in windows of 75 tokens.
    """


class AdapterSection(Section):
    kind: Literal["lora", "lokr", "none"] = "lora"
    """`lora` trains a LoRA adapter of PEFT. `lokr`, for diffusion runs, trains a LoKr adapter,
    whose change of a weight is a Kronecker product; PEFT's code computes it. `none` trains every
    weight.
    """
    r: PositiveInt = 16
    """Rank of the adapter."""
    alpha: PositiveFloat = 32.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with rslora)."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """Modules that get an adapter: `all-linear`, or names as in PEFT (`[q_proj, v_proj]`). In a
    mixture of experts `all-linear` includes the experts and excludes the routers.
    """
    parameters: list[str] = []
    """Parameters that also get an adapter, by the end of their names: stacked experts
    (`[experts.down_proj]`) or a router's weight.
    """
    factor: PositiveInt | None = None
    """For lokr, the side of the small factor, where it divides the weight's side. By default near
    the square root of the weight's side.
    """
    rslora: bool = False
    """Rank-stabilised LoRA: the scale is alpha / sqrt(r)."""
    dora: bool = False
    """DoRA: the length of each row of the adapted weight is trained too. Not available for experts.
    With `dropout` PEFT's slower code computes it. It works in diffusion runs, but not with
    `run.adapter_format: comfyui`.
    """
    rank_pattern: dict[str, PositiveInt] = {}
    """Different ranks for some modules. Keys are names, or regular expressions for the end of a
    name (`{down_proj: 32, "layers.0.*q_proj": 4}`).
    """
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Different values of `alpha` for some modules, as in `rank_pattern`."""
    plus: Annotated[float, Field(ge=1.0)] | None = None
    """LoRA+: learning rate of the matrices B, as a multiple of `train.learning_rate`, which applies
    to A. The paper uses 16.
    """
    start: Literal["default", "orthogonal", "pissa", "olora"] = "default"
    """Initial values of A and B. `default`: B is zero. `orthogonal`: A and B are orthogonal and
    their product is zero. `pissa` begins with the base weight's largest singular vectors, `olora`
    with its QR decomposition; both are subtracted from the base weight, and the adapter is saved
    with twice the rank, for the unchanged base. Not available for experts or a packed base.
    """
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter (`[lm_head, embed_tokens]`). With
    an nf4 base they stay unquantised. Modules that are packed in the checkpoint are refused.
    """
    train_tokens: list[str] = []
    """Tokens of the vocabulary whose embeddings are trained (`["<|im_start|>"]`), and their rows in
    a head that shares its weight with the embedding. The other rows stay frozen.
    """
    start_from: str | None = None
    """Folder of a PEFT adapter. Training begins with its weights."""
    text_encoders: bool = False
    """Diffusion (SDXL, Stable Diffusion): attention and MLPs of the CLIP text encoders get an
    adapter too. Captions are then encoded in each step.
    """
    text_encoder_rate: PositiveFloat | list[PositiveFloat] | None = None
    """Learning rate of the text encoders, or one for each of them in the pipeline's order (`[5e-5,
    2e-5]`). By default `train.learning_rate`.
    """
    vision: Literal["none", "lora", "full"] = "none"
    """Vision-language: how the vision tower is trained. `none` leaves it frozen, also with `kind:
    none`.
    """
    projector: Literal["none", "lora", "full"] = "none"
    """Vision-language: how the layers between vision tower and language model are trained. Qwen's
    merger is part of its tower.
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
    """Frozen weights. A checkpoint that was published quantised keeps its format; a value that is
    set here must name this format.
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
    """Optimizer states. `int8` follows from `train.optimizer: adamw8bit` and `lion8bit`."""
    loss: Dtype | None = None
    """Log-probabilities and loss."""
    norms: Dtype | None = None
    """Arithmetic inside norms; their output is always `compute`."""
    generate: Dtype | None = None
    """Sampling during and after training."""
    vae: Dtype | None = None
    """Diffusion: weights and arithmetic of the VAE."""
    text_encoder: Dtype | None = None
    """Diffusion: weights of the text encoders, and their stored embeddings."""
    timesteps: Dtype | None = None
    """Diffusion: the noise level that the model gets as input, and its sinusoidal embedding."""
    latents: Dtype | None = None
    """Diffusion: latents, noise, noise level and target, before they enter the model."""
    ema: Dtype | None = None
    """Diffusion: the moving average of the weights (`train.ema`)."""
    vision: Dtype | None = None
    """Vision-language: frozen weights of vision tower and projector, and their input pixels. By
    default the dtype of `compute`.
    """
    save: str | None = None
    """Saved files: one dtype, or `model bf16, adapter fp32`."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How an updated weight is rounded to the dtype `trainable`. With `nearest`, small updates of
    bf16 weights are lost; `stochastic` keeps them on average.
    """
    loss_scaling: Literal["none", "dynamic"] | None = None
    """Loss scaling. fp16 gradients need `dynamic`."""


class PreferenceSection(Section):
    beta: PositiveFloat = 0.1
    """Scale of the difference between the answers' log-probabilities. In dpo, ipo and kto a larger
    value also keeps the model nearer to its initial state. The paper of simpo uses 2 to 10.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """For dpo and cpo, the assumed share of pairs whose labels are exchanged."""
    simpo_gamma: Annotated[float, Field(ge=0.0)] = 0.5
    """For simpo, the margin by which the chosen answer's reward shall exceed the other's, after
    multiplication with `beta`.
    """
    desirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """For kto, the weight of the loss of desirable answers."""
    undesirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """For kto, the weight of the loss of undesirable answers."""
    center_rewards_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """For reward, the weight of (s + t)^2 for the two scores of a pair, which keeps their mean near
    0. 0.01 is usual.
    """
    nll: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the chosen answer's negative log-likelihood (mean over its tokens), which is added
    to the loss of a pair. Default: 1 for orpo and cpo, 0 for the others.
    """


class DistilSection(Section):
    teacher: str | None = None
    """The teacher model: a folder or a hub id. Its vocabulary must be the student's. It is frozen,
    in the dtype `precision.compute`.
    """
    revision: str | None = None
    """Branch, tag or commit of the teacher on the hub."""
    beta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Divergence per token: 0 is KL(teacher || student), 1 is KL(student || teacher), a value
    between them the generalised Jensen-Shannon divergence.
    """
    temperature: PositiveFloat = 1.0
    """Divides the logits of teacher and student. The loss is not multiplied by the square of the
    temperature.
    """
    cross_entropy: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the cross-entropy with the data's tokens in the loss."""


# optimizer -> its defaults where they differ from AdamW's. Lion has the beta2 of bitsandbytes and a
# quarter of AdamW's rate (Chen et al. 2023 advise a third to a tenth). Adafactor has torch's rate,
# which is relative to the weights. Prodigy's rate is a factor of the rate that it finds.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
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
    """The training objective. `sft` learns the answers. dpo, ipo, simpo, orpo and cpo learn from
    pairs of a chosen and a rejected answer, kto from answers with a label. dpo, ipo and kto use the
    initial model as reference. reward trains a score head on pairs. distil learns from a teacher
    (section `distil`).
    """
    steps: PositiveInt | None = None
    """Number of optimizer steps. It overrides `epochs`, unless the command line sets only `epochs`."""
    epochs: PositiveFloat = 1.0
    """Number of passes over the training data."""
    batch_size: PositiveInt = 4
    """Number of rows in one forward pass."""
    accumulate: PositiveInt = 1
    """Number of forward passes in one optimizer step. The loss is normalised over all their tokens,
    so 8 passes of 1 row equal 1 pass of 8 rows.
    """
    learning_rate: Annotated[float, Field(ge=0.0)] = 2e-4
    """Peak learning rate; by default 5e-5 with lion and lion8bit, 0.01 with adafactor, 1 with
    prodigy.
    """
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Schedule of the learning rate after warm-up. `wsd`: constant, then linear decay over the last
    share `decay` of the steps. With schedule-free constant by default.
    """
    warmup: Annotated[float, Field(ge=0.0)] = 0.03
    """Warm-up: values below 1 are a share of the steps, other values a number of steps."""
    decay: Fraction = 0.2
    """With `wsd`: share of the steps in which the learning rate decays."""
    min_learning_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Learning rate at the end of cosine, linear and wsd, as a share of the peak."""
    aux_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Coefficient of the load-balancing loss of a mixture of experts, which is logged as
    `aux_loss`. By default the coefficient in the model's config, if the config has
    `output_router_logits`; 0 switches the loss off.
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
    """`adamw8bit` (bitsandbytes) stores its states in 8 bits, `adamw8bit-paged` also in memory that
    the GPU shares with the host. `lion` has one state, `adafactor` a row and a column per matrix.
    `muon` updates matrices and leaves the rest to AdamW. `schedule-free` averages the weights in
    place of a schedule, `prodigy` finds its learning rate. All but `adamw` need fp32 weights and
    gradients. `precision.rounding` switches stochastic rounding on.
    """
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    embedding_noise: PositiveFloat | None = None
    """NEFTune: adds uniform noise to the embeddings in training, at most alpha / sqrt(tokens of a
    row x width), where this key is alpha. The paper uses 5 to 15. Evaluation and samples get no
    noise. Only for sft.
    """
    beta1: Fraction = 0.9
    """Decay of the first moment. Not used by adafactor."""
    beta2: Fraction = 0.999
    """Decay of the second moment. With lion (default 0.99) the decay of its single state. Not used
    by adafactor.
    """
    epsilon: PositiveFloat = 1e-8
    """Added to the square root of the second moment. Not used by lion and adafactor."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Diffusion: decay of an exponential moving average of the trained weights (0.999). The average
    is saved as a second result.
    """
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 for no clipping."""
    gradient_checkpointing: Literal["auto", "none", "layers", "layers+offload"] = "auto"
    """`layers` recomputes layers in backward: it needs less memory and up to a third more time, and
    gives the same numbers. `layers+offload` also moves the inputs of these layers to host memory
    (GPU only). `auto` uses `none` if the planned memory fits, else the fewest layers that fit, else
    all layers with offload. `true` means `layers`, `false` means `none`.
    """
    checkpointed_layers: (
        Literal["all"] | PositiveInt | EveryKth | list[Annotated[int, Field(ge=0)]]
    ) = "all"
    """Layers that are recomputed: `all`, a number (that many first layers, which save most), `every
    2`, or a list of positions from 0.
    """
    keep_attention: bool = False
    """With `layers`: store the output and logsumexp of attention, so that backward does not compute
    attention again. This about doubles what a recomputed layer stores. With `layers+offload` they
    are stored in host memory. `gradient_checkpointing: auto` stores them where they fit.
    """
    memory: MemorySize | None = None
    """Peak memory that a step may plan (`20GiB`, `800MiB`). `gradient_checkpointing: auto` keeps to
    it. By default `auto` may use all memory of the device.
    """
    seed: int = 0
    """Seed of the random weights, the held-out rows, the data order, dropout and sampling."""
    deterministic: bool = False
    """Use only deterministic algorithms. Slower on a GPU."""
    eval_every: PositiveInt | None = None
    """Number of steps between evaluations of all evaluation rows. By default a run evaluates before
    step 1 and then at most ten times, the last time at the end. All these evaluations together use
    about a fifth as many rows as training: there are fewer of them, or each uses only every n-th
    row. The last one always evaluates all rows.
    """
    eval_batch_size: PositiveInt | None = None
    """Number of rows in one evaluation pass. The result does not depend on it. Default:
    `batch_size`.
    """
    patience: PositiveInt | None = None
    """Stop after this many evaluations without a better loss."""
    stop_on: str | None = None
    """Name of the set of `data.eval` whose loss decides for `patience` and for the best step.
    Default: all sets together.
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_optimizer_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {**OPTIMIZER_DEFAULTS.get(str(values.get("optimizer")), {}), **values}
        return values


class RunSection(Section):
    folder: str = "runs/{name}"
    """Folder for all files of the run. `{name}` is replaced by model, data and time."""
    save_every: PositiveInt | None = None
    """Number of steps between checkpoints. By default `eval_every`, else a tenth of the run. The
    last step always has one.
    """
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept, besides the best one."""
    save: Literal["last", "best"] | None = None
    """Which weights become the result: the last step's, or those of the step with the best
    evaluation loss. Default: `best` with `train.patience`, else `last`.
    """
    adapters_every: PositiveInt | None = None
    """Number of steps between intermediate adapters. Each is written to `adapters/step_N` in the
    run folder, with all files of a result. By default only the final adapter is written.
    """
    adapters_keep: PositiveInt | None = None
    """Number of newest intermediate adapters that are kept. By default all."""
    adapter_format: Literal["diffusers", "comfyui"] = "diffusers"
    """Diffusion: with `comfyui` the folder of each adapter also gets a file comfyui.safetensors,
    with the names and `.alpha` tensors that ComfyUI reads.
    """
    log_every: PositiveInt = 1
    """Number of steps between lines of metrics.jsonl."""
    sample_every: Annotated[int, Field(ge=0)] | None = None
    """Number of steps between samples; 0 for none. By default a quarter of the run. The first
    samples come before step 1, the last after the last step.
    """
    samples: list[str | dict[str, Any]] = []
    """Prompts that the model answers (or draws) during training. By default the first evaluation
    rows; for diffusion none. For diffusion a prompt can be a mapping (`{prompt: a dog, negative:
    blurry, size: 768, steps: 30, guidance: 5, seed: 7}`).
    """
    sample_tokens: PositiveInt = 64
    """Largest number of new tokens of a sample."""
    sample_steps: PositiveInt = 20
    """Diffusion: number of denoising steps of a sample."""
    sample_size: PositiveInt | None = None
    """Diffusion: side of a sample in pixels. By default `images.resolution`."""
    sample_guidance: Annotated[float, Field(ge=0.0)] = 3.5
    """Diffusion: guidance scale of a sample."""
    observe_every: PositiveInt = 100
    """Number of steps between observations of all dtypes. Step 1 is always observed."""
    report: bool = True
    """Write report.html."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Trackers that also get the metrics, besides metrics.jsonl. Each needs the extra of its name
    (`pip install '.[wandb]'` in the checkout). Without an API key wandb runs offline.
    """
    push_to_hub: str | None = None
    """Repository on the hub to which the result is uploaded after the run: `ORG/NAME`, or `NAME` in
    your account. Token and name are checked before the run. A failed upload does not make the run
    fail.
    """
    push_merged: bool = False
    """Upload the merged model instead of the adapter."""
    push_private: bool = True
    """Whether a newly created repository is private."""


class ParallelSection(Section):
    kind: Literal["auto", "replicate", "shard", "hybrid"] = "auto"
    """How several processes divide the work. `replicate`: each process holds the whole model and
    computes a share of a step's rows; gradients are summed once per step. `shard`: each process
    holds a part of every weight, gradient and optimizer state, and a layer's weights are gathered
    while it runs. `hybrid`: the processes of one machine shard the model, and machines replicate
    it. `auto` uses `replicate` if the planned memory fits, else `shard` if the other settings allow
    it.
    """
    timeout: PositiveFloat = 1800.0
    """Seconds that a process waits for another one before the run ends with an error that names it.
    It must be longer than the samples of all prompts take.
    """


class RunConfig(Section):
    """The configuration of one run, as `isotype train FILE.yaml` reads it."""

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
