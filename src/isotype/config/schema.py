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
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
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
    vae: str | None = None
    """Diffusion: a VAE to use instead of the pipeline's own VAE. It is a .safetensors file, or a
    folder with a config.json and a .safetensors file. Without this key, a file `NAME.vae.safetensors`
    next to the checkpoint `NAME.safetensors` is used if it exists.
    """
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. By default the tokenizer of the model."""
    add_tokens: list[str] = []
    """Special tokens to add to the vocabulary (`["<|im_start|>"]`). The initial value of their
    embeddings is the mean of the other embeddings. Embedding and head are trained in full and saved
    with the adapter. The base model with the larger embedding is saved in the run folder.
    """
    attention: Literal["auto", "sdpa", "eager", "flash", "flex"] = "auto"
    """Attention implementation. `auto` uses sdpa if the model family supports it, otherwise eager.
    `flash` needs a GPU and the package flash-attn.
    """
    rope_parameters: dict[str, Any] | None = None
    """Changes to the rotary embedding (`{rope_type: yarn, factor: 4.0}`), for rows that are longer
    than the model's context. The keys are those of config.json. A saved model has these values in
    its config.json. For an adapter, load the base model with the same values.
    """
    optimize: bool = True
    """Use Isotype's ops for norms, rotary embedding, gated MLP, head and loss, if they give the
    same results as the model's own code. manifest.json lists the replaced modules.
    """
    lora_branch: Literal["compute", "fp32"] = "compute"
    """With `optimize`: the dtype of the two matrix products of a LoRA adapter, x A and (x A) B.
    `fp32` is slower, but more exact if `compute` is a narrower dtype.
    """
    allow_unquantised: bool = False
    """Allow a 4-bit base even if more than 10% of its weights are not quantised. For example,
    bitsandbytes does not quantise stacked experts.
    """
    offload: Literal["none", "blocks"] = "none"
    """`blocks` keeps the frozen weights of the model's blocks in host memory and fetches each block
    while the previous one computes, so that two blocks are on the device at a time. Needs a GPU and
    an adapter. Every block is recomputed in backward. Losses and gradients are bit-identical to
    those without offload.
    """
    trust_remote_code: bool = False
    """Run Python code from the repository of the model. Use this only if you trust the source."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` uses CUDA or ROCm if there is a GPU, otherwise the CPU."""


class DataSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training data: a file, folder, glob, `hf:NAME` (a dataset of the hub) or `stdlib` (questions
    and answers from Python's docstrings), or a list of these. An entry of the list can be a mapping
    with `name`, `weight`, `format`, `columns`, `roles`, `limit`, `subset`, `split`, `revision`.
    """
    eval: str | list[str | dict[str, Any]] | dict[str, str | list[str | dict[str, Any]]] | None = (
        None
    )
    """Evaluation data, in the same form as `train`, or several sets with names (`{chat:
    chats.jsonl, code: [a.jsonl, b.jsonl]}`). Each set with a name has its own metric,
    `eval_loss_NAME`. Without this key, a part of the training rows is used for evaluation (see
    `eval_split`).
    """
    eval_split: Fraction = 0.05
    """If `eval` is not set: the fraction of the training rows that is used for evaluation and not
    for training. 0 means no evaluation.
    """
    eval_seed: Annotated[int, Field(ge=0)] | None = None
    """Chooses the rows of `eval_split`. By default `train.seed`. With a fixed value, runs with
    different seeds are evaluated on the same rows.
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
    """The format of a row. `auto` detects the format from the keys of the row and prints how it was
    detected. The objectives for pairs need `preference`, and kto needs `labelled`.
    """
    columns: dict[str, str | None] | None = None
    """Names of the keys in your data: with `{prompt: question, completion: answer}`, the key
    `question` is the prompt. With `{label: null}` the key `label` of the data is ignored without a
    warning. `role`, `content`, `tool_calls`, `reasoning_content`, `weight` and `train` are keys of
    a turn: `{messages: dialog, role: speaker, content: text}`.
    """
    roles: dict[str, str | list[str]] | None = None
    """Names that your data uses for the roles of turns: `{user: [customer, caller], assistant:
    agent}`. Common names (`human`, `gpt`) are known.
    """
    max_length: PositiveInt = 1024
    """Maximum length of a row in tokens. Longer rows are truncated at the end and counted."""
    packing: bool = False
    """Join several training rows into one packed row of `max_length` tokens, without padding. Each
    row attends only to itself, so the loss is the same.
    """
    loss_on: Literal["assistant", "all"] = "assistant"
    """`assistant`: only the tokens of answers and their end-of-turn tokens have a loss. `all`:
    every token has a loss. In plain text every token always has a loss.
    """
    min_pixels: PositiveInt | None = None
    """Vision-language: a picture with fewer pixels is scaled up before the model's processor gets
    it, and keeps its aspect ratio.
    """
    max_pixels: PositiveInt | None = None
    """Vision-language: a picture with more pixels is scaled down. In families whose number of
    tokens depends on the size of a picture, it then has fewer tokens.
    """
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja file, or one of chatml, llama3, gemma,
    mistral, zephyr.
    """
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template (`{enable_thinking: false}`). They are used in training,
    evaluation and samples, and become defaults of the saved template.
    """
    thoughts: Literal["template", "last", "all", "none"] = "template"
    """What to do with the thoughts of answers (`<think>...</think>`, `reasoning_content`,
    `thinking`). With `template` the chat template decides. With `last` the thoughts after the last
    question are kept and learnt, with `all` the thoughts of every answer. `none` removes all
    thoughts.
    """
    limit: PositiveInt | None = None
    """Use only this many rows from the beginning of the data, for example for a test run."""
    shuffle: bool = True
    """Shuffle the rows in every epoch. The order depends on `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with rows that cannot be used (broken rows, rows with wrong keys or types, rows
    that the template refuses). `error` lists all of them before training and stops. `skip` leaves
    them out, counts them and lists them in bad_rows.jsonl. Rows with an empty answer are always
    left out and counted.
    """
    stream: bool = False
    """Tokenise during training instead of before training, for data that does not fit on the disk.
    Needs `train.steps`.
    """
    shuffle_buffer: PositiveInt = 4096
    """With `stream`: the number of rows that are read, tokenised and shuffled together."""
    cache: str = "auto"
    """Cache of tokenised rows for later runs: a folder, `none` or `auto`. `auto` uses the cache
    folder of the user, for sources of at least 1 MB.
    """


class ImagesSection(Section):
    train: str | list[str | dict[str, Any]] | None = None
    """Training pictures of a diffusion run: a folder, a file of rows that name pictures (JSONL,
    CSV, Parquet), or a list of these. In a folder, the captions of each picture are in a .txt file
    of the same name, one caption per line. An entry of the list can be a mapping with `name`,
    `caption` (for all its pictures), `columns`, `repeats`, `resolution`, `frames`. With several
    resolutions (`[512, 768]`), each picture is used once at each of them.
    """
    eval: str | list[str | dict[str, Any]] | None = None
    """Evaluation pictures, in the same form as `train`. Without this key, a part of the training
    pictures is used for evaluation (see `eval_split`).
    """
    eval_split: Fraction | None = None
    """If `eval` is not set: the fraction of the training pictures that is used for evaluation and
    not for training. 0 means no evaluation. By default 0.05 of 20 or more pictures, and none of
    fewer.
    """
    regularisation: str | list[str | dict[str, Any]] | None = None
    """Regularisation pictures, in the same form as `train`. They show things that the model should
    still draw as before training (prior preservation). They are used in training together with the
    other pictures, and their loss is multiplied by the `weight` of the entry (default 1). With
    `draw: 100` and a `caption`, the base model draws pictures before training until the folder
    contains 100. In each epoch, as many regularisation pictures as training pictures are used.
    """
    masks: str | None = None
    """Folder of greyscale masks. Each mask has the name of its training picture. Only the white
    parts of the mask have a loss. A row can name its mask with the key `mask`.
    """
    controls: str | list[str] | None = None
    """For models that edit pictures: the folder with the pictures before the edit. Each of them has
    the name of a training picture, which shows the result of the edit. The captions are the
    instructions. A row can name its picture before the edit with the key `control`, and a source
    can name its own folder with `controls`. Qwen-Image-Edit-Plus and Flux.2 also learn from several
    pictures before the edit (reference pictures): a list of folders, one for each picture, or a
    list of files under the key `control` of a row.
    """
    columns: dict[str, str] | None = None
    """Names of the columns in your data for `image`, `text`, `mask` and `control`: `{image: file,
    text: prompt}`. By default Isotype looks for common names.
    """
    resolution: PositiveInt = 512
    """Side length of the training pictures in pixels. A picture is scaled so that it covers a
    square of this size, and is then cropped (see `crop`). A source can have its own `resolution`.
    """
    frames: PositiveInt = 1
    """For models that generate videos: the number of frames of a training clip. It must be 1 plus a
    multiple of the number of frames that the VAE combines (4 for Wan, 8 for LTX). With a value
    above 1, each video file is a clip, and so is each subfolder that contains pictures. These
    pictures are its frames, in the order of the numbers in their names. The captions are in a .txt
    file beside the video file or the subfolder, which has the same name. Only the first frames of a
    longer clip are used. A source can have its own `frames`: with `{name: FOLDER, frames: 1}` the
    run also trains on the pictures of this folder.
    """
    frame_rate: PositiveFloat | None = None
    """For models that generate videos: the number of frames per second of the clips and of the
    samples. By default the rate that the pipeline of the model uses (16 for Wan, 25 for LTX-Video,
    24 for LTX-2). Frames of video files that have another rate are left out or repeated.
    """
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """With a value above 1, pictures keep their aspect ratio up to this limit, both wide and tall
    pictures. They are sorted into buckets of different shapes with about `resolution` x
    `resolution` pixels. The pictures of a step come from one bucket if it has enough of them.
    """
    crop: Literal["center"] | PositiveInt = "center"
    """Which part of a picture is kept if its shape does not fit. `center` keeps the middle. With a
    number, that many crops at random positions are prepared, and one of them is chosen at random
    each time the picture is used.
    """
    flip: bool = False
    """Mirror a picture with probability 1/2 each time it is used."""
    captions: Literal["files", "names"] = "files"
    """Where the captions of a folder without a metadata file come from. `files` reads the .txt file
    of each picture. `names` uses the picture's file name, with spaces in place of _ and -.
    """
    uncaptioned: Literal["error", "empty", "skip"] = "error"
    """What to do with pictures that have no caption. `error` lists them and stops, `empty` trains
    on them with an empty caption, and `skip` leaves them out.
    """
    trigger: str | None = None
    """A trigger word. It is added before every caption of `train`, followed by a comma."""
    tag_orders: PositiveInt | None = None
    """For captions that are tags separated by commas: the number of random tag orders that are
    encoded for each caption. One of them is chosen at random each time the picture is used. By
    default captions are not changed.
    """
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """With `tag_orders`: this many tags stay at the beginning and are never left out."""
    tag_dropout: Fraction = 0.0
    """With `tag_orders`: the fraction of the other tags that is left out in each order."""
    caption_dropout: Fraction = 0.0
    """Probability that the caption of a picture is replaced by an empty caption each time the
    picture is used. Classifier-free guidance needs a model that was also trained with empty
    captions.
    """
    limit: PositiveInt | None = None
    """Use only this many pictures from the beginning of the data, for example for a test run."""
    shuffle: bool = True
    """Shuffle the pictures in every epoch. The order depends on `train.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with pictures that cannot be used (truncated file, no picture, no caption).
    `error` lists all of them before training and stops. `skip` leaves them out and lists them in
    bad_rows.jsonl; if they are more than 5% of the pictures, the run stops anyway.
    """
    cache: str = "auto"
    """Cache of latents and text embeddings for later runs: a folder, `none` (memory only), or
    `auto` (the user's cache folder).
    """


class DiffusionSection(Section):
    objective: Literal["auto", "flow_matching", "epsilon", "v"] = "auto"
    """What the denoiser predicts. `auto` reads it from the pipeline's scheduler."""
    timesteps: Literal["auto", "logit_normal", "uniform", "mode"] = "auto"
    """Distribution of the noise levels of training pictures, before `shift`. `auto` means
    logit_normal for flow matching, otherwise uniform. `mode` is the density with heavy tails from
    the SD3 paper.
    """
    logit_mean: float = 0.0
    """The mean of `logit_normal`. With values above 0, pictures get more noise on average."""
    logit_std: PositiveFloat = 1.0
    """The standard deviation of `logit_normal`; other tools call it sigmoid scale. With values
    below 1, noise levels near the middle of the range are more frequent.
    """
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = 1.29
    """The scale of `mode`. With values above 0, noise levels near the middle of the range are more
    frequent; with values below 0, those near both ends.
    """
    expert: Literal["high_noise", "low_noise"] | None = None
    """Only for Wan 2.2 with two denoisers: which of them is trained. `boundary_ratio` in
    model_index.json is the noise level at which the pipeline changes from one to the other. Noise
    levels are drawn only on the side of this denoiser.
    """
    least_noise: Fraction = 0.0
    """Smallest noise level that is used, as a fraction of the whole range (0.2 means timestep 200
    of 1000).
    """
    most_noise: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Largest noise level that is used, as a fraction of the whole range."""
    noise_offset: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Adds one random number per channel to the noise, multiplied by this factor (0.05 is usual),
    so that the model learns darker and brighter pictures. Only for the objectives epsilon and v.
    """
    loss: Literal["l2", "huber"] = "l2"
    """`l2` is the squared error. `huber` is the smooth Huber loss, 2 c (sqrt(error^2 + c^2) - c),
    which gives less weight to outliers.
    """
    huber_c: PositiveFloat = 0.1
    """The constant c of `huber`."""
    shift: Literal["auto"] | PositiveFloat = "auto"
    """For flow matching: with a shift s above 1, a noise level t becomes s t / (1 + (s - 1) t),
    which means more noise. `auto` uses the shift of the scheduler, which depends on the resolution
    for some models.
    """
    weighting: Literal["none", "min_snr"] = "none"
    """How the loss of a picture is weighted by its noise level. `min_snr` gives less weight to
    levels with little noise. Only for the objectives epsilon and v.
    """
    snr_gamma: PositiveFloat = 5.0
    """For `min_snr`: noise levels with a signal-to-noise ratio above this value get less weight."""
    guidance: Annotated[float, Field(ge=0.0)] = 1.0
    """The guidance value that a guidance-distilled model (Flux.1-dev) gets as input during
    training.
    """
    eval_draws: PositiveInt = 4
    """Number of noise levels at which each evaluation picture is denoised. The levels are evenly
    spaced and are the same in every evaluation.
    """
    max_text_length: PositiveInt | None = None
    """Maximum length of a caption, in tokens of the largest text encoder. By default the limit of
    the model family. For Stable Diffusion 1.5, 2 and XL it must be 75, 150 or 225, because they
    read a caption in windows of 75 tokens.
    """


class AdapterSection(Section):
    kind: Literal["lora", "lokr", "none"] = "lora"
    """`lora` trains a LoRA adapter of PEFT. `lokr` trains a LoKr adapter of PEFT, in which the
    change of a weight is a Kronecker product; it is only for diffusion runs. `none` trains every
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
    """Parameters that also get an adapter, given by the end of their names. Use this for stacked
    experts (`[experts.down_proj]`) or for the weight of a router.
    """
    factor: PositiveInt | None = None
    """For lokr: the size of the small matrix of the Kronecker product. If it does not divide the
    size of a weight, a smaller divisor is used. By default a value near the square root of the
    weight's size.
    """
    rslora: bool = False
    """Rank-stabilised LoRA: the scale is alpha / sqrt(r)."""
    dora: bool = False
    """DoRA: the length of each row of the adapted weight is trained too. Not available for experts.
    With `dropout`, PEFT's slower code is used. DoRA works in diffusion runs, but not with
    `run.adapter_format: comfyui`.
    """
    rank_pattern: dict[str, PositiveInt] = {}
    """Different ranks for some modules. The keys are names, or regular expressions for the end of a
    name (`{down_proj: 32, "layers.0.*q_proj": 4}`).
    """
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Different values of `alpha` for some modules, as in `rank_pattern`."""
    plus: Annotated[float, Field(ge=1.0)] | None = None
    """LoRA+: the learning rate of the matrices B is this value times `train.learning_rate`, which
    is the learning rate of A. The paper uses 16.
    """
    start: Literal["default", "orthogonal", "pissa", "olora"] = "default"
    """Initial values of A and B. `default`: B is zero. `orthogonal`: A and B are orthogonal and
    their product is zero. `pissa`: A and B are made from the largest singular vectors of the base
    weight. `olora`: A and B are made from its QR decomposition. With `pissa` and `olora` the
    product of A and B is subtracted from the base weight, and the adapter is saved with twice the
    rank, for the unchanged base. Not available for experts or for a packed base.
    """
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter (`[lm_head, embed_tokens]`). With
    an nf4 base these modules are not quantised. Modules that are quantised in the checkpoint are
    refused.
    """
    train_tokens: list[str] = []
    """Tokens of the vocabulary whose embeddings are trained (`["<|im_start|>"]`). If the head
    shares its weight with the embedding, the same rows of the head are trained too. All other rows
    stay frozen.
    """
    start_from: str | None = None
    """Folder of a PEFT adapter. Training starts from the weights of this adapter. Diffusion: also a
    LoRA file of kohya's scripts, musubi-tuner, diffusers, SimpleTuner, ai-toolkit or ComfyUI
    (.safetensors).
    """
    serve_as: Literal["q8_0", "q5_0", "q4_0", "fp8", "int8", "int4", "nvfp4", "mxfp4"] | None = None
    """The format of the file that you will serve. Training then multiplies by the weights of this
    file: the sum of base and adapter is rounded to the format in each forward pass, and
    `isotype export --type` with the same format writes exactly these weights. `q8_0`, `q5_0` and
    `q4_0` are types of GGUF files; the others are formats of compressed-tensors. It is for LoRA
    adapters of language models in one process, without dropout and DoRA. Use it if `isotype verify`
    shows that the file loses too much of what the adapter learnt.
    """
    serve_from: Fraction | None = None
    """With `serve_as`: the share of the steps that train without rounding before the rounding of
    the adapted weights begins. The default is 0.1.
    """
    text_encoders: bool = False
    """Diffusion (SDXL, Stable Diffusion): attention and MLPs of the CLIP text encoders get an
    adapter too. Captions are then encoded in each step.
    """
    text_encoder_rate: NotNegativeFloat | list[NotNegativeFloat] | None = None
    """Learning rate of the text encoders, or a list with one learning rate for each of them, in the
    order of the pipeline (`[5e-5, 2e-5]`). By default `train.learning_rate`. An encoder with the rate 0 is
    not trained.
    """
    vision: Literal["none", "lora", "full"] = "none"
    """Vision-language: how the vision tower is trained. With `none` it stays frozen, even with
    `kind: none`.
    """
    projector: Literal["none", "lora", "full"] = "none"
    """Vision-language: how the layers between vision tower and language model are trained. The
    merger of Qwen models is part of the vision tower.
    """


class PrecisionSection(Section):
    preset: Literal[
        "auto", "fp32", "bf16-mixed", "bf16-lora", "nf4-lora", "bf16-pure", "fp16-mixed"
    ] = "auto"
    """Sets all dtypes of a run. `isotype plan` shows the dtype that each key of this section gets,
    and why.
    """
    base: (
        Literal["fp32", "bf16", "fp16", "nf4", "fp8", "int8", "int4", "nvfp4", "mxfp4", "gguf"]
        | None
    ) = None
    """Dtype of the frozen weights. A checkpoint that was published in quantised form keeps its
    format; if you set a value, it must be this format.
    """
    trainable: Dtype | None = None
    """Dtype of the trained weights."""
    compute: Dtype | None = None
    """Dtype of matrix products and activations."""
    grads: Dtype | None = None
    """Dtype in which gradients are accumulated. With `fp32` and `trainable: bf16`, they are
    accumulated in fp32 buffers. `bf16-pure` has `bf16`: a single micro-batch loses nothing, and
    the sum of many is less precise.
    """
    reduce: Dtype | None = None
    """Dtype in which gradients are summed across processes."""
    optimizer: Literal["fp32", "bf16", "fp16", "int8"] | None = None
    """Dtype of the optimizer states. It is `int8` with `train.optimizer: adamw8bit` and `lion8bit`.
    """
    loss: Dtype | None = None
    """Dtype of log-probabilities and loss."""
    norms: Dtype | None = None
    """Dtype of the arithmetic inside norms. The output of a norm always has the dtype of `compute`.
    """
    generate: Dtype | None = None
    """Dtype of generation, during and after training."""
    vae: Dtype | None = None
    """Diffusion: dtype of the weights and the arithmetic of the VAE."""
    text_encoder: Dtype | None = None
    """Diffusion: dtype of the weights of the text encoders and of the stored text embeddings."""
    timesteps: Dtype | None = None
    """Diffusion: dtype of the noise level that the model gets as input, and of its sinusoidal
    embedding.
    """
    latents: Dtype | None = None
    """Diffusion: dtype of latents, noise, noise level and target, before the model gets them."""
    ema: Dtype | None = None
    """Diffusion: dtype of the moving average of the weights (`train.ema`)."""
    vision: Dtype | None = None
    """Vision-language: dtype of the frozen weights of vision tower and projector, and of their
    input pixels. By default the dtype of `compute`.
    """
    save: str | None = None
    """Dtype of saved files: one dtype, or `model bf16, adapter fp32`."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How an updated weight is rounded to the dtype of `trainable`. With `nearest`, small updates
    of bf16 weights are lost; with `stochastic` they are right on average.
    """
    loss_scaling: Literal["none", "dynamic"] | None = None
    """Loss scaling. fp16 gradients need `dynamic`."""


class PreferenceSection(Section):
    beta: PositiveFloat = 0.1
    """Scale of the difference between the answers' log-probabilities. With dpo, ipo and kto, a
    larger value also keeps the model closer to its initial state. The paper of simpo uses 2 to 10.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """For dpo and cpo: the assumed fraction of pairs in which the chosen and the rejected answer
    are exchanged.
    """
    simpo_gamma: Annotated[float, Field(ge=0.0)] = 0.5
    """For simpo: the margin by which the reward of the chosen answer should be larger than that of
    the rejected answer, after multiplication with `beta`.
    """
    desirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """For kto: the weight of the loss of wanted answers."""
    undesirable_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """For kto: the weight of the loss of unwanted answers."""
    center_rewards_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """For reward: the weight of (s + t)^2 in the loss, where s and t are the two scores of a pair.
    It keeps the mean of the scores near 0. A usual value is 0.01.
    """
    nll: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the negative log-likelihood of the chosen answer (mean over its tokens), which is
    added to the loss of a pair. The default is 1 for orpo and cpo, and 0 for the other objectives.
    """


class DistilSection(Section):
    teacher: str | None = None
    """The teacher model: a folder or a hub id. It must have the same vocabulary as the student. It
    is frozen and has the dtype of `precision.compute`.
    """
    revision: str | None = None
    """Branch, tag or commit of the teacher on the hub."""
    beta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Which divergence is computed for each token: 0 is KL(teacher || student), 1 is KL(student ||
    teacher), and a value between 0 and 1 is the generalised Jensen-Shannon divergence.
    """
    temperature: PositiveFloat = 1.0
    """The logits of teacher and student are divided by this value. The loss is not multiplied by
    the square of the temperature.
    """
    cross_entropy: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Weight of the cross-entropy with the tokens of the data. The weight of the divergence is 1
    minus this value.
    """


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
    """The training objective. With `sft` the model learns the answers of the data. dpo, ipo, simpo,
    orpo and cpo need pairs of a chosen and a rejected answer; kto needs answers with a label. dpo,
    ipo and kto use the initial model as reference. With reward, a score head is trained on pairs.
    With distil, the model learns from a teacher (section `distil`).
    """
    steps: PositiveInt | None = None
    """Number of optimizer steps. It overrides `epochs`, unless the command line sets only `epochs`."""
    epochs: PositiveFloat = 1.0
    """Number of passes over the training data."""
    batch_size: PositiveInt = 4
    """Number of rows in one forward pass."""
    accumulate: PositiveInt = 1
    """Number of forward passes in one optimizer step. The loss is the mean over all tokens of the
    step, so 8 passes of 1 row give the same step as 1 pass of 8 rows.
    """
    learning_rate: Annotated[float, Field(ge=0.0)] = 2e-4
    """Peak learning rate; by default 5e-5 with lion and lion8bit, 0.01 with adafactor, 1 with
    prodigy.
    """
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Schedule of the learning rate after warm-up. With `wsd` it is constant and then decays
    linearly at the end (see `decay`). With schedule-free the default is constant.
    """
    warmup: Annotated[float, Field(ge=0.0)] = 0.03
    """Length of the warm-up. A value below 1 is a fraction of all steps; any other value is a
    number of steps.
    """
    decay: Fraction = 0.2
    """With `wsd`: the fraction of the steps, at the end, in which the learning rate decays."""
    min_learning_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Learning rate at the end of cosine, linear and wsd, as a fraction of the peak learning rate.
    """
    aux_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Coefficient of the load-balancing loss of a mixture of experts, which is logged as
    `aux_loss`. By default it is the coefficient in the config of the model, if the config sets
    `output_router_logits`. 0 switches the loss off.
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
    """`adamw8bit` (bitsandbytes) stores its states in 8 bits. `adamw8bit-paged` does so too, and
    can move them to host memory. `lion` has one state per weight, and `adafactor` has one row and
    one column of states per matrix. `muon` updates matrices, and AdamW updates the other weights.
    `schedule-free` averages the weights instead of using a schedule. `prodigy` finds the learning
    rate itself. All optimizers except `adamw` need fp32 weights and gradients. `precision.rounding`
    switches stochastic rounding on.
    """
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay. It is applied to matrices only."""
    embedding_noise: PositiveFloat | None = None
    """NEFTune: the value alpha. In training, uniform noise of at most alpha / sqrt(tokens of a row
    x width) is added to the embeddings. The paper uses 5 to 15. There is no noise in evaluation and
    samples. Only for sft.
    """
    beta1: Fraction = 0.9
    """Decay of the first moment. Not used by adafactor."""
    beta2: Fraction = 0.999
    """Decay of the second moment. With lion it is the decay of its only state, and the default is
    0.99. Not used by adafactor.
    """
    epsilon: PositiveFloat = 1e-8
    """Added to the square root of the second moment. Not used by lion and adafactor."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Diffusion: the decay of an exponential moving average of the trained weights, for example
    0.999. The average is saved as a second result.
    """
    clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Maximum norm of the gradient. A larger gradient is scaled down to this norm. 0 means no
    clipping.
    """
    gradient_checkpointing: Literal["auto", "none", "layers", "layers+offload"] = "auto"
    """`layers` recomputes layers in the backward pass. This needs less memory and up to a third
    more time, and gives the same numbers. `layers+offload` also moves the inputs of these layers to
    host memory (GPU only). `auto` uses `none` if the planned memory fits. Otherwise it recomputes
    as few layers as possible so that the plan fits, or all layers with offload if that is not
    enough. `true` means `layers`, `false` means `none`.
    """
    checkpointed_layers: (
        Literal["all"] | PositiveInt | EveryKth | list[Annotated[int, Field(ge=0)]]
    ) = "all"
    """Which layers are recomputed: `all`, a number (that many layers from the first one, which
    saves most memory), `every 2`, or a list of positions that start at 0.
    """
    keep_attention: bool = False
    """With `layers`: store the output and logsumexp of attention, so that the backward pass does
    not compute attention again. A recomputed layer then stores about twice as much. With
    `layers+offload` they are stored in host memory. `gradient_checkpointing: auto` also stores them
    if they fit.
    """
    memory: MemorySize | None = None
    """Limit for the peak memory of a step (`20GiB`, `800MiB`). `gradient_checkpointing: auto` plans
    a step that stays below it. By default `auto` may use all memory of the device.
    """
    seed: int = 0
    """Seed for random weights, the choice of evaluation rows, the order of the data, dropout and
    sampling.
    """
    deterministic: bool = False
    """Use only deterministic algorithms. This is slower on a GPU."""
    eval_every: PositiveInt | None = None
    """Number of steps between two evaluations; each of them uses all evaluation rows. By default a
    run evaluates before step 1 and then at most ten times, the last time at the end. All these
    evaluations together use about a fifth as many rows as training. For this, a run makes fewer
    evaluations, or uses only every n-th row. The last evaluation always uses all rows.
    """
    eval_batch_size: PositiveInt | None = None
    """Number of rows in one evaluation pass. The result does not depend on it. Default:
    `batch_size`.
    """
    patience: PositiveInt | None = None
    """Stop training after this many evaluations in a row without a better loss."""
    stop_on: str | None = None
    """Name of the set of `data.eval` whose loss is used for `patience` and for the best step. By
    default all sets together.
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_optimizer_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {**OPTIMIZER_DEFAULTS.get(str(values.get("optimizer")), {}), **values}
        return values


class RunSection(Section):
    folder: str = "runs/{name}"
    """Folder for all files of the run. `{name}` is replaced by the names of model and data and the
    time.
    """
    save_every: PositiveInt | None = None
    """Number of steps between checkpoints. By default the value of `eval_every`, or a tenth of the
    run if it is not set. There is always a checkpoint at the last step.
    """
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept, in addition to the best checkpoint."""
    save: Literal["last", "best"] | None = None
    """Which weights become the result: those of the last step, or those of the step with the best
    evaluation loss. The default is `best` with `train.patience`, otherwise `last`.
    """
    adapters_every: PositiveInt | None = None
    """Number of steps between intermediate adapters. Each is written to `adapters/step_N` in the
    run folder, with all files of a result. By default only the final adapter is written.
    """
    adapters_keep: PositiveInt | None = None
    """How many of the newest intermediate adapters are kept. By default all of them."""
    adapter_format: Literal["diffusers", "comfyui"] = "diffusers"
    """Diffusion: with `comfyui` the folder of each adapter also gets a file comfyui.safetensors,
    with the names and `.alpha` tensors that ComfyUI reads.
    """
    log_every: PositiveInt = 1
    """Number of steps between lines of metrics.jsonl."""
    sample_every: Annotated[int, Field(ge=0)] | None = None
    """Number of steps between samples; 0 means no samples. By default a quarter of the run. The
    first samples are generated before step 1, the last ones after the last step.
    """
    samples: list[str | dict[str, Any]] = []
    """Prompts that the model answers (or draws) during training. By default the prompts of the
    first evaluation rows; diffusion runs have none by default. For diffusion a prompt can be a
    mapping (`{prompt: a dog, negative: blurry, size: 768, steps: 30, guidance: 5, seed: 7}`).
    """
    sample_tokens: PositiveInt = 64
    """Maximum number of new tokens in a sample."""
    sample_steps: PositiveInt = 20
    """Diffusion: number of denoising steps for a sample."""
    sample_size: PositiveInt | None = None
    """Diffusion: side length of a sample in pixels. By default `images.resolution`."""
    sample_frames: PositiveInt | None = None
    """For models that generate videos: the number of frames of a sample. By default that of the
    longest training clips. A sample with more than one frame is an animated WebP file.
    """
    sample_guidance: Annotated[float, Field(ge=0.0)] = 3.5
    """Diffusion: guidance scale for a sample."""
    observe_every: PositiveInt = 100
    """Isotype records the dtypes of all operators once in this number of steps, and always in step
    1.
    """
    report: bool = True
    """Write report.html."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Trackers that get the metrics in addition to metrics.jsonl. For each, install the extra of
    the same name (`pip install '.[wandb]'` in the checkout). Without an API key wandb runs offline.
    """
    push_to_hub: str | None = None
    """Repository on the hub to which the result is uploaded after the run: `ORG/NAME`, or `NAME` in
    your account. The token and the name of the repository are checked before the run. If the upload
    fails, the run is still complete.
    """
    push_merged: bool = False
    """Upload the merged model instead of the adapter."""
    push_private: bool = True
    """Whether a repository that is created for the upload is private."""


class ParallelSection(Section):
    kind: Literal["auto", "replicate", "shard", "hybrid"] = "auto"
    """How several processes divide the work. `replicate`: each process holds the whole model and
    computes some of the rows of a step; gradients are summed once per step. `shard`: each process
    holds a part of every weight, gradient and optimizer state, and gathers the weights of a layer
    while the layer is computed. `hybrid`: the processes of one machine shard the model, and each
    machine has a copy of it. `auto` uses `replicate` if the planned memory fits, otherwise `shard`
    if the other settings allow it.
    """
    timeout: PositiveFloat = 1800.0
    """How many seconds a process waits for another process. Then the run ends with an error that
    names the other process. The time must be longer than the generation of samples for all prompts.
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
