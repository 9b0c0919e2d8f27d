"""From an error's text to the operator that refused and the dtypes it met. Imports no torch.

Each form is a template: `<name>` stands for a dtype in any of the spellings below. What no form fits, but which names two dtypes and a
disagreement, is still recognised, with the operator taken from the traceback.
"""

from __future__ import annotations

import re
from functools import cache

from ...dtypes import parse
from .family import Seen
from .situation import Situation

# c10::BFloat16, struct c10::Half, at::Half, torch.bfloat16, torch.cuda.HalfTensor, CUDABFloat16Type, BFloat16, float, long int, bf16,
# bf16[constexpr[64]], <['64'], fp32>, triton.language.float32
_WORD = (
    r"(?:BFloat16|bfloat16|bf16|Half|half|Float8\w*|float8\w*|fp8\w*|Float|float(?:16|32|64)?|fp(?:16|32|64)|Double|double|"
    r"long int|Long|long|Int|int(?:8|16|32|64)?|unsigned char|Byte|uint8|Char|signed char|Short|Bool|bool|Complex\w*|complex\w*)"
)
_BARE = (
    r"(?:struct "
    rf")?(?:c10::complex<\w+>|(?:c10::|at::)?(?:torch\.(?:cuda\.)?|tl\.|triton\.language\.)?(?:CUDA|CPU|XPU|MPS)?{_WORD}(?:Type|Tensor)?)"
)
# What a template's `<name>` takes: any one word or Triton type; words that are no dtype are turned away after the match. (Spelling the
# dtypes out in every form would cost 0.15 s of compiling.)
_BLOCK = r"(?:struct )?(?:<\[[^\]]*\], ?[\w.]+>|[A-Za-z][\w.:]*(?:\[constexpr\[[^\s'\"]*\])?(?: int| char)?)"
_STRICT = re.compile(
    r"(?<![\w.])(?:struct "
    r")?(?:c10::(?:BFloat16|Half|Float\w*)|torch\.(?:cuda\.)?(?:bfloat16|float16|float32|half|float64|float|BFloat16Tensor|HalfTensor|FloatTensor|float8_\w+)|"
    r"BFloat16|Half|Float|Double|bfloat16|float16|float32|float64|bf16|fp16|fp32|fp64)(?![\w])"
)
_ODD = {"unsigned char": "uint8", "byte": "uint8", "char": "int8", "signed char": "int8", "short": "int16", "long int": "int64"}


def dtype_word(text: str) -> str:
    """`struct c10::BFloat16`, `torch.cuda.HalfTensor`, `<['64'], fp32>` -> `bf16`, `fp16`, `fp32`; unknown words unchanged."""
    word = text.strip().rstrip(".,:;")
    if block := re.search(rf"({_BARE})", word):
        word = block[1]
    word = re.sub(r"^(?:struct )?(?:c10::|at::)?(?:torch\.(?:cuda\.)?|tl\.|triton\.language\.)?(?:CUDA|CPU|XPU|MPS)?", "", word)
    word = re.sub(r"(?:Tensor|Type)$", "", word)
    try:
        return parse(_ODD.get(word.lower(), word))
    except ValueError:
        return word


def _known(word: str) -> bool:
    try:
        parse(word)
    except ValueError:
        return word.startswith(("fp8", "float8", "complex"))
    return True


# operator, template. Earlier wins. `<x>` is a dtype named x; everything else is a regular expression.
_FORMS: tuple[tuple[str, str], ...] = (
    # products
    ("matrix product", r"expected (?P<_left>m(?:at)?1) and m(?:at)?2 to have the same dtype,? but got:? <left> != <right>"),
    ("accumulated product", r"self and (?:mat|batch|m)\d? must have the same dtype,? but got <self> and <right>"),
    (
        "matrix product",
        (
            r"(?:expected )?(?:mat1|m1|batch1|input|a) and (?:mat2|m2|batch2|weight|b) (?:must|should|to) have "
            r"the same dtype,? but got:? <left> (?:and|!=|vs\.?) <right>"
        ),
    ),
    ("accumulated product", r"Input dtypes must be the same,? got:? input <self>,? batch1:? <left>,? batch2:? <right>"),
    ("vector product", r"addmv input tensors must have the same dtype,? but got:? <self>,? <left>,? and <right>"),
    ("vector product", r"dot ?:? expected both vectors to have same dtype,? but found <left> and <right>"),
    ("vector product", r"expected vec and mat to have (?:the )?same dtype,? but got:? <left> and <right>"),
    ("output buffer", r"Expected out tensor to have dtype <expected>,? but got <got>"),
    (
        "output buffer",
        (
            r"Expected (?:out|output|result|self) (?:tensor )?to (?:have|be) (?:dtype|type) <expected>,? but "
            r"(?:got|found) <got>"
        ),
    ),
    ("result type", r"result type <result> can'?t be cast to the desired (?:out=|output) type <desired>"),
    # layers
    ("convolution", r"Input type \(<left>\) and (?P<_what>bias|weight) type \(<right>\) should be the same"),
    (
        "old type check",
        (
            r"Expected tensor for (?:argument #\d+ )?'(?P<_left>\w+)' to have the same (?:scalar )?type as tensor "
            r"for (?:argument #\d+ )?'(?P<_right>\w+)'; but (?:type|got) <left> (?:does not equal|and) <right>"
        ),
    ),
    (
        "norm",
        (
            r"mixed dtype \(CPU\): (?:all the (?P<_what2>parameters?)|expect (?P<_what>parameter|input)) (?:must "
            r"have|to have) scalar type of <expected>"
        ),
    ),
    ("norm", r"mixed dtype \(CPU\)"),
    ("slow norm", r"Mismatch dtype between input and (?:weight|module): input dtype = <left>,? (?:weight|module) dtype = <right>"),
    ("recurrent layer", r"RNN input dtype \(<left>\) does not match weight dtype \(<right>\)"),
    ("recurrent layer", r"input must have the type <right>,? got type <left>"),
    # attention
    (
        "attention",
        (
            r"Expected query,? key,? and value to have the same dtype,? but got query\.dtype:? <query> "
            r"key\.dtype:? <key> and value\.dtype:? <value>"
        ),
    ),
    (
        "attention",
        (
            r"[Qq]uery/[Kk]ey/[Vv]alue should (?:either )?all have the same dtype(?:[\s\S]{0,300}?query\.dtype:? "
            r"<query>\s+key\.dtype:? <key>\s+value\.dtype:? <value>)?"
        ),
    ),
    ("attention", r"query and key must have the same dtype"),
    (
        "attention mask",
        (
            r"attn_mask dtype to be bool (?:or float )?or to match query dtype,? but got attn_mask\.dtype:? "
            r"<mask> and\s+query\.dtype:? <query>"
        ),
    ),
    ("attention mask", r"(?:invalid|unsupported) (?:dtype for bias|attn_?bias dtype)[\s\S]{0,60}?should be <query>[\s\S]{0,60}?<mask>"),
    ("flash attention", r"Flash ?Attention only supports? (?:fp16|bf16|float16)(?:,)? (?:and|or) (?:bf16|fp16|bfloat16)"),
    (
        "flash attention",
        (
            r"Flash ?Attention[- ]?\d?(?:\.0)? only supports? torch\.(?:float16|bfloat16) (?:and|or) "
            r"torch\.(?:float16|bfloat16) dtypes"
        ),
    ),
    (
        "flash attention",
        (
            r"(?:q|query),? (?:k|key),? (?:and )?(?:v|value) must (?:be|have) (?:dtype )?(?:fp16|float16|half) or "
            r"(?:bf16|bfloat16)"
        ),
    ),
    # indexed writes
    (
        "indexed write",
        (
            r"(?P<_name>Index put) requires the source and destination dtypes match,? got <destination> for the "
            r"destination and <source> for the source"
        ),
    ),
    ("indexed write", r"(?P<_name>scatter\w*)\(\):? [Ee]xpected self\.dtype to be equal to src\.dtype"),
    (
        "indexed write",
        (
            r"(?P<_name>index_(?:add|reduce)_?)\(\):? self \(<destination>\) and source \(<source>\) must have "
            r"the same (?:scalar )?d?type"
        ),
    ),
    (
        "indexed write",
        (
            r"(?P<_name>index_copy_?)\(\):? self and source expected to have the same dtype,? but got \(self\) "
            r"<destination> and \(source\) <source>"
        ),
    ),
    ("indexed write", r"(?P<_name>masked_scatter_?):? expected self and source to have same dtypes? but got\s?<destination> and <source>"),
    (
        "indexed write",
        (
            r"(?P<_name>index_fill_?|masked_fill_?|put_?|take)(?:\(\))?:? "
            r".{0,60}?(?:same|match).{0,30}?<destination>.{0,30}? <source>"
        ),
    ),
    # gradients and optimizers
    ("optimizer update", r"expected dtype <state> for `(?P<_which>end|weight)` but got dtype <gradient>"),
    ("fused optimizer", r"params, grads, exp_avgs,? and exp_avg_sqs must have same dtype"),
    ("assigned gradient", r"assign(?:ing|ed)? a gradient with dtype '?<gradient>'? to a tensor with (?:grad_)?dtype '?<parameter>'?"),
    ("backward of a promotion", r"Found dtype <got> but expected <expected>"),
    ("gradient in backward", r"(?m)^(?:\w*Error: )?(?:.{0,80}: )?Expected <expected>, got <got>"),
    (
        "gradient in backward",
        (
            r"[Ff]unction '?\w+'? returned an invalid gradient at index \d+ - expected (?:type|dtype) <expected> "
            r"but got <got>"
        ),
    ),
    ("scaler, fp16 gradients", r"[Aa]ttempting to unscale FP16 gradients"),
    ("scaler, bf16 gradients", r"\"_amp_foreach_non_finite_check_and_unscale_\w+\" not implemented for '<gradient>'"),
    ("integer input", r"to have one of the following scalar types: (?:Long|Int)[\w, ]*; but got <got>"),
    ("two dtypes", r"expected scalar type <expected> but (?:found|got) <got>"),
    ("no gradient", r"element 0 of tensors does not require grad and does not have a grad_fn"),
    # what a dtype lacks
    ("missing kernel", r"\"(?P<_op>[\w<>:, ]+)\" not implemented for '(?P<_dtype>BFloat16|Half|Float8\w*)'"),
    (
        "missing kernel",
        (
            r"(?P<_op>[\w.:]+)(?:\(\))? ?:? (?:does not support|is not (?:implemented|supported) (?:for|on|with)) "
            r"(?:dtype |type )?(?P<_dtype>torch\.(?:bfloat16|float16|half)|BFloat16|Half|bfloat16)"
        ),
    ),
    ("missing kernel", r"[Uu]nsupported dtype (?P<_dtype>BFloat16|Half|torch\.bfloat16|torch\.float16)"),
    ("missing kernel", r"cuFFT only supports dimensions whose sizes are powers of two when computing in (?P<_dtype>half) precision"),
    ("numpy", r"Got unsupported ScalarType (?P<_dtype>BFloat16|Float8\w*)"),
    ("numpy", r"(?:Cannot interpret|can'?t convert)[^\n]{0,40}(?P<_dtype>torch\.bfloat16|bfloat16)[^\n]{0,40}numpy"),
    ("overflowing constant", r"value cannot be converted to type (?:at::|c10::)?(?P<_dtype>\w+) without overflow"),
    ("autocast", r"Unexpected floating ScalarType in at::autocast::prioritize"),
    ("dtype string", r"module '?torch'? has no attribute '?(?P<_word>torch\.(?:bfloat16|float16|float32|half)|bf16|fp16|fp32|float8\w*)'?"),
    # distributed
    ("flattened parameters", r"(?:Must flatten tensors with|FlatParameter requires) uniform dtype but got <left> and <right>"),
    ("sharded group", r"FSDP expects uniform (?P<_what>original parameter|reduce) dtype but got \{(?P<_set>[^}]*)\}"),
    ("collective", r"(?i:output tensor must have the same type as input tensor)"),
    ("collective", r"(?i:Invalid usage of tensors with different dtypes)(?:\s*Found <left> and\s+<right>)?"),
    (
        "collective",
        (
            r"(?i:\w+: invalid tensor type at index \d+ \(expected "
            r"TensorOptions\(dtype=)<left>(?:[\s\S]{0,200}?got TensorOptions\(dtype=<right>)?"
        ),
    ),
    ("collective", r"(?i:tensors? must (?:all )?have the same d?type)[^\n]{0,40}(?i:all_?reduce|all_?gather|reduce_scatter|broadcast)"),
    (
        "DeepSpeed accumulation",
        (
            r"Model data type and gradient accumulation data type must be equal to use ZeRO|BF16 optimizer for "
            r"ZeRO requires fp32 gradient accumulation|unsupported mix of model dtype|Unsupported mix of "
            r"model_dtype"
        ),
    ),
    # configuration
    (
        "both halves",
        (
            r"At most one of (?P<_a>fp16(?:_full_eval|\b)) and (?:bf16|fp16) \S*\s?can be "
            r"True|(?:fp16|bf16|float16|bfloat16)(?: full eval)? and (?:fp16|bf16|float16|bfloat16)(?: full "
            r"eval)?(?: modes?)? (?:cannot|can'?t|can not) (?:both be true|be simultaneously enabled|be both|both "
            r"be)|At most one of fp16 and bf16"
        ),
    ),
    ("DeepSpeed mismatch", r"ds (?P<_key>(?:fp16|bf16)\.enabled)=(?P<_ds>\w+) vs hf (?P<_hf>[\w|+()]+)=(?P<_hfvalue>\w+)"),
    ("DeepSpeed mismatch", r"`?--mixed_precision`? arg cannot be set to `(?P<_mp>\w+)` when `(?P<_section>\w+)` is set"),
    (
        "trainer refusal",
        (
            r"full_(?P<_full>fp16|bf16) requires mixed precision|requesting an incompatible dtype and optimizer "
            r"combination|You cannot use the (?P<_optimizer>\w+) optimizer with (?P<_grads>fp32) gradients|only "
            r"bfloat ?16 is supported|You cannot use --?\w*bf(?:loat)?16 without|(?m:requires mixed.precision=\S+ "
            r"?/? ?$)|requires it\.$"
        ),
    ),
    (
        "mixed precision word",
        (
            r"Unknown mixed_precision mode:? ?(?P<_word>\S+)|invalid choice: '(?P<_word2>\w+)' \(choose from "
            r"(?=[^)]*fp16)(?=[^)]*bf16)|'bool' object has no attribute 'lower'"
        ),
    ),
    (
        "hardware without bf16",
        (
            r"Your setup doesn'?t support bf16|bf16 mixed precision requires PyTorch|bf16 requested, but "
            r"[^\n]{0,40}not (?:available|supported)[^\n]{0,20} GPU|does not support `?pure_bf16|bf16 precision "
            r"was requested but not available|[Bb]float16 is (?:only supported on|not supported "
            r"on)[^\n]{0,80}|Bfloat16 is only supported on GPUs with compute capability"
        ),
    ),
    ("hardware without bf16", r"(?:--)?tf32 requires Ampere"),
    ("model and flag differ", r"Model is in <left> precision but you want to use <right> precision"),
    # bitsandbytes
    ("quantised again", r"Blockwise (?:4bit )?(?:de)?quantization only supports 16/32-bit floats,? but got <got>"),
    ("8-bit optimizer", r"Gradient\s?\+\s?optimizer bit data type combination not supported: grad <gradient>,? optimizer <state>"),
    ("quantised fine-tuning", r"You cannot perform fine-tuning on purely quantized models"),
    # Triton
    (
        "Triton branch",
        (
            r"initial value for `(?P<_name>\w+)` is of type <left>,? but the (?P<_block>then|else) block "
            r"redefines it as <right>"
        ),
    ),
    ("Triton branch", r"Mismatched type for (?P<_name>\w+) between then block \(<left>\) and else block \(<right>\)"),
    ("Triton branch", r"Ternary expression with dynamic condition has inconsistent types <left> and <right>"),
    ("Triton branch", r"[Ii]nconsistent return types? (?:in|between)?[^\n]{0,40}<left> and <right>"),
    ("Triton loop", r"Loop-carried variable (?P<_name>\w+) has initial type <left> but is re-?assigned to <right> in loop"),
    ("Triton dot", r"Both operands must be (?:the )?same (?:d?type)\.? Got <left> and <right>"),
    ("Triton dot", r"lhs and rhs must have the same dtype"),
    ("Triton dot", r"First input \(<left>\) and second input \(<right>\) must have the same dtype"),
    ("Triton math", r"Expected dtype \[(?P<_ok>[^\]]+)\] but got <got>"),
    ("Triton store", r"Block element type\s?\(<left>\) and value element type\s?\(<right>\) mismatch"),
    ("Triton fp8", r"type (?P<_dtype>fp8\w+) not supported in this architecture"),
    # forms cut short, as people quote them
    ("attention", r"Expected query,? key,? and value to have the same dtype"),
    ("attention mask", r"attn_mask dtype to be bool (?:or float )?or to match query dtype|invalid dtype for bias - should match query"),
    ("indexed write", r"(?P<_name>Index put) requires .{0,60}got <destination> for the destination and <source> for the source"),
    ("indexed write", r"(?P<_name>Index put) requires the source and destination dtypes match"),
    ("flattened parameters", r"(?:Must flatten tensors with|FlatParameter requires) uniform dtype"),
    ("sharded group", r"FSDP expects uniform (?P<_what>original parameter|reduce) dtype"),
    ("DeepSpeed mismatch", r"DeepSpeed config values that mismatch TrainingArguments values"),
    ("matrix product", r"expected m(?:at)?1 and m(?:at)?2 to have the same dtype"),
)

# A cheap word of each form's literal text would do; one union is simpler and as fast: text without any of these is not about dtypes.
_HINT = re.compile(
    r"dtype|scalar type|bf16|fp16|fp32|fp8|bfloat|float16|float32|BFloat16|Half|FP16|tf32|Flash "
    r"?Attention|mixed.precision|grad_fn|data type|same type|Query/Key|quantized models|'lower'|requires "
    r"it\.|lhs and rhs|(?:type|and) Float|c10::|without overflow|Float and|got Float|can't be cast|Float "
    r"can"
    r"|Input type|Blockwise|purely quantized|invalid tensor type|same data ?type|scalar types?|autocast"
)
_META = re.compile(r"different metadata than during the forward pass")
_META_PAIR = re.compile(
    (
        r"saved metadata: \{[^}]*?torch\.Size\((?P<s1>[^)]*)\), 'dtype': (?P<d1>torch\.\w+).*?recomputed "
        r"metadata: \{[^}]*?torch\.Size\((?P<s2>[^)]*)\), 'dtype': (?P<d2>torch\.\w+)"
    ),
    re.S,
)
_DISAGREE = re.compile(
    r"(?i)\b(?:same|match\w*|mismatch\w*|expected|but (?:got|found)|does not "
    r"equal|inconsistent|differ\w*|incompatible|should be|must be|cannot be cast|!=|vs\.?)\b|!="
)


@cache
def _compiled() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((op, re.compile(re.sub(r"(?<!\?P)<(\w+)>", lambda m: f"(?P<{m[1]}>{_BLOCK})", form))) for op, form in _FORMS)


def recognise(text: str, situation: Situation) -> Seen | None:
    """What refused and which dtypes it met, or None when the text does not speak of a disagreement between dtypes."""
    if not _HINT.search(text) and not _META.search(text):
        return None
    if _META.search(text):
        for pair in _META_PAIR.finditer(text):
            saved, again = dtype_word(pair["d1"]), dtype_word(pair["d2"])
            if saved != again and pair["s1"] == pair["s2"]:
                return Seen(text=text, operator="recompute", dtypes={"saved": saved, "recomputed": again}, situation=situation)
        return None
    for operator, form in _compiled():
        if match := form.search(text):
            groups = {k: v for k, v in match.groupdict().items() if v is not None}
            dtypes = {k: dtype_word(v) for k, v in groups.items() if not k.startswith("_")}
            if not all(_known(word) for word in dtypes.values()):
                continue
            if len(dtypes) > 1 and len(set(dtypes.values())) == 1:
                return None  # one dtype on both sides: the disagreement is about devices or shapes
            words = {k[1:].rstrip("2"): v for k, v in groups.items() if k.startswith("_")}
            if "dtype" in words:
                dtypes["missing"] = dtype_word(words["dtype"])
            operator = _by_place(operator, words, dtypes, situation)
            return Seen(text=text, operator=operator, dtypes=dtypes, words=words, situation=situation)
    return _unknown_wording(text, situation)


def _by_place(operator: str, words: dict[str, str], dtypes: dict[str, str], situation: Situation) -> str:
    """A few texts are shared by several operators: the traceback tells which."""
    if operator == "old type check":
        names = " ".join(words.values())
        return "convolution" if "grad_output" in names or ("weight" in names and situation.mentions("conv")) else "matrix product"
    if operator == "two dtypes":
        return "integer input" if dtypes.get("expected", "").startswith("int") else operator_of(situation)
    return operator


def operator_of(situation: Situation) -> str:
    """The operator from the innermost frames, for texts that do not say."""
    if "optimizer" in situation:
        return "optimizer update"
    inner = situation.frames[-3:]
    for pattern, operator in (
        (r"layer_norm|rms_norm|group_norm|batch_norm|LayerNorm|RMSNorm|normalization\.py", "norm"),
        (r"scaled_dot_product|sdpa|flash_attn|xformers", "attention"),
        (r"conv\w*\(|conv\.py|_conv_forward", "convolution"),
        (r"index_put|scatter|index_add|index_copy|\]\s*\+?=(?!=)", "indexed write"),
        (r"out ?=|addmm_\(|addbmm_\(|baddbmm_\(", "output buffer"),
        (r"linear|matmul|bmm|einsum|@|\bmm\(|addmm|attn_weights", "matrix product"),
        (r"rnn\.py|lstm|gru", "recurrent layer"),
    ):
        if any(re.search(pattern, f"{f.function} {f.code} {f.file.rpartition('/')[2]}") for f in reversed(inner)):
            return operator
    return "matrix product"


def _unknown_wording(text: str, situation: Situation) -> Seen | None:
    """Two different dtypes and a disagreement in one line: a dtype error whose wording is new."""
    for line in text.splitlines():
        found: list[str] = []
        for match in _STRICT.finditer(line):
            word = dtype_word(match[0])
            if word not in found:
                found.append(word)
        if len(found) >= 2 and _DISAGREE.search(line) and re.search(r"(?i)error|dtype|type|precision|expected|must|got", line):
            return Seen(
                text=line,
                operator="unknown wording",
                dtypes={"first": found[0], "second": found[1]},
                words={"operator": operator_of(situation) if situation.frames else ""},
                situation=situation,
            )
    if re.search(
        r"(?i)(?:scalar types?|dtypes?) of .{1,60}(?:same|match|differ)|(?:same|matching|different|mismatched) (?:dtypes?|scalar types?)\b",
        text,
    ) and re.search(r"Error|Expected|expected|must|should", text):
        return Seen(
            text=text,
            operator="unknown wording",
            words={"operator": operator_of(situation) if situation.frames else ""},
            situation=situation,
        )
    return None
