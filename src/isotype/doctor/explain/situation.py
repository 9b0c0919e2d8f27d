"""Reads from a traceback whose code failed, what the program was doing (generate, backward,
callback, ...), and which function the user's line called with which tensors. `RecognisedError`
contains this information together with the operator and the dtypes from the message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...dtypes import torch_dtype_name
from .log import Frame

_LIBRARY_PATH = re.compile(
    r"(?:site-packages|dist-packages|lib/python3|<frozen|<string>|<eval_with_key>|/torchinductor_|"
    r"(?:^|/)(?:torch|transformers|peft|trl|accelerate|deepspeed|diffusers|triton|bitsandbytes|flash_attn|xformers|unsloth|unsloth_zoo|liger_kernel|lightning|pytorch_lightning)/)"
)
_PACKAGE_PATH = re.compile(
    r"(?:site-packages|dist-packages)/(?P<name>[\w]+)|(?:^|/)(?P<bare>torch|transformers|peft|trl|accelerate|deepspeed|diffusers|triton|bitsandbytes|flash_attn|xformers|unsloth)/"
)
# packages whose frames mean that a trainer is running
_TRAINER_PACKAGES = (
    "trl",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "axolotl",
    "llamafactory",
    "trainer",
    "simpletuner",
)


def is_library(file: str) -> bool:
    return bool(_LIBRARY_PATH.search(file.replace("\\", "/")))


def package_name(file: str) -> str | None:
    matches = list(_PACKAGE_PATH.finditer(file.replace("\\", "/")))
    if matches:
        return matches[-1]["name"] or matches[-1]["bare"]
    return None


@dataclass(frozen=True)
class Situation:
    """Contains what a traceback tells about a failure.

    evidence      flag -> the frame that shows it
    report_flags  flags that the lines around the traceback state: autocast, resumed, sharded,
                  features (of images or audio), adapters, muon, grouped product, cpu, mps, compiled
                  only, nvfp4, kv cache, unfrozen, structured input, hard-coded, mixed precision,
                  master weights, head cast to fp32, card without bf16, zero quantized weights,
                  fell back to fp16, fell back to fp32, transformers 5
    quoted_frame  if there is no traceback, the line of code that the text quotes, as a frame
                  without a file
    """

    frames: Sequence[Frame] = ()
    evidence: dict[str, Frame] = field(default_factory=dict)
    packages: frozenset[str] = frozenset()
    report_flags: frozenset[str] = frozenset()
    quoted_frame: Frame | None = None

    def __contains__(self, flag: str) -> bool:
        return flag in self.evidence or flag in self.report_flags

    @property
    def innermost(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    @property
    def failing_frame(self) -> Frame | None:
        """Returns the innermost frame that is not in torch."""
        return next((f for f in reversed(self.frames) if package_name(f.file) != "torch"), None)

    @property
    def user_frame(self) -> Frame | None:
        """Returns the innermost frame of the user's code."""
        return next((frame for frame in reversed(self.frames) if not is_library(frame.file)), None)

    @property
    def caller_frame(self) -> Frame | None:
        """Returns the innermost frame that is not in torch. This frame is used if the traceback
        contains no frame of the user's code.
        """
        return next(
            (
                frame
                for frame in reversed(self.frames)
                if package_name(frame.file) != "torch" and "/" in frame.file.replace("\\", "/")
            ),
            None,
        )

    def describe_evidence(self, flag: str) -> str:
        frame = self.evidence.get(flag)
        if frame is None:
            return "the text around it"
        return f"{frame.function or 'code'} at {frame.file}:{frame.line}"

    def find_frame(self, pattern: str) -> Frame | None:
        """Returns the innermost frame whose code, function or file matches the pattern."""
        return next(
            (
                frame
                for frame in reversed(self.frames)
                if re.search(pattern, f"{frame.file} {frame.function} {frame.code}")
            ),
            None,
        )


# flag -> patterns for the name of a frame's function, its line of code, and its file's path
_FLAG_PATTERNS: dict[str, tuple[str, str, str]] = {
    "generate": (
        "_?generate|_?sample|_greedy_search|beam_search",
        r"\.generate\(|\.chat\(|pipeline\(",
        "",
    ),
    "backward": (
        "backward",
        r"\.backward\(|_engine_run_backward|autograd\.grad\(",
        r"autograd/graph\.py",
    ),
    "callback": ("on_..+", "", ""),
    "trainer": (
        "_inner_training_loop|training_step|fit",
        "",
        r"(?:^|/)(?:trainer|training_loop|loop)\w*\.py$|_trainer\.py$",
    ),
    "averaging": (
        r"(?i)(?:.*_)?(?:ema|swa|average)(?:_.*)?",
        "",
        r"swa_utils\.py$|(?:^|/)ema\w*\.py$",
    ),
    "optimizer": (
        "",
        r"optim\w*\.step\(|_optimizer_step\(|\b(?:\w*momentum|exp_avg|velocity)\w*\.\w+_\(",
        r"/optim/|/optimi|optimizer\w*\.py$",
    ),
    "evaluation": (
        "evaluate|evaluation(?:_loop)?|predict|prediction_step|validate|(?:log|run)_validation|validation_step",
        r"\bevaluate\(|validation",
        "",
    ),
    "autocast": ("", "", r"amp/autocast_mode\.py"),
    "recompute": ("recompute_fn|unpack_hook", "", r"utils/checkpoint\.py"),
    "clip": (".*(?:clip_grad|unscale_).*", "clip_grad|unscale_", ""),
    "compile": ("", "", "_dynamo|_inductor|torchinductor|eval_frame"),
    "inductor": ("", r"\bextern_kernels\.\w+\(", r"torchinductor_"),
    "custom_bwd": ("decorate_bwd", "", ""),
}
# flags that the name of a function shows only in the code of a library: a program's own function
# may have any name
_LIBRARY_NAMES = frozenset({"generate", "evaluation"})
# the methods of the callbacks of transformers, TRL and Lightning
_CALLBACK_NAMES = re.compile(
    r"on_(?:init_end|(?:train|epoch|step|substep|validation|test|predict|fit)\w*|evaluate|save|log"
    r"|prediction_step|optimizer_step|pre_optimizer_step|before_\w+|after_\w+)"
)


def _frame_flags(frame: Frame, outer: Frame | None, inner: Frame | None) -> set[str]:
    """Returns names such as `trainer` or `custom backward` that describe what the program was doing
    in a frame. `outer` is the frame that called this frame, and `inner` is the frame that this
    frame called.
    """
    code = frame.code
    function = frame.function.rpartition(".")[2]
    file = frame.file.replace("\\", "/")
    flags = {
        flag
        for flag, (name, line, path) in _FLAG_PATTERNS.items()
        if (name and re.fullmatch(name, function) and _may_name(flag, frame, outer))
        or (line and re.search(line, code))
        or (path and re.search(path, file))
    }
    if inner is not None and inner.function == "generate" and not is_library(inner.file):
        flags.discard("generate")  # a method of the program that has this name
    if function == "backward" and package_name(file) != "torch":
        flags.add("custom backward")
    if package_name(file) in _TRAINER_PACKAGES:
        flags.add("trainer")
    if "averaging" in flags:
        flags.discard("optimizer")
    if re.search(r"\boptim/|optimizer", file):
        flags.discard("clip")
    return flags


def _may_name(flag: str, frame: Frame, outer: Frame | None) -> bool:
    """True if the name of the frame's function can be used as evidence for this flag."""
    if flag == "callback":
        is_called_by_library = outer is not None and is_library(outer.file)
        function = frame.function.rpartition(".")[2]
        return is_called_by_library or _CALLBACK_NAMES.fullmatch(function) is not None
    return flag not in _LIBRARY_NAMES or is_library(frame.file)


# flags that a line anywhere in a log states
_LOG_PATTERNS = {
    "card without bf16": (
        r"\bTesla (?:T4|V100|P100|P40|P4|K80|M60|M40)\b|\bNVIDIA (?:T4|V100)\b|\bV100-\w+"
        r"|\bGTX ?(?:1[06]\d\d|9[5-8]0|Tit[ao]n)|\bRTX ?20[678]0|\bQuadro RTX"
        r"|\bTITAN (?:V|X|Xp|RTX)\b|\b(?:on|a|an|my)"
        r" (?:free )?(?:Colab )?(?:T4|V100|P100)\b|\bKaggle[^\n]{0,20} (?:T4|P100)\b"
        r"|\bsm_?[67]\d\b|\bcompute capability:? (?:of )?[67]\.\d\b"
    ),
    "zero quantized weights": r"zero_quantized_(?:nontrainable_)?weights['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?true",
    "resumed": r"\bresum(?:ing|ed) (?:training )?from\b|resume_from_checkpoint['\"]?\s*[:=]\s*['\"/\w]",
    "fell back to fp16": (
        r"\b(?:bf16|bfloat16)\b[^\n]{0,60}\bfall(?:s|ing)? ?back to (?:torch\.)?(?:float16|fp16)\b"
    ),
    "fell back to fp32": (
        r"\b(?:bf16|bfloat16|fp16|float16)\b[^\n]{0,60}\bfall(?:s|ing)? ?back to"
        r" (?:torch\.)?(?:float32|fp32)\b"
    ),
    "transformers 5": r"\btransformers(?: version)?\s?[:=v ]*=?\s?5\.\d",
}
_TEXT_PATTERNS = {
    "autocast": (
        r"\b(?:under|in|with) (?:torch\.|CUDA |bf16 |the )*(?:amp\.|cuda\.amp\.)?autocast\b"
        r"|\b(?:under|with) AMP\b|\bAMP training\b"
    ),
    "resumed": r"\bresum(?:e|es|ed|ing)\b|from_checkpoint|load_state_dict",
    "sharded": r"\bFSDP(?:v?2)?\b|fully_shard|ZeRO-?[123]",
    "features": r"\b(?:image|audio|vision|video|pixel)s?\b",
    "adapters": r"\bq?lora\b|\bpeft\b|\badapters?\b|get_peft_model",
    "muon": r"muon|newtonschulz|zeropower|v_mean|second_momentum",
    "grouped product": r"\b_?grouped_mm\b|grouped_linear",
    "cpu": (
        r"\b(?:inference|training|generation|generates?|run|runs|running|trained|trains?) on (?:a"
        r" |the |my )?CPU\b"
        r"|device(?:[_ -](?:map|type))?[ =(:]+['\"]?cpu\b|\bm1 and m2 (?:must|to) have the same\b"
    ),
    "mps": r"\bMPS\b|\bM-series Mac|\bApple Silicon\b",
    "compiled only": (
        r"\bonly (?:under|with|when|in)\b[^\n]{0,24}\bcompile"
        r"|\beager(?: mode)? (?:runs|works|is fine)|\b(?:runs|works|fine) (?:in|under) eager"
    ),
    "nvfp4": r"\bnvfp4\b",
    "kv cache": r"\bKV[- ]?cache|past_key_values?\b",
    "unfrozen": r"\bunfr(?:o|ee)z|\bfrozen first\b|requires_grad(?: ?= ?|_\()False",
    "structured input": r"\bdataclass|\bNamedTuple",
    "mixed precision": r"mixed[_ -]?precision\b|\bautocast\b|\bAMP\b",
    "master weights": r"master[_ ]?weights",
    "head cast to fp32": r"cast_\w*head_to_fp32|\bfp32_lm_head\b",
    "rerun": r"\bcheckpoint\(|\b(?:gradient|activation) checkpointing\b",
    "hard-coded": r"\bhard-?cod\w+|\bwritten out\b",
}
FLAGS = frozenset({*_FLAG_PATTERNS, *_TEXT_PATTERNS, *_LOG_PATTERNS, "custom backward"})
_LOG_HINTS = re.compile(
    r"(?i)tesla|nvidia|v100|gtx|rtx|titan|quadro|t4|p100|\bsm_|compute cap|zero_q|resum|transformers|fall"
)
_QUOTED_CODE = re.compile(
    r"(?m)^\s*-+>\s*\d+\s+(?P<arrow>\S.*)$"
    r"|(?P<call>\b(?:torch|F|nn\.functional)\.(?:[\w.]*(?:norm|attention|conv|linear)\w*|matmul|b?mm|einsum|addmm|baddbmm)\([^()\n]*\)"
    r"|\bself\.\w*(?:norm|conv)\w*\([^()\n]*\))"
)


def find_report_flags(text: str) -> frozenset[str]:
    """Returns the flags (such as `autocast` or `sharded`) whose words occur in the text around the
    traceback.
    """
    return frozenset(
        flag for flag, pattern in _TEXT_PATTERNS.items() if re.search(pattern, text, re.IGNORECASE)
    )


def find_log_flags(line: str) -> Iterator[str]:
    """Yields the flags (such as `resumed`) whose words occur in a line of a log. The line may be
    far away from the traceback.
    """
    if _LOG_HINTS.search(line):
        for flag, pattern in _LOG_PATTERNS.items():
            if re.search(pattern, line, re.IGNORECASE):
                yield flag


def find_quoted_code(text: str) -> Frame | None:
    """Returns the code that a text without a traceback quotes. This is the line that an arrow
    marks, or else the last call of an operator in the text. Returns None if no code is quoted.
    """
    match = next(iter([*_QUOTED_CODE.finditer(text)][-1:]), None)
    if match:
        return Frame("", None, "", (match["arrow"] or match["call"]).strip())
    return None


def _find_forward(frames: Sequence[Frame]) -> Frame | None:
    for frame in frames:
        if frame.function.rpartition(".")[2] == "forward":
            return frame
    return None


def read_situation(
    frames: Sequence[Frame], report_flags: frozenset[str] = frozenset(), text: str = ""
) -> Situation:
    """Reads from a traceback what the program was doing when it failed. If there is no traceback,
    the function searches for a quoted line of code in `text`, the text around the error.
    """
    evidence: dict[str, Frame] = {}
    for index, frame in enumerate(frames):
        outer = frames[index - 1] if index else None
        inner = frames[index + 1] if index + 1 < len(frames) else None
        for flag in _frame_flags(frame, outer, inner):
            evidence[flag] = frame
    custom_backward = evidence.get("custom backward")
    if custom_backward is not None:
        recomputed = _find_forward(frames[frames.index(custom_backward) + 1 :])
        if recomputed is not None:  # the backward of a checkpoint, which runs modules again
            del evidence["custom backward"]
            evidence["recompute"] = recomputed
    packages = frozenset(p for frame in frames if (p := package_name(frame.file)))
    return Situation(
        frames, evidence, packages, report_flags, None if frames else find_quoted_code(text)
    )


PRODUCTS = frozenset(
    {
        "mm",
        "bmm",
        "matmul",
        "dot",
        "vdot",
        "mv",
        "inner",
        "outer",
        "einsum",
        "tensordot",
        "addmm",
        "addmv",
        "addbmm",
        "baddbmm",
    }
    | {"sspaddmm", "smm", "multi_dot", "chain_matmul", "@"}
)
_METHODS_WITHOUT_TENSORS = frozenset(
    {"backward", "step", "generate", "forward", "apply", "train", "evaluate", "update"}
)


@dataclass(frozen=True)
class Call:
    """A call on the line that failed.

    function  `einsum`, `grid_sample`, `@`
    tensors   the source of the arguments that can be tensors
    in_place  whether the call writes into the first tensor
    """

    function: str
    tensors: tuple[str, ...]
    frame: Frame
    in_place: bool = False

    @property
    def place(self) -> str:
        """Returns the line of code that contains the call, and its location."""
        if self.frame.file:
            return f"{self.frame.code} at {self.frame.file}:{self.frame.line}"
        return f"the text quotes {self.frame.code}"

    @property
    def is_product(self) -> bool:
        return self.function.rstrip("_") in PRODUCTS


def failing_call(situation: Situation) -> Call | None:
    """Returns the call on the user's innermost line if this line calls torch directly. Returns None
    if this line calls a layer or another library. Without a traceback, the result is the call that
    the text quotes.
    """
    if situation.quoted_frame is not None:
        return _parse_call(situation.quoted_frame)
    for frame in reversed(situation.frames):
        if not is_library(frame.file):
            return _parse_call(frame)
        if package_name(frame.file) != "torch":
            return _parse_product_of_activations(frame)
        file = frame.file.replace("\\", "/")
        if not re.search(
            r"/torch/(?:functional|nn/functional|_tensor|_ops|_jit_internal|overrides|sparse/\w+|linalg/\w+)\.py$",
            file,
        ):
            return None
    return None


_WEIGHT = re.compile(r"weight|\bW\w*\b|\.t\(\)|\.T\b")


def _parse_product_of_activations(frame: Frame) -> Call | None:
    """Returns the product on a line of a library. Returns None if an operand may be a weight: other
    causes explain such a product.
    """
    call = _parse_call(frame)
    if call is None or not call.is_product or any(map(_WEIGHT.search, call.tensors)):
        return None
    return call


def _parse_call(frame: Frame) -> Call | None:
    code = re.sub(
        r"^(?:return|assert|yield|await|elif|if|while|with)\s+|:$", "", frame.code.strip()
    )
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [call for node in ast.walk(tree) if (call := _parse_tensor_call(node, frame))]
    products = [call for call in calls if call.is_product]
    if len(products) > 1:
        return None
    return next(iter(products or calls), None)


def _parse_tensor_call(node: ast.AST, frame: Frame) -> Call | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return Call("@", (_shorten_source(node.left), _shorten_source(node.right)), frame)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    owner = _shorten_source(node.func.value)
    name = node.func.attr
    arguments = [
        *node.args,
        *(
            keyword.value
            for keyword in node.keywords
            if keyword.arg in ("input", "other", "mat2", "vec2", "weight", "grid", "tensor2")
        ),
    ]
    tensors = [
        _shorten_source(arg)
        for arg in arguments
        if not isinstance(arg, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Starred)
    ]
    if not re.match(r"^(?:torch(?:\.\w+)*|F|nn\.functional)$", owner):
        if name.rstrip("_") not in PRODUCTS:
            return None
        tensors.insert(0, owner)
    if len(tensors) < 2 or name in _METHODS_WITHOUT_TENSORS:
        return None
    return Call(name, tuple(tensors), frame, in_place=name.endswith("_"))


def _shorten_source(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, kw_only=True)
class RecognisedError:
    """An error that was recognised in a text.

    operator  the operator that raised the error: `matrix product`, `convolution`, ...
    dtypes    role -> dtype, in the order of the text (`left`, `right`; `expected`, `got`; `query`,
              `key`, `value`; ...)
    captures  other parts of the text, such as the name of a variable or the internal name of an
              operator
    """

    text: str
    operator: str
    dtypes: dict[str, str] = field(default_factory=dict)
    captures: dict[str, str] = field(default_factory=dict)
    situation: Situation = field(default_factory=Situation)

    @property
    def half(self) -> str:
        """Returns the 16-bit float dtype that the error names, or bf16 if it names none."""
        return next((dtype for dtype in self.dtypes.values() if dtype in ("bf16", "fp16")), "bf16")

    @property
    def torch_half(self) -> str:
        """Returns the 16-bit float dtype for the code of a suggested fix, such as `torch.bfloat16`.
        The dtype is fp16 if the text names a GPU that does not support bf16.
        """
        half = "fp16" if "card without bf16" in self.situation else self.half
        return f"torch.{torch_dtype_name(half)}"

    @property
    def autocast(self) -> str:
        """Returns the code that switches autocast on for the device that the text names. If the
        text names no device, the code is for CUDA.
        """
        device = next(
            (kind for kind in ("cpu", "mps") if kind in self.situation.report_flags), "cuda"
        )
        return f'torch.autocast("{device}", dtype={self.torch_half})'
