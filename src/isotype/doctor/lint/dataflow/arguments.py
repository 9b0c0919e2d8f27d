"""What a function's parameters are taken to be: tensors, numbers, dtypes, from annotation, default, use and name, in that order."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from ..source import Function, SourceFile, bindings, keyword, last_name
from . import torch_names as names
from .events import Scenario
from .paths import Path
from .values import NONE, UNFOLLOWED, UNKNOWN, Dtype, Env, Items, Made, Mapping, Scalar, Tensor

# a name ending in one of these holds integers or booleans
INTEGER = re.compile(
    r"(^|_)(ids?|idx|index|indices|labels?|targets?|target_ids|y|seqlens?|cu_seqlens|"
    r"offsets?|lengths?|tokens?|mask|masks|num|count|n|positions?)$"
)
POSITIONS = re.compile(r"(^|_)(position_ids|positions?|pos|pos_ids|t|timesteps?)$")
GRADIENT = re.compile(
    r"(^|_)(grads?|gradients?)(_(w|b|x|h|input|weights?|bias|hidden|embed|q|k|v|\w*weights?|\w*bias))?$|"
    r"^d_?([A-Z]\w{0,2}|w|b|x|h|q|k|v|weights?|bias|inputs?)$|^g(w|x|b)$"
)
_LIKE_ACTIVATION = re.compile(r"out|inp|hidden|state|feat|act|tok|embed|mat|data|logit|grad")
# a buffer that lives between calls is usually wider than the inputs, by design
_STATE = re.compile(r"(^|_)(state|cache|pool|snapshots|buffer|buf|acc)$")
_TIMES = re.compile(r"(^|_)timesteps?$|^(t|ts|time|times)$")
WEIGHT = re.compile(
    r"^((.*_)?(w|weights?|wt|bias|gamma|beta|kernel|emb|embedding|proj|lora_?[ab]|experts?)(_?[a-z0-9]{1,2}|_proj)?|"
    r"w[a-z0-9]{0,2}(_t)?|[AB]|b|W\w{0,2})$",
)
_WEIGHTS = re.compile(r"weight|param|expert|head|kernel|^ws?$|lora")
ACTIVATION = re.compile(
    r"^(x|xs|X|q|k|v|Q|K|V|query|key|value|queries|keys|values|hidden|hidden_states?|h|inputs?|inp|input_|xq|xk|xv|query_states|key_states|"
    r"value_states|residual|attn_\w+|logits|embeds?|inputs_embeds|features|latents|activations?)$"
)
_NAMED_FP32 = re.compile(r"_(fp32|float32|f32)$")
NUMBER = re.compile(
    r"(^|_)(scale|scaling|alpha|eps|epsilon|dim|axis|size|chunks?|seq_len|theta|base|p|dropout|temperature|softcap|causal|groups?|stride|"
    r"padding|reduction|length|heads?|num_\w+|is_\w+|use_\w+|n_\w+)$"
)
_TORCH_TENSOR = re.compile(r"\b(Opt|Optional|Float|Half|BFloat16|Double|D)?Tensor\b")
_OWN_TENSOR = re.compile(r"\w+Tensor\b")  # SparseTensor, QuantizedTensor: a class of its own, whose dtype is another matter
_MODEL_DTYPE = re.compile(r"^(torch_|model_|input_|weight_|target_|out_|output_|param_|params_|activation_)?dtype$")
_LOW_DEFAULT = re.compile(r"\btorch\.(bfloat16|float16|half)$")
_DEFAULT_DTYPE = re.compile(r"\btorch\.(float32|float64|float)$")


def bind(file: SourceFile, function: Function, arguments: list[ast.arg], scenario: Scenario, path: Path, *, module: bool) -> dict[str, Any]:
    """Name -> value for these parameters. module: of a plain function, whose defaults are what most callers leave as they are."""
    defaults = defaults_of(function)
    used = tensor_uses(file, function)
    values: dict[str, Any] = {}
    names_given = [a.arg for a in arguments]
    if any(map(WEIGHT.match, names_given)) and not any(ACTIVATION.match(n) or _LIKE_ACTIVATION.search(n) for n in names_given):
        scenario = replace(scenario, inputs=scenario.weights)  # what stands among weights only is one: the factors of an adapter
    for argument in arguments:
        name, default = argument.arg, _constant_behind(file, defaults.get(argument.arg))
        if default is None and "dtype" in name:
            default = _passed_by_all(file, function, name)
            if isinstance(default, ast.Call):  # worked out by another function
                values[name] = Dtype(None, f"the argument {name}")
                continue
        value = _value(name, argument.annotation, default, name in used, scenario, module)
        if isinstance(default, ast.Constant) and default.value is None and isinstance(value, (Tensor, Dtype)):
            path.leaning = isinstance(value, Dtype)  # callers that ask for a dtype are few
            value = NONE if path.take(f"{name} is None") else value
            path.leaning = False
        values[name] = value
    return values


def enclosing(file: SourceFile, node: ast.AST, scenario: Scenario, path: Path) -> Env:
    """The arguments of the functions around a function or class, as it sees them; their other names are not known."""
    env = Env()
    outer = file.function_of(node)
    if outer is not None:
        env = Env(enclosing(file, outer, scenario, path))
        given = [*outer.args.posonlyargs, *outer.args.args, *outer.args.kwonlyargs]
        env.names |= bind(file, outer, given, scenario, path, module=True)
    return env


def _value(name: str, annotation: ast.expr | None, default: ast.expr | None, used: bool, scenario: Scenario, module: bool) -> Any:
    hint = ast.unparse(annotation) if annotation is not None else ""
    constant = default.value if isinstance(default, ast.Constant) else None
    if "dtype" in name.lower() or hint.endswith("torch.dtype"):
        fixed = _DEFAULT_DTYPE.search(ast.unparse(default)) if default is not None else None
        if fixed:
            return Dtype("fp64" if fixed[1] == "float64" else "fp32", f"the default of the argument {name}")
        # what an accumulator's or a master copy's dtype will be, no name tells
        return Dtype(scenario.inputs if _MODEL_DTYPE.search(name) else None, f"the argument {name}")
    low = _LOW_DEFAULT.search(ast.unparse(default)) if isinstance(default, ast.Attribute) else None
    if low:
        return Dtype("bf16" if low[1] == "bfloat16" else "fp16", f"the default of the argument {name}")
    if isinstance(constant, (bool, int, float, str)):
        return Scalar(constant) if module else Scalar()
    if hint and "Tensor" not in hint and re.search(r"\b(int|float|bool|str)\b", hint):
        return Scalar()
    if any(word in hint for word in ("List[", "list[", "Tuple[", "tuple[", "Sequence[", "Dict[", "dict[", "Callable")):
        return UNKNOWN
    if INTEGER.search(name) or "LongTensor" in hint or "IntTensor" in hint or "BoolTensor" in hint:
        return UNFOLLOWED.but(positional=bool(POSITIONS.search(name)))
    if _OWN_TENSOR.search(hint) and not _TORCH_TENSOR.search(hint):
        return UNFOLLOWED
    if "Tensor" in hint or used or ACTIVATION.match(name.lstrip("_")) or WEIGHT.match(name) or _NAMED_FP32.search(name):
        if _NAMED_FP32.search(name):
            return Tensor("fp32", Made.LITERAL, f"the argument {name}, by its name", zero_dim=None)
        if WEIGHT.match(name):
            return Tensor(scenario.weights, Made.PARAMETER, f"the argument {name}")
        if _STATE.search(name) and "hidden" not in name:
            return UNFOLLOWED
        if _TIMES.search(name):  # whole numbers, or already rounded: no dtype to rely on
            return UNFOLLOWED.but(positional=True)
        return Tensor(scenario.inputs, Made.INPUT, f"the argument {name}", zero_dim=None if NUMBER.search(name) else False)
    return Scalar() if NUMBER.search(name) else UNKNOWN


def _passed_by_all(file: SourceFile, function: Function, name: str) -> ast.expr | None:
    """The dtype written out in every call that the file makes of this function, if they agree, or one of several that are all wide."""
    spec = function.args
    position = next((i for i, a in enumerate((*spec.posonlyargs, *spec.args)) if a.arg == name), None)
    if position is not None and isinstance(file.parents.get(function), ast.ClassDef):
        position -= 1  # self
    found: dict[str, ast.expr] = {}
    for call in _calls_by_name(file).get(function.name, ()):
        value = keyword(call, name) or (call.args[position] if position is not None and 0 <= position < len(call.args) else None)
        if value is None:
            return None
        found |= {ast.unparse(one): one for one in _taken_from(file, call, value)}
    if len(found) > 1 and not all(map(_DEFAULT_DTYPE.search, found)):
        return None
    return found[min(found)] if found else None


def _taken_from(file: SourceFile, node: ast.AST, value: ast.expr) -> list[ast.expr]:
    """What a name stands for in `for label, dtype in (("small", torch.float32), ...)` around the node; else the value itself."""
    loop = file.parents.get(node)
    while loop is not None and isinstance(value, ast.Name):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, (ast.Tuple, ast.List)):
            rows = [row.elts for row in loop.iter.elts if isinstance(row, ast.Tuple) and len(row.elts) == len(loop.target.elts)]
            places = [i for i, t in enumerate(loop.target.elts) if isinstance(t, ast.Name) and t.id == value.id]
            if places and rows and len(rows) == len(loop.iter.elts):
                return [row[places[0]] for row in rows]
        loop = file.parents.get(loop)
    return [value]


def _calls_by_name(file: SourceFile) -> dict[str, list[ast.Call]]:
    if "calls_by_name" not in file.memo:
        calls: dict[str, list[ast.Call]] = {}
        for call in file.nodes(ast.Call):
            calls.setdefault(last_name(call.func), []).append(call)
        file.memo["calls_by_name"] = calls
    by_name: dict[str, list[ast.Call]] = file.memo["calls_by_name"]
    return by_name


def _constant_behind(file: SourceFile, default: ast.expr | None) -> ast.expr | None:
    """What a name of the module that is a default stands for: `dtype=DEFAULT_DTYPE`."""
    if not isinstance(default, ast.Name):
        return default
    bound = [
        value for node in file.tree.body for target, value in bindings(node) if isinstance(target, ast.Name) and target.id == default.id
    ]
    return bound[0] if len(bound) == 1 else default


def defaults_of(function: Function) -> dict[str, ast.expr]:
    """Argument -> the expression of its default."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    found = {a.arg: d for a, d in zip(reversed(positional), reversed(spec.defaults))}
    found |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults) if d is not None}
    return found


def tensor_uses(file: SourceFile, function: Function) -> set[str]:
    """Names used as only tensors are: multiplied with @, saved for backward, asked for their dtype or transpose."""
    known = file.memo.setdefault("tensor_uses", {})
    if function not in known:
        known[function] = _find_tensor_uses(function)
    uses: set[str] = known[function]
    return uses


def _find_tensor_uses(function: Function) -> set[str]:
    used: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in names.SHOWS_TENSOR:
            used.add(node.value.id)
        elif isinstance(node, ast.Subscript) and _adds_a_dimension(node.slice):
            used |= {node.value.id} if isinstance(node.value, ast.Name) and _TIMES.search(node.value.id) else set()
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            used |= {side.id for side in (node.left, node.right) if isinstance(side, ast.Name)}
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            if called == "save_for_backward" or called in names.LIKE or (called in names.LOWER and called != "multi_dot"):
                used |= {a.id for a in node.args if isinstance(a, ast.Name)}
    return used


def _saved_in_full(function: Function) -> set[str]:
    """Names in `ctx.save_for_backward(..., *names)`, which takes tensors only."""
    saving = [n for n in ast.walk(function) if isinstance(n, ast.Call) and last_name(n.func) == "save_for_backward"]
    return {a.value.id for call in saving for a in call.args if isinstance(a, ast.Starred) and isinstance(a.value, ast.Name)}


def _adds_a_dimension(index: ast.expr) -> bool:
    """`x[:, None]`."""
    return isinstance(index, ast.Tuple) and any(isinstance(e, ast.Constant) and e.value is None for e in index.elts)


def extra(function: Function, scenario: Scenario | None = None) -> dict[str, Any]:
    """*args and **kwargs may be anything; as two tensors where the function saves them for backward."""
    values: dict[str, Any] = {}
    if function.args.vararg:
        name = function.args.vararg.arg
        if scenario is not None and name in _saved_in_full(function):
            role = (scenario.weights, Made.PARAMETER) if _WEIGHTS.search(name) else (scenario.inputs, Made.INPUT)
            values[name] = Items(known=[Tensor(*role, f"one of the arguments {name}")] * 2)
        else:
            values[name] = Items(each=UNKNOWN)
    if function.args.kwarg:
        values[function.args.kwarg.arg] = Mapping(open=True)
    return values
