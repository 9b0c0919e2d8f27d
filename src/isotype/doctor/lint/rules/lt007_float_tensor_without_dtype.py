from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.arguments import ACTIVATION, WEIGHT
from ..dataflow.plain import PURE, plain_events, refused_in_bf16
from ..dataflow.torch_names import SPECTRA
from ..dataflow.values import Made, Tensor
from ..rule import Edit, FixSafety, Hit, Rule
from ..source import Function, SourceFile, keyword, last_name
from .evidence import details, of_a_model, signature_is_its_own

_LIKE_ACTIVATION = re.compile(r"out|inp|hidden|state|feat|tok|embed|logit|score|quer|key|val|attn|seq|^mat$|^data$")
FACTORIES = frozenset({"zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye"})


class FloatTensorWithoutDtype(Rule):
    """a mask or constant made without `dtype=` meets activations of the model's dtype

    Why
    ---
    `torch.full`, `zeros`, `ones`, `randn` and `linspace` without `dtype=` take the default dtype, fp32, whatever the model has. Added to
    bf16 attention scores such a mask makes them fp32, and the next product with a bf16 tensor raises; where nothing raises, the rest of
    the layer silently runs in fp32.

    Example
    -------
    ```python
    def build_mask(n, device, dtype):
        return torch.triu(torch.full((n, n), float("-inf"), device=device), diagonal=1)
    ```

    Use instead
    -----------
    ```python
        return torch.triu(torch.full((n, n), float("-inf"), device=device, dtype=dtype), diagonal=1)
    ```

    Fix safety
    ----------
    Unsafe: `dtype=dtype` is added where the function has a parameter of that name and never reads it.

    Known problems
    --------------
    Reported in two cases only: the function takes a `dtype` that it never uses, or the tensor can be followed to a product, attention or
    indexed write that refuses it for bf16 inputs, in a module or beside an argument named like an activation. A constant that merely
    promotes is not reported, nor is one that a cast written out makes fp32.
    """

    code = "LT007"
    name = "float-tensor-without-dtype"
    on = False
    by_name = True
    first_look = (33, 70)
    in_tests = False
    fix_safety = FixSafety.UNSAFE

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        seen: set[ast.AST] = set()
        for function in file.functions():
            for call in ignoring_its_dtype(file, function):
                seen.add(call)
                yield Hit(
                    node=call,
                    message=f"torch.{last_name(call.func)} without dtype=, in a function that takes a dtype and makes nothing of it",
                    cause="a factory without dtype= takes the default dtype, fp32: mixed with bf16 activations it promotes, or is refused",
                    fix=f"torch.{last_name(call.func)}(..., dtype=dtype)",
                    edit=Edit.at("keyword", call, "dtype=dtype"),
                    scenario=PURE,
                )
        for event in plain_events(file):
            if event.kind not in ("matmul", "attention", "scatter") or event.scenario != PURE:
                continue
            for label, value in event.operands:
                made = value.node
                if value.made is not Made.DEFAULT or not isinstance(made, ast.Call) or made in seen or made not in file.parents:
                    continue
                if last_name(made.func) not in FACTORIES:
                    continue
                other = next(v for other_label, v in event.operands if v is not value)
                if not of_a_model(file, event.node) or _kept_apart(file, event.node, other):
                    continue
                seen.add(made)
                yield Hit(
                    node=made,
                    message=f"torch.{last_name(made.func)} without dtype= is fp32, and meets {other.dtype} in `{event.operation}` "
                    f"(line {event.node.lineno})",
                    cause=f"a factory without dtype= takes the default dtype, fp32; with {event.scenario} it makes {label} fp32 while the "
                    f"other operand is {other}, which {event.operation} refuses",
                    fix=f"torch.{last_name(made.func)}(..., dtype=...) with the dtype of the tensor that it meets",
                    details=details(event),
                    scenario=PURE,
                    weak=_unlikely(file, event.node, other),
                )


def _kept_apart(file: SourceFile, node: ast.AST, other: Tensor) -> bool:
    """Whether what the constant meets is an argument of a function that names none as activations or weights are: cameras, boxes, audio."""
    function = file.function_of(node)
    if function is None or not other.why.startswith("the argument "):
        return False
    names = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    return not any(ACTIVATION.match(name) or WEIGHT.match(name) or _LIKE_ACTIVATION.search(name) for name in names)


def _unlikely(file: SourceFile, node: ast.AST, other: Tensor) -> str:
    """Why what the constant meets is hardly ever bf16."""
    if other.why.startswith("the buffer "):
        return "a buffer, made in fp32 like the constant, meets it: bf16 only where the whole module is cast"
    function = file.function_of(node)
    if function is not None and any(isinstance(n, ast.Call) and last_name(n.func) in SPECTRA for n in file.own(function)):
        return "a Fourier transform beside it takes no bf16, and gives what is fp32 or complex"
    refusing = refused_in_bf16(file)
    if refusing:
        return f"{refusing} beside it takes the Fourier transform of its inputs, which torch has not for bf16"
    if function is None or other.made is not Made.PARAMETER or not other.why.startswith("the argument "):
        return ""
    names = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    if any(ACTIVATION.match(name) or _LIKE_ACTIVATION.search(name) for name in names):
        return ""
    return "weights are worked on ahead of a run, mostly in fp32"


def ignoring_its_dtype(file: SourceFile, function: Function) -> Iterator[ast.Call]:
    """Float factories without dtype= in a function that has a parameter `dtype` and never reads it."""
    parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    if "dtype" not in parameters or not signature_is_its_own(file, function):
        return
    nodes = list(ast.walk(function))
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == "dtype"]
    if any(last_name(file.parents[n]) != "finfo" for n in uses):  # asking for its smallest value is no use of it as a dtype
        return
    for node in nodes:
        if not isinstance(node, ast.Call) or file.dotted(node.func).rpartition(".")[0] != "torch" or last_name(node.func) not in FACTORIES:
            continue
        if _holds_positions(file, node):
            continue  # better in fp32
        if keyword(node, "dtype", "out") is None and not any(k.arg is None for k in node.keywords) and _floating(node):
            yield node


def _holds_positions(file: SourceFile, node: ast.Call) -> bool:
    """Whether the name it is bound to speaks of ids, positions or angles."""
    target = file.parents.get(node)
    while target is not None and not isinstance(target, ast.stmt):
        target = file.parents.get(target)
    return isinstance(target, ast.Assign) and bool(re.search(r"ids?$|idx|pos|freq|theta|angle|time", last_name(target.targets[0])))


def _floating(node: ast.Call) -> bool:
    """Whether the tensor is floating, and has dimensions: without any it promotes nothing; full() of an integer or a boolean is not."""
    if node.args and isinstance(node.args[0], (ast.Tuple, ast.List)) and not node.args[0].elts:
        return False
    if last_name(node.func) != "full":
        return True
    fill = node.args[1] if len(node.args) > 1 else keyword(node, "fill_value")
    return not (isinstance(fill, ast.Constant) and isinstance(fill.value, (bool, int)))
