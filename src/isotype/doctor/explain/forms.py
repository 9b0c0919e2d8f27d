"""The wordings of dtype errors, as templates; recognise.py matches them. A table: longer than a file should be otherwise."""

from __future__ import annotations

# operator, template. Earlier wins. `<x>` is a dtype named x; everything else is a regular expression.
FORMS: tuple[tuple[str, str], ...] = (
    # products
    ("grouped product", r"Expected inputs of (?P<_only>\w+) type but got mat_a\.dtype=<left> and mat_b\.dtype=<right>"),
    ("matrix product", r"Expected object of scalar type <left> but got scalar type <right> for argument #\d+ '\w+' in call to _th_"),
    (
        "layer outside autocast",
        (
            r"Data types for parameters must match when outside of autocasted region[\s\S]{0,40}?Found input dtype: "
            r"<left> and '(?P<_parameter>\w+)' dtype: <right>"
        ),
    ),
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
            r"(?: \(while checking arguments for (?P<_checker>\w+)\))?"
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
    (
        "recurrent layer",
        r"Input and \w+ tensors are not (?:at )?the same dtype,? found input tensor with <left> and \w+ tensor with <right>",
    ),
    ("recurrent layer", r"input must have the type <right>,? got type <left>"),
    # attention
    ("hardware without bf16", r"No operator found for `memory_efficient_attention[\s\S]*?bf16 is only supported on A100"),
    (
        "memory-efficient attention",  # every operator tried refuses for the dtype; possessive, so that one that does not is not skipped
        (
            r"No operator found for `memory_efficient_attention[\s\S]*?query +: [^\n]*\(<query>\)(?:\n(?!`)[^\n]*)*+"
            r"(?:\n`[^`]+` is not supported because:(?:\n[ \t]++(?!dtype=)[^\n]*)*+\n\s+dtype=[^\n]*\(supported: \{(?P<_only>[^}]*)\}\)"
            r"(?:\n(?!`)[^\n]*)*+)++(?!\n`)"
        ),
    ),
    (
        "attention",
        (
            r"Expected query,? key,? and value to have the same dtype,? but got query\.dtype:? <query>,? "
            r"key\.dtype:? <key>,? and value\.dtype:? <value>"
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
    ("flash attention", r"Flash ?Attention only supports? (?:(?:fp16|bf16|float16|bfloat16|fp8\w*),? ?(?:and |or )?){2,}"),
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
    ("flash attention", r"Expected (?:q|k|v|qkv)_dtype == torch::kFloat16"),
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
    ("step counter", r"same dtype except `step` tensors"),
    ("optimizer update", r"[Ee]xpected dtype <state> for `?(?P<_which>end|weight)`?,? but got (?:dtype )?<gradient>"),
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
    (
        "integer input",
        r"(?:torch\.)?(?P<_name>\w+)\(\):? (?:Expected|expected) dtype int(?:32|64)(?:(?:/| or )int64)? for index(?: but got:? <got>)?",
    ),
    (
        "integer input",
        r"(?:torch\.)?(?P<_name>\w+)\(\):? (?:Expected a long tensor for index,|dtype of indices should be Long) but got <got>",
    ),
    ("integer input", r"tensors used as (?P<_name>indices) must be long, (?:int, )?byte or bool"),
    ("integer input", r"(?P<_name>one_hot) is only applicable to index tensor"),
    ("integer input", r"expected (?P<_name>target) dtype to be Long or Byte,? but got <got>"),
    ("floating labels", r"Expected floating point type for target with class probabilities,? got <got>"),
    ("two dtypes", r"expected scalar type <expected> but (?:found|got) <got>"),
    ("no gradient", r"element 0 of tensors does not require grad and does not have a grad_fn"),
    # arguments that have to agree
    ("missing kernel", r"Expected both inputs to be Half, Float or Double tensors but got (?P<_dtype>BFloat16) and BFloat16"),
    ("comparison", r"attribute 'dtype' do not match: <left> != <right>"),
    ("comparison", r"(?m)^(?:\w*Error: )?<left> did not match <right>$"),
    (
        "paired arguments",
        (
            r"(?P<_name>[\w.]+)(?:\(\))?: Expected (?P<_left>\w+) and (?P<_right>\w+) to have the same dtype,? "
            r"but found \w+ of type <left> and \w+ of type <right>"
        ),
    ),
    ("paired arguments", r"All tensors must have the same dtype,? got (?P<_left>\w+): <left>, (?P<_right>\w+): <right>"),
    ("paired arguments", r"(?P<_name>prelu): Type promoting not supported\. Got <left> and <right>"),
    (
        "paired arguments",
        r"(?P<_name>grid_sampler)\(\): expected input and grid to have same dtype, but input has <left> and grid has <right>",
    ),
    ("paired arguments", r"Expected both inputs to be Half, Float or Double tensors but got <left> and <right>"),
    ("paired arguments", r"both inputs should have (?:the )?same dtype"),
    ("paired arguments", r"(?P<_name>(?:lax|jnp|jax)\.[\w.]+) requires arguments to have the same dtypes,? got <left>, <right>(?=[.\s]|$)"),
    (
        "paired arguments",
        r"cannot compute (?P<_name>\w+) as input #\d+ ?\(zero-based\) was expected to be an? <left> tensor but is an? <right> tensor",
    ),
    ("storage", r"Could not set tensor of type <right> to a tensor of type <left>"),
    # loss scaling
    (
        "loss scaler",
        (
            r"(?P<_what>does not use a scaler|Attempted \w+ but _scale is None|Gradient clipping is not implemented for "
            r"optimizers handling the unscaling|loss scale already at minimum|Minimum loss scale reached|"
            r"No inf checks were recorded (?:for this optimizer|prior to update)|"
            r"unscale_\(\) has already been called|unscale_\(\) is being called after step)"
        ),
    ),
    # values
    (
        "non-finite values",
        (
            r"(?P<_what>tensor with (?:all )?NaNs was produced in (?P<_where>\w+)|probability tensor contains either `?inf`?|"
            r"[Ff]unction '?\w+'? returned nan values|to satisfy the constraint \w+\([^\n]*but found invalid values:[^]]*\bnan\b|"
            r"[Ll]oss is (?:nan|inf)\b|"
            r"(?i:(?:nan|inf) or (?:nan|inf)) (?:found )?in (?:loss|grad\w*)|"
            r"'(?:loss|grad_norm)': '?nan\b)"
        ),
    ),
    # what a dtype lacks
    ("device without bf16", r"(?i:bfloat16 (?:is not supported on MPS|to the (?P<_device>\w+) backend but it does not have support))"),
    ("device without bf16", r"(?i:\.bf16' requires \.target (?P<_target>sm_\d+)|\bbf(?:16)? conversion instruction not supported)"),
    ("device without bf16", r"cutlassF: no kernel found to launch"),
    ("device without fp8", r"_scaled_mm (?:is|are) only supported on[^\n]{0,60}(?:compute capability|devices)"),
    ("device without bf16", r"CUBLAS_STATUS_NOT_SUPPORTED[^\n]*CUDA_R_16BF"),
    ("fp8 arithmetic", r"Promotion for Float8 Types is not supported, attempted to promote <left> and <right>"),
    ("hardware without bf16", r"(?i:(?:CUDA device|GPU|hardware) (?:does ?n.t|does not|doest not|do not) supp?ot?r?t? `?b(?:float|f)16)"),
    ("integer parameter", r"[Oo]nly Tensors of floating point (?:and complex )?dtype can require gradients"),
    (
        "demanded dtype",
        (
            r"Expected (?P<_name>\w+?)(?:\.(?:dtype|scalar_type)\(\)|_dtype) == (?:at::|torch::|c10::)?(?:ScalarType::)?k?(?P<_only>\w+)"
            r" to be true,? but got false"
        ),
    ),
    ("demanded dtype", r"Expected (?:Tensor argument )?(?P<_name>\w+) to have dtype (?P<_only>torch\.\w+),? but got (?P<_met>torch\.\w+)"),
    (
        "demanded dtype",
        r"\b(?P<_name>\w+)(?P<_call>\(\)):? (?:input )?(?:tensors? )?(?:must|should) be (?:of |either )*(?P<_only>float) or double",
    ),
    (
        "demanded dtype",
        r"assert (?P<_name>[\w.]+)\.dtype (?:==|in|is) [(\[]?(?P<_only>(?:torch|tl)\.(?:b?float\d+|half)(?:, ?(?:torch|tl)\.\w+)*)",
    ),
    ("demanded dtype", r"(?P<_name>This function) doesn't handle types other than (?P<_only>float) and double"),
    ("demanded dtype", r"(?P<_name>scale_[ab]) must be (?:a )?(?P<_only>float) scalar"),
    (
        "demanded dtype",
        (
            r"\bOnly (?P<_only>bf16|bfloat16|fp16|float16|half|fp32|float32)(?: high precision output)?"
            r" (?:types?|dtypes?|inputs?|tensors?)?"
            r" ?(?:are|is) supported(?: for (?P<_name>[^\n.]+))?"
        ),
    ),
    (
        "demanded dtype",
        r"(?P<_met>torch\.\w+) is not supported for (?:quantization method )?(?P<_name>\w+)\.? Supported dtypes:? \[(?P<_only>[^\]]+)\]",
    ),
    (
        "demanded dtype",
        r"\b(?P<_name>\w+) does not support (?P<_met>(?:torch\.)?float(?:16|32|64))\b[.,]? [Pp]lease use (?P<_only>(?:torch\.)?\w+)",
    ),
    (
        "demanded dtype",
        (
            r"(?<![\w.])(?P<_name>[\w.]+) (?:dtype )?must (?:be|have dtype|be of type|be in) "
            r"(?P<_only>torch\.(?:bfloat16|float16|float32|half))"
        ),
    ),
    ("missing kernel", r"\"(?P<_op>[\w<>:, ]+)\" not implemented for '(?P<_dtype>BFloat16|Half|Float8\w*)'"),
    (
        "missing kernel",
        (
            r"(?<![\w.:])(?P<_op>[\w.:]+)(?:\(\))? ?:? (?:does not support|is not (?:implemented|supported) (?:for|on|with)) "
            r"(?:dtype |type )?(?P<_dtype>torch\.(?:bfloat16|float16|half)|BFloat16|Half|bfloat16)"
        ),
    ),
    ("missing kernel", r"[Uu]nsupported dtype (?P<_dtype>BFloat16|Half|torch\.bfloat16|torch\.float16)"),
    ("missing kernel", r"cuFFT only supports dimensions whose sizes are powers of two when computing in (?P<_dtype>half) precision"),
    ("missing kernel", r"(?P<_op>linalg\.\w+): Low precision dtypes not supported\. Got (?P<_dtype>BFloat16|Half)"),
    ("outside torch", r"Cannot handle this data type: \([^\n]*<f(?P<_bytes>[248])"),
    ("outside torch", r"array type (?P<_dtype>float16|bfloat16) is (?:unsupported|not supported) in (?P<_library>linalg)"),
    ("outside torch", r"can'?t (?P<_library>convert np\.ndarray) of type ml_dtypes\.(?P<_dtype>bfloat16|float8\w*)"),
    ("outside torch", r"(?P<_library>no kernel matching) input types \([^)]*(?P<_dtype>half)float"),
    ("dtype as data", r"Object of type dtype is not JSON serializable|cannot represent an object', torch\.\w+"),
    ("dtype as data", r"Value 'torch\.\w+' \(dtype\) is not a supported primitive type"),
    ("numpy", r"Got unsupported ScalarType (?P<_dtype>BFloat16|Float8\w*)"),
    ("numpy", r"(?:Cannot interpret|can'?t convert)[^\n]{0,40}(?P<_dtype>torch\.bfloat16|bfloat16)[^\n]{0,40}numpy"),
    ("overflowing constant", r"value cannot be converted to type (?:at::|c10::)?(?P<_dtype>\w+) without overflow"),
    ("unsafe to autocast", r"(?P<_name>binary_cross_entropy)[^\n]{0,60} (?:is|are) unsafe to autocast"),
    ("autocast", r"Unexpected floating ScalarType in at::autocast::prioritize"),
    ("dtype string", r"argument '(?:dtype|type)' (?:\(position \d+\) )?must be torch\.dtype, not (?P<_type>str)"),
    ("dtype string", r"[Ii]nvalid (?:device string|type): '(?P<_word>(?:torch\.)?(?:bfloat16|float16|float32|half|bf16|fp16|fp32))'"),
    ("dtype string", r"module '?torch'? has no attribute '?(?P<_word>torch\.(?:bfloat16|float16|float32|half)|bf16|fp16|fp32|float8\w*)'?"),
    # distributed
    ("weights sent elsewhere", r"(?:mismatch dtype|dtype mismatch)[:,] src:? <source>,? dst:? <destination>"),
    ("DeepSpeed autocast", r"torch\.autocast is enabled outside DeepSpeed"),
    ("flattened parameters", r"(?:Must flatten tensors with|`?FlatParameter`? requires) uniform dtype but got <left> and <right>"),
    ("flattened parameters", r"Cannot flatten (?P<_integer>integer) dtype tensors"),
    ("sharded gradients", r"FSDP reduce-scatter expects uniform gradient dtype but got \{(?P<_set>[^}]*)\}"),
    ("collective without this dtype", r"(?m)^(?:RuntimeError: )?Invalid scalar type$"),
    (
        "collective without this dtype",
        r"(?:Input tensor data type is not supported for NCCL process group|Unconvertible NCCL type):? (?P<_dtype>\w+)",
    ),
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
            r"ZeRO requires fp32 gradient accumulation|Bfloat16 wrapper must use a gradient accumulation type of fp32|"
            r"unsupported mix of model dtype|Unsupported mix of "
            r"model_dtype"
        ),
    ),
    ("DeepSpeed section off", r"(?P<_section>fp16|bf16|bfloat16) is not enabled but (?:one or several|the following) .{0,6}parameters"),
    # configuration
    (
        "unknown argument",
        r"unexpected keyword argument '(?P<_argument>(?:torch_)?dtype|\w+_dtype|(?:fp16|bf16|half_precision|autocast)\w*|"
        r"\w*mixed_precision\w*|load_in_[48]bit|quantization_config)'",
    ),
    ("Lightning precision", r"Precision '?(?P<_word>[\w-]+)'? is invalid\. Allowed precision values: \((?P<_allowed>[^)]*)\)"),
    (
        "Lightning precision",
        r"precision='(?P<_word>[\w-]+)'\)?`? is not supported in (?P<_where>\w+)\. `?precision`? must be one of: \((?P<_allowed>[^)]*)\)",
    ),
    ("dtype string", r"argument (?P<_flag>--?\w*dtype\w*): invalid choice: '(?P<_word>torch\.\w+)' \(choose from"),
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
    ("Triton accumulator", r"acc\.type\.element_ty == out_dtype|out_dtype=<got> is unsupported"),
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
    ("Triton fp8", r"(?P<_dtype>fp8\w+) (?:data type )?(?:is )?not supported (?:in this arch|on CUDA arch)"),
    ("Triton assertion", r"CompileTimeAssertionFailure[\s\S]*\b(?P<_name>\w+)\.dtype == tl\.(?P<_only>\w+)\)\s+\^"),
    ("Triton operands", r"invalid operands of type (?P<_pointer>pointer<[^>]*>) and (?:triton\.language\.)?(?P<_other>\w+)"),
    ("Triton operands", r"invalid operands of type (?:triton\.language\.)?(?P<_other>[\w.]+) and (?P<_pointer>pointer<[^>]*>)"),
    (
        "parametrization",
        r"Registering a parametrization may not change the dtype[\s\S]*?unparametrized dtype: <left>\s+parametrized dtype: <right>",
    ),
    ("arguments of one dtype", r"(?P<_left>\w+)\.(?:scalar_type|dtype)\(\) == (?P<_right>\w+)\.(?:scalar_type|dtype)\(\)"),
    # forms cut short, as people quote them
    ("attention", r"Expected query,? key,? and value to have the same dtype"),
    ("attention mask", r"attn_mask dtype to be bool (?:or float )?or to match query dtype|invalid dtype for bias - should match query"),
    ("indexed write", r"(?P<_name>Index put) requires .{0,60}got <destination> for the destination and <source> for the source"),
    ("indexed write", r"(?P<_name>Index put) requires the source and destination dtypes match"),
    ("flattened parameters", r"(?:Must flatten tensors with|`?FlatParameter`? requires) uniform dtype"),
    ("sharded group", r"FSDP expects uniform (?P<_what>original parameter|reduce) dtype"),
    ("DeepSpeed mismatch", r"DeepSpeed config values that mismatch TrainingArguments values"),
    ("matrix product", r"expected m(?:at)?1 and m(?:at)?2 to have the same dtype"),
    ("accumulated product", r"self and (?:mat|batch|m)\d? must have the same dtype"),
)
