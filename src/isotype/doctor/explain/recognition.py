"""Finds out from the text of an error which operator raised it and which dtypes this operator
received. This module imports no torch.

Each row of `forms.tsv` contains a template of a message and an example of it. In a template,
`<name>` matches a dtype in any of the spellings below. A text that matches no template is also
recognised if it names two dtypes and says that they do not match. The operator of such an error is
then inferred from the traceback.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ...dtypes import parse
from .situation import RecognisedError, Situation, failing_call

_TEMPLATES_TEXT = Path(__file__).with_name("forms.tsv").read_text(encoding="utf-8")

# rows of operator, template and example
_ROWS = [
    line.split("\t") for line in _TEMPLATES_TEXT.splitlines() if line and not line.startswith("#")
]
# Pairs of operator and template. `<x>` is a dtype with the role x; the rest is a regular
# expression.
MESSAGE_TEMPLATES: tuple[tuple[str, str], ...] = tuple((row[0], row[1]) for row in _ROWS)
# pairs of operator and an example of its message, for the pages
MESSAGE_EXAMPLES: tuple[tuple[str, str], ...] = tuple((row[0], row[2]) for row in _ROWS)
# The groups of a template are dtypes by role, and other facts, whose names begin with an
# underscore.
_GROUPS = {name for _, form in MESSAGE_TEMPLATES for name in re.findall(r"<(\w+)>", form)}
DTYPE_ROLES = frozenset(
    {name for name in _GROUPS if not name.startswith("_")}
    | {"missing", "saved", "recomputed", "first", "second", "refused"}
)
CAPTURES = frozenset(
    {name[1:].rstrip("2") for name in _GROUPS if name.startswith("_")} | {"operator", "asserted"}
)
# the operators of the templates, and those that are recognised only from a traceback or another
# wording
OPERATORS = frozenset(
    {operator for operator, _ in MESSAGE_TEMPLATES}
    | {"recompute", "integer input", "interpolation", "unknown wording", "unknown refusal"}
)

# c10::BFloat16, struct c10::Half, at::Half, torch.bfloat16, torch.cuda.HalfTensor,
# CUDABFloat16Type, BFloat16, float, long int, bf16, bf16[constexpr[64]], <['64'], fp32>,
# triton.language.float32
_BARE_DTYPE_NAME = (
    r"(?:BFloat16|bfloat16|bf16|Half|half|Float8\w*|float8\w*|fp8\w*|[Ff]loat(?:16|32|64)?|fp(?:16|32|64)|Double|double|"
    r"long int|Long|long|Int|int(?:8|16|32|64)?|unsigned char|Byte|uint8|Char|signed"
    r" char|Short|Bool|bool|Complex\w*|complex\w*)"
)
_DTYPE_NAME = (
    r"(?:struct "
    rf")?(?:c10::complex<\w+>|(?:c10::|at::)?(?:torch\.(?:cuda\.)?|tl\.|triton\.language\.)?(?:CUDA|CPU|XPU|MPS)?{_BARE_DTYPE_NAME}(?:Type|Tensor)?)"
)
# The pattern for `<name>` in a template: any single word or Triton type. Words that are no dtype
# are rejected after the match, because listing the dtypes in every template would add 0.15 s of
# compile time.
_TYPE_PATTERN = (
    r"(?:struct )?(?:<\[[^\]]*\], ?[\w.]+>|[A-Za-z][\w.:]*(?:\[constexpr\[[^\s'\"]*\])?(?: int|"
    r" char)?)"
)
_EXPLICIT_DTYPE = re.compile(
    r"(?<![\w.])(?:struct "
    r")?(?:c10::(?:BFloat16|Half|Float\w*)|torch\.(?:cuda\.)?(?:bfloat16|float16|float32|half|float64|float|BFloat16Tensor|HalfTensor|FloatTensor|float8_\w+)|"
    r"BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|bf16|fp16|fp32|fp64)(?![\w])"
    # `tensor(float16)` of ONNX, `tensor<1x3xf16>` of MLIR, `bf16[2,340]` of XLA, and words that are
    # dtypes only after "dtype"
    r"|(?<=tensor\()\w+(?=\))|(?<=[<x])(?:bf16|f16|f32|f64|i1|i64)(?=>)|\b(?:bf16|f16|f32|f64)(?=\[\d)|(?<=dtype"
    r" )(?:float|half|double)\b"
)
_HALF_DTYPE = re.compile(
    r"(?i)(?<![\w.-])(?:torch\.|c10::|at::|tl\.)?(?:bfloat16|bf16|float16|fp16|half|float8\w*|fp8\w*)(?:tensor)?(?![\w-])"
)
# name of a C++ type in a message -> dtype
_C_TYPE_NAMES = {
    "unsigned char": "uint8",
    "byte": "uint8",
    "char": "int8",
    "signed char": "int8",
    "short": "int16",
    "long int": "int64",
}


def normalise_dtype(text: str) -> str:
    """Returns the short name of a dtype, for example `bf16` for `struct c10::BFloat16`, `fp16` for
    `torch.cuda.HalfTensor` and `fp32` for `<['64'], fp32>`. Unknown words are returned unchanged.
    """
    name = text.strip().rstrip(".,:;")
    if type_match := re.search(rf"({_DTYPE_NAME})", name):
        name = type_match[1]
    name = re.sub(
        r"^(?:struct"
        r" )?(?:c10::|at::)?(?:torch\.(?:cuda\.)?|tl\.|triton\.language\.)?(?:CUDA|CPU|XPU|MPS)?",
        "",
        name,
    )
    name = re.sub(r"(?:Tensor|Type)$", "", name)
    try:
        return parse(_C_TYPE_NAMES.get(name.lower(), name))
    except ValueError:
        return name


def _is_dtype(name: str) -> bool:
    try:
        parse(name)
    except ValueError:
        return name.lower().startswith(("fp8", "float8", "complex"))
    return True


# A text is about dtypes only if it contains a hint from each of these two lists. A test checks this
# for every template. Matching a hundred templates would take forty times longer.
_SUBJECT_HINTS = (
    "type",
    "half",
    "float",
    "bf16",
    "fp16",
    "fp32",
    "fp64",
    "fp8",
    "'f8e",
    "tf32",
    "bf conv",
    "_16bf",
    "nan",
    "inf",
    "scal",
    "precision",
    "quant",
    "grad",
    "full_",
    "autocast",
    "flash",
    "parameter",
    "tensor",
    "', torch.",
    "mode",
    "'lower'",
    "load_in",
    "requires it",
    "undefined operation",
    "not implemented for",
    "config",
    "cutlass",
)
_DISAGREEMENT_HINTS = (
    "same",
    "match",
    "expected",
    "must",
    "should",
    "found",
    "sup",
    "both",
    "not ",
    "n't",
    "_not_",
    "only",
    "cannot",
    "invalid",
    "!=",
    " vs ",
    "require",
    "attempt",
    "redefine",
    "assign",
    "cast",
    "convert",
    "at most",
    "uniform",
    "mixed dtype",
    "doesn",
    "inconsistent",
    "differ",
    "no attribute",
    "assert",
    "equal",
    "incompatible",
    "unknown",
    "nan",
    "inf",
    "but got",
    "combination",
    "scal",
    "model is",
    " == ",
    "can be",
    "arg",
    "error",
    "region",
    "no operator",
    "purely",
    "out_dtype",
)


def _mentions_dtypes(text: str) -> bool:
    lower_text = text.lower()
    return any(hint in lower_text for hint in _SUBJECT_HINTS) and any(
        hint in lower_text for hint in _DISAGREEMENT_HINTS
    )


_REFUSAL = re.compile(
    r"(?i)\b(?:(?:not|isn't|aren't|n't) (?:be )?(?:natively |currently |yet )*"
    r"(?:supp?ort\w*|implemented|available|allowed|compatible|enabled)"
    r"|un-?supported|un-?implemented|(?:only|does ?n[o']t|do ?n[o']t|cannot|can't)"
    r" (?:supports?|accepts?|takes?|handles?)"
    r"|only (?:available|works|supported)"
    r"|no (?:kernel|support|implementation|conversion)|has no|(?:cannot|can't) convert|requires?|invalid (?:data"
    r" ?type|dtype)|incompatible)\b"
)
# The dtypes that a message lists as accepted are not the refused dtype.
_ACCEPTED_DTYPES = re.compile(
    r"(?i)(?:only (?:supported|available|implemented) (?:for|on|with|in)|supported (?:d?types|data"
    r" types) are:?|expected [\w ]*to be|"
    r"must be (?:one"
    r" of|either)?)(?:[\s,:]|(?:torch\.)?(?:b?float\d*|bf16|fp16|half|double|complex\w*|u?int\d*|bool|and|or|tensors?)\b)+"
)
# "bf16/f16" is no path
_PATH_OR_FLAG = re.compile(
    r"(?<![\w.~/\\-])(?!(?:(?:bf|fp?|float|bfloat)\d+/?)+(?![\w./\\-]))[\w.~-]*[/\\][\w./\\~-]+|[\w-]+\.(?:safetensors|bin|ckpt|pth?|gguf|onnx|py|json|ya?ml|so|dll)\b|--[\w-]+=?"
)
_SAME_TYPE = re.compile(
    r"(?i)same (?:element |data |scalar )?d?types?\b|\bbad (?:lhs|rhs|acc) type\b"
)
_METADATA_ERROR = re.compile(r"different\s+metadata\s+than\s+during\s+the\s+forward\s+pass")
_METADATA_PAIR = re.compile(
    (
        r"saved metadata:\s+\{'shape': (?P<s1>torch\.Size\([^)]*\)|\.\.\.), 'dtype':"
        r" (?P<d1>torch\.\w+).*?recomputed "
        r"metadata:\s+\{'shape': (?P<s2>torch\.Size\([^)]*\)|\.\.\.), 'dtype': (?P<d2>torch\.\w+)"
    ),
    re.S,
)
_DISAGREEMENT = re.compile(
    r"(?i)\b(?:same|not broadcast compatible|different precisions|bad (?:lhs|rhs|acc) type|"
    r"match\w*|mismatch\w*|expected|but (?:got|found)|does not "
    r"equal|inconsistent|differ\w*|incompatible|should be|must be|cannot be cast|!=|vs\.?)\b|!="
)


@cache
def _compile_templates() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Returns the compiled pattern of each template. A blank in a template also matches a line
    break, because long messages may be wrapped.
    """
    wrapped_templates = [
        (op, form.replace(" ", r"\s") if "[" not in form else form)
        for op, form in MESSAGE_TEMPLATES
    ]
    return tuple(
        (op, re.compile(re.sub(r"(?<!\?P)<(\w+)>", lambda m: f"(?P<{m[1]}>{_TYPE_PATTERN})", form)))
        for op, form in wrapped_templates
    )


def recognise_error(text: str, situation: Situation) -> RecognisedError | None:
    """Returns the operator that raised the error, and the dtypes that this operator received.
    Returns None if the text is not about dtypes that do not match.
    """
    if not _mentions_dtypes(text):
        return None
    if _METADATA_ERROR.search(text):
        for pair in _METADATA_PAIR.finditer(text):
            saved_dtype = normalise_dtype(pair["d1"])
            recomputed_dtype = normalise_dtype(pair["d2"])
            if saved_dtype != recomputed_dtype and pair["s1"] == pair["s2"]:
                return RecognisedError(
                    text=text,
                    operator="recompute",
                    dtypes={"saved": saved_dtype, "recomputed": recomputed_dtype},
                    situation=situation,
                )
        return None
    for operator, template in _compile_templates():
        if match := template.search(text):
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            dtypes = {
                name: normalise_dtype(value)
                for name, value in groups.items()
                if not name.startswith("_")
            }
            if not all(_is_dtype(dtype) for dtype in dtypes.values()):
                continue
            if len(dtypes) > 1 and len(set(dtypes.values())) == 1:
                return None  # the dtypes are equal: the error is about devices or shapes
            captures = {
                name[1:].rstrip("2"): value
                for name, value in groups.items()
                if name.startswith("_")
            }
            if "dtype" in captures:
                dtypes["missing"] = normalise_dtype(captures["dtype"])
            operator = _refine_operator(operator, captures, dtypes, situation)
            if operator == "interpolation":
                dtypes = {"left": dtypes["state"], "right": dtypes["gradient"]}
            return RecognisedError(
                text=text, operator=operator, dtypes=dtypes, captures=captures, situation=situation
            )
    return _recognise_unknown_wording(text, situation)


def _refine_operator(
    operator: str, captures: dict[str, str], dtypes: dict[str, str], situation: Situation
) -> str:
    """Determines the operator from the traceback if several operators raise errors with the same
    message.
    """
    if operator == "old type check":
        names = " ".join(captures.values())
        is_convolution = (
            "grad_output" in names
            or "conv" in captures.get("checker", "")
            or ("weight" in names and situation.find_frame("conv"))
        )
        if is_convolution:
            return "convolution"
        if re.search(r"\bmat\d?\b|addmm", names):
            return "matrix product"
        return "paired arguments"
    if operator == "paired arguments" and not dtypes and situation.find_frame(r"(?i)sage_?att"):
        return "attention"
    if operator == "two dtypes":
        if dtypes.get("expected", "").startswith("int"):
            return "integer input"
        return infer_operator(situation)
    if (
        operator == "optimizer update"
        and situation.frames
        and "optimizer" not in situation
        and "compile" not in situation
    ):
        return "interpolation"
    return operator


_OTHER_OPERATORS = r"norm|attention|flash_attn|conv|index_|scatter|linear|lstm|gru"


def infer_operator(situation: Situation) -> str:
    """Infers the operator from the innermost frames of the traceback. This is for error messages
    that do not name the operator.
    """
    if "optimizer" in situation:
        return "optimizer update"
    if (
        (call := failing_call(situation))
        and not call.is_product
        and not re.search(_OTHER_OPERATORS, call.function)
    ):
        return "paired arguments"
    inner_frames = situation.frames[-3:] or [frame for frame in (situation.quoted_frame,) if frame]
    for pattern, operator in (
        (
            r"layer_norm|rms_norm|group_norm|batch_norm|LayerNorm|RMSNorm|normalization\.py"
            r"|self\.\w*norm\w*\(",
            "norm",
        ),
        (r"scaled_dot_product|sdpa|flash_attn|xformers", "attention"),
        (r"conv\w*\(|conv\.py|_conv_forward", "convolution"),
        (r"index_put|scatter|index_add|index_copy|\]\s*\+?=(?!=)", "indexed write"),
        (r"[(,]\s*out ?=|addmm_\(|addbmm_\(|baddbmm_\(", "output buffer"),
        (r"linear|matmul|bmm|einsum|@|\bmm\(|addmm|attn_weights", "matrix product"),
        (r"rnn\.py|lstm|gru", "recurrent layer"),
    ):
        if any(
            re.search(pattern, f"{frame.function} {frame.code} {frame.file.rpartition('/')[2]}")
            for frame in reversed(inner_frames)
        ):
            return operator
    return "matrix product"


def _recognise_unknown_wording(text: str, situation: Situation) -> RecognisedError | None:
    """Recognises a dtype error that matches no template. One line of such an error says that two
    dtypes do not match, or that a dtype is not supported.
    """
    lines = text.splitlines()
    captures = {"operator": infer_operator(situation) if situation.frames else ""}
    for number, line in enumerate(lines):
        if _SAME_TYPE.search(line) and not _EXPLICIT_DTYPE.search(line):
            line = "\n".join(lines[number : number + 3])  # the types are on a following line
        dtype_names = [
            name
            for name in dict.fromkeys(
                normalise_dtype(match[0]) for match in _EXPLICIT_DTYPE.finditer(line)
            )
            if _is_dtype(name)
        ]
        if (
            len(dtype_names) >= 2
            and _DISAGREEMENT.search(line)
            and re.search(r"(?i)error|dtype|type|precision|expected|must|got", line)
        ):
            dtypes = {"first": dtype_names[0], "second": dtype_names[1]}
            return RecognisedError(
                text=line,
                operator="unknown wording",
                dtypes=dtypes,
                captures=captures,
                situation=situation,
            )
    if re.search(
        r"(?m)^AssertionError: assert"
        r" .*(?:dtype|scalar_type|element_ty|\.is_(?:fp|bf)\d+\(|is_floating)",
        text,
    ):
        asserted = text.partition("assert ")[2]
        return RecognisedError(
            text=text,
            operator="unknown wording",
            captures={"asserted": asserted},
            situation=situation,
        )
    if re.search(
        r"(?i)(?:scalar types?|dtypes?) of"
        r" .{1,60}(?:same|match|differ)|(?:same|matching|different|mismatched) (?:dtypes?|scalar"
        r" types?)\b",
        text,
    ) and re.search(r"Error|Expected|expected|must|should", text):
        return RecognisedError(
            text=text, operator="unknown wording", captures=captures, situation=situation
        )
    for line in lines:
        if (refused := _find_refused_dtype(line)) is not None:
            return RecognisedError(
                text=line,
                operator="unknown refusal",
                dtypes=refused,
                captures=captures,
                situation=situation,
            )
    return None


def find_half_dtypes(text: str) -> list[str]:
    """Returns the half-precision and fp8 dtypes that a text names, in the order in which they
    occur. Names inside paths and flags are ignored.
    """
    dtype_names = dict.fromkeys(
        name
        for name in map(normalise_dtype, _HALF_DTYPE.findall(_PATH_OR_FLAG.sub(" ", text)))
        if _is_dtype(name)
    )
    return list(dtype_names)


def _find_refused_dtype(line: str) -> dict[str, str] | None:
    """If a line of an exception says that a half-precision dtype is not supported, returns a dict
    that maps `refused` to this dtype. If the line says that a dtype is not supported but names no
    half-precision dtype, the result is an empty dict. For any other line the result is None.
    """
    if (
        not re.match(r"(?:fatal )?[\w.]*(?:Error|Exception|error)\b", line.strip())
        or "is not defined" in line
        or "import" in line
    ):
        return None
    plain_text = _PATH_OR_FLAG.sub(" ", line)
    if not _REFUSAL.search(plain_text):
        return None
    if half_dtypes := find_half_dtypes(_ACCEPTED_DTYPES.sub(" ", line)):
        return {"refused": half_dtypes[0]}
    if re.search(
        r"(?i)\b(?:unsupported|invalid)(?: \w+){0,2} (?:data ?type|dtype|scalar ?type)\b",
        plain_text,
    ):
        return {}
    return None
