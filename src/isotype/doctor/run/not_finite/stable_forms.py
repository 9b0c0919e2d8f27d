"""Finds expressions of which PyTorch has a stable function, such as F.logsigmoid(x) for
torch.log(torch.sigmoid(x)).

`sigmoid(x)` is 0 for x = -200, and its logarithm -inf. A bound for the logarithm makes the loss finite,
but gives those values a gradient of 0: they are not trained. The stable function gives the right
loss and gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....observe.operators import EXACT, Operator
from ....observe.origin import read_statement, short_path
from .lost_numbers import operator_name
from .positions import Position, read_part
from .shadows import TensorTable

_FUNCTIONS = {
    "sigmoid": "sigmoid",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "exp": "exp",
}
# an operator, what it gets, and the stable function of both, with the input of the inner function
_STABLE_FUNCTIONS = {
    ("log", "sigmoid"): "F.logsigmoid({x})",
    ("log", "1 - sigmoid"): "F.logsigmoid(-{x})",
    ("log1p", "-sigmoid"): "F.logsigmoid(-{x})",
    ("log", "softmax"): "F.log_softmax({x}, dim={dim})",
    ("log", "exp"): "{x}",
    ("log", "1 - exp"): "torch.log(-torch.expm1({x}.clamp(max=-{small})))",
    ("log1p", "-exp"): "torch.log(-torch.expm1({x}.clamp(max=-{small})))",
    ("log", "1 + exp"): "F.softplus({x})",
    ("log1p", "exp"): "F.softplus({x})",
    ("log", "sum exp"): "torch.logsumexp({x}, dim={dim}, keepdim={keepdim})",
    ("div", "exp / sum exp"): "torch.softmax({x}, dim={dim})",
    ("reciprocal", "1 + exp"): "torch.sigmoid(-{x})",
}
_NAMESPACES = frozenset(("torch", "F", "nn", "self", "functional"))


@dataclass(frozen=True, slots=True)
class Term:
    """What a tensor is, such as "1 - sigmoid" of the input of a call of sigmoid.

    kind       the computation, in the form of `_STABLE_FUNCTIONS`
    ordinal    the number of the operator that computed the inner function
    position   the line of the inner function
    dim        the dimension of a softmax or of a sum of exponentials
    is_moved   whether values were selected or moved after the inner function
    """

    kind: str
    ordinal: int
    position: Position | None
    dim: int | None = None
    keepdim: bool = False
    is_moved: bool = False

    def change(self, kind: str) -> Term:
        return Term(
            kind, self.ordinal, self.position, self.dim, self.keepdim, is_moved=self.is_moved
        )


@dataclass(frozen=True, slots=True)
class StableForm:
    """A stable function for an operator and what it gets.

    position  the line of the operator, such as the logarithm
    """

    function: str
    term: Term
    position: Position | None
    is_logarithm: bool


class StableForms:
    """Follows sigmoids, softmaxes and exponentials to the operators with which they have a stable
    function.
    """

    def __init__(self) -> None:
        self._terms: TensorTable[Term] = TensorTable()
        # the number of the operator of the inner or of the outer function -> the form
        self._forms: dict[int, StableForm] = {}

    def get(self, ordinal: int) -> StableForm | None:
        """Returns the form in which an operator is the inner or the outer function."""
        return self._forms.get(ordinal)

    def follow(
        self,
        op: Operator,
        args: tuple,
        result: Any,
        ordinal: int,
        find_position: Callable[[], Position | None],
    ) -> None:
        """Must be called after each operator of forward.

        ordinal  the number of the operator
        """
        if not args or not isinstance(result, Tensor):
            return
        operand = args[0]
        name = operator_name(op)
        if name in _FUNCTIONS and isinstance(operand, Tensor):
            if bool(operand.isfinite().all()):
                dim = _count_from_end(args[1], operand) if name.endswith("softmax") else None
                kind = _FUNCTIONS[name]
                self._terms[result] = Term(kind, ordinal, find_position(), dim)
            return
        term = self._terms.get(operand) if isinstance(operand, Tensor) else None
        if term is None:
            return
        kind = term.kind
        if name == "div" and isinstance(args[1], Tensor):
            divisor = self._terms.get(args[1])
            if divisor is None or divisor.ordinal != term.ordinal:
                return
            kind = f"{term.kind} / {divisor.kind}"
            term = divisor
        function = _STABLE_FUNCTIONS.get((name, kind))
        if function is not None:
            form = StableForm(function, term, find_position(), name.startswith("log"))
            self._forms[ordinal] = form
            self._forms.setdefault(term.ordinal, form)
            return
        changed = _change_term(op, name, args, term)
        if changed is not None:
            self._terms[result] = changed


def _change_term(op: Operator, name: str, args: tuple, term: Term) -> Term | None:
    """Returns what the result of an operator is, if one of its inputs is a term."""
    is_one = len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 1
    if name == "neg":
        return term.change(f"-{term.kind}")
    if name == "rsub" and is_one:
        return term.change(f"1 - {term.kind}")
    if name == "add" and is_one and term.kind.startswith("-"):
        return term.change(f"1 - {term.kind[1:]}")
    if name == "add" and is_one:
        return term.change(f"1 + {term.kind}")
    if name == "mul" and is_one:
        return term  # of a reciprocal
    if name == "sum" and term.kind == "exp" and len(args) > 1 and len(args[1] or ()) == 1:
        dim = _count_from_end(args[1][0], args[0])
        keepdim = len(args) > 2 and bool(args[2])
        return Term("sum exp", term.ordinal, term.position, dim, keepdim, term.is_moved)
    if op.base_name in ("detach", "clone", "alias", "_to_copy"):
        return term
    if op.kind == EXACT:
        return Term(term.kind, term.ordinal, term.position, term.dim, term.keepdim, is_moved=True)
    return None


def _count_from_end(dim: int, tensor: Tensor) -> int:
    """Returns the last dimension as -1, as most programs write it, and others as they are."""
    return -1 if dim == tensor.dim() - 1 else int(dim)


def describe_form(form: StableForm | None, small: str) -> str:
    """Returns the change of the program to the stable function, or "".

    small  a small number for the dtype, as code
    """
    if form is None or form.position is None or form.term.position is None:
        return ""
    inner, outer = read_part(form.term.position), read_part(form.position)
    argument = None if inner is None else _read_argument(inner.node)
    if inner is None or outer is None or argument is None:
        return ""
    function = form.function
    operand = argument
    if "-{x}" in function and isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub):
        function = function.replace("-{x}", "{x}")  # twice the minus of 1 / (1 + exp(-x))
        operand = operand.operand
    text = ast.unparse(operand)
    is_primary = isinstance(operand, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
    if not is_primary and ("-{x}" in function or "{x}." in function):
        text = f"({text})"
    term = form.term
    function = function.format(x=text, dim=term.dim, keepdim=term.keepdim, small=small)
    if not form.term.is_moved and _has_argument(form, argument):
        return f"{function} in place of `{outer.text}`{_describe_place(form.position)}"
    if not form.is_logarithm:
        return ""
    place = _describe_place(form.term.position)
    return f"{function} in place of the logarithm of `{inner.text}`{place}"


def _read_argument(node: ast.expr) -> ast.expr | None:
    """Returns the input of a call such as `torch.exp(x)`, `x.softmax(-1)` or `self.softmax(x)`."""
    match node:
        case ast.Call(ast.Attribute(owner, "exp" | "sigmoid" | "softmax"), arguments):
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            is_namespace = isinstance(root, ast.Name) and root.id in _NAMESPACES
            if not is_namespace or not arguments:
                return owner
            return arguments[0]
        case ast.Call(_, [argument, *_]):
            return argument
    return None


def _has_argument(form: StableForm, argument: ast.expr) -> bool:
    """Whether the line of the outer function can name the input of the inner one: both are in one
    function, and the line of the inner one neither computes its input nor overwrites it.
    """
    assert form.position is not None
    assert form.term.position is not None
    inner, outer = form.term.position.site, form.position.site
    if inner.code is not outer.code:
        return False
    if inner.line == outer.line:
        return True
    if any(isinstance(node, ast.Call) for node in ast.walk(argument)):
        return False  # it would be computed a second time
    names = {node.id for node in ast.walk(argument) if isinstance(node, ast.Name)}
    try:
        statement = ast.parse(read_statement(inner).strip())
    except SyntaxError:
        return False
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return not any(isinstance(node.ctx, ast.Store) and node.id in names for node in nodes)


def _describe_place(position: Position) -> str:
    return f" ({short_path(position.site.file)}:{position.site.line})"
