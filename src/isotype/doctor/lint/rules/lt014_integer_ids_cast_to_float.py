from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Severity
from ..dataflow.modules import module_functions
from ..rule import Hit, Rule
from ..source import SourceFile, bindings, last_name
from .low_dtypes import casts_low, is_low

IDS = re.compile(r"(^|_)(input_ids|token_ids|decoder_input_ids|generated_ids|prompt_ids)$")
BATCH = re.compile(r"(^|_)(batch|inputs?|encodings?|encoded|features|tokens|tokenized|model_inputs|enc)$")
_ENCODES = re.compile(r"tok(enizer)?\.(encode|apply_chat_template)$")  # return ids unless asked for a dict
_CASTS = frozenset({"to", "type", "half", "bfloat16"})
_SAME_VALUES = frozenset({"to", "cuda", "cpu", "clone", "detach", "contiguous", "view", "reshape", "unsqueeze", "squeeze", "flatten"})


class IntegerIdsCastToFloat(Rule):
    """token ids are cast to a floating dtype

    Why
    ---
    An embedding wants integers: it raises for bf16 ids. Where it does not come to that, bf16 has already rounded every id above 256, and
    fp16 every one above 2048, to another word. Casting all of a tokenizer's outputs is a remedy that circulates for dtype mismatches.

    Example
    -------
    ```python
    batch = {k: v.to(torch.bfloat16) for k, v in batch.items()}
    ```

    Use instead
    -----------
    ```python
    batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
    ```

    Known problems
    --------------
    A tensor counts as ids by its name or that of what it was assigned from, a dictionary as a batch by its name or because a tokenizer
    made it. Names such as `weight_dtype` are taken to be the model's dtype, which no ids have.
    """

    code = "LT014"
    name = "integer-ids-cast-to-float"
    severity = Severity.ERROR
    words = ("bfloat16", "float16", "half", "dtype")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        encoded = _made_by_tokenizer(file)
        for call in file.nodes(ast.Call):
            value = _cast_value(file, call)
            if value is None:
                continue
            name = _holds_ids(file, value)
            if name:
                yield _hit(file, call, name, "holds token ids, which are integers")
            elif (batch := _each_of(file, call, _plain(value), encoded)) is not None:
                yield _hit(file, call, batch, "has the integer input_ids among its values, and the loop casts each of them")
            elif (each := _element(_plain(value))) is not None and _every_value(file, call, each, encoded):
                yield _hit(file, call, each.id, "goes through every value of the batch, the integer input_ids among them")


def _hit(file: SourceFile, call: ast.Call, name: str, why: str) -> Hit:
    return Hit(
        node=call,
        message=f"`{file.snippet(call)}` casts integer ids to a floating dtype",
        cause=f"`{name}` {why}; bf16 counts exactly to 256 only, and an embedding refuses floating indices",
        fix="cast only what is floating: `v.to(dtype) if v.is_floating_point() else v`",
    )


def _cast_value(file: SourceFile, call: ast.Call) -> ast.expr | None:
    """What this call casts to low precision: `x` of `x.to(device, torch.bfloat16)`, or of `move(x, torch.bfloat16)` with a function of
    this file that casts its argument whatever it is."""
    if casts_low(file, call):
        assert isinstance(call.func, ast.Attribute)
        return call.func.value
    function = module_functions(file).get(call.func.id) if isinstance(call.func, ast.Name) else None
    casts = _casts_of_arguments(file, function) if function is not None else []
    if function is None or not casts:
        return None
    given = dict(zip((a.arg for a in (*function.args.posonlyargs, *function.args.args)), call.args))
    given |= {k.arg: k.value for k in call.keywords if k.arg}
    low = frozenset(name for name, value in given.items() if is_low(file, value))
    return next((given[name] for name, inner in casts if name in given and casts_low(file, inner, low)), None)


def _casts_of_arguments(file: SourceFile, function: ast.FunctionDef) -> list[tuple[str, ast.Call]]:
    """Names of arguments and casts of them, in a function that asks nothing of what it casts."""
    known = file.memo.setdefault("casts_of_arguments", {})
    if function not in known:
        own = file.own(function)
        asks = any(isinstance(n, (ast.If, ast.IfExp)) or last_name(n) == "is_floating_point" for n in own)
        known[function] = [] if asks else [(name, n) for n in own if isinstance(n, ast.Call) and (name := _cast_name(n)) is not None]
    casts: list[tuple[str, ast.Call]] = known[function]
    return casts


def _cast_name(call: ast.Call) -> str | None:
    """NAME in `NAME.float()` and other casts; None for any other call."""
    called = call.func
    if isinstance(called, ast.Attribute) and called.attr in _CASTS and isinstance(called.value, ast.Name):
        return called.value.id
    return None


def _plain(node: ast.expr) -> ast.expr:
    """Without what moves or reshapes it: `ids.to(device).view(-1)` -> ids."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_VALUES:
        node = node.func.value
    return node


def _key(node: ast.expr) -> str:
    """`batch["input_ids"]` and `batch.input_ids` and `input_ids` -> input_ids."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return last_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _holds_ids(file: SourceFile, node: ast.expr) -> str:
    """The name by which this is known to be token ids: its own, or that of what it was last assigned from before this line."""
    node = _plain(node)
    if isinstance(node, ast.Call) and _ENCODES.search(ast.unparse(node.func)):
        return file.snippet(node, 40)
    name = _key(node)
    if IDS.search(name) or not isinstance(node, ast.Name):
        return name if IDS.search(name) else ""
    scope = file.function_of(node) or file.tree
    source: ast.expr | None = None
    for statement in file.own(scope):
        for target, value in bindings(statement):
            if isinstance(target, ast.Name) and target.id == name and value.lineno < node.lineno and last_name(_plain(value)) != name:
                source = value
    source = _plain(source) if source is not None else None
    if source is not None and (IDS.search(_key(source)) or (isinstance(source, ast.Call) and _ENCODES.search(ast.unparse(source.func)))):
        return name
    return ""


def _made_by_tokenizer(file: SourceFile) -> set[str]:
    found: set[str] = set()
    for node in file.nodes(ast.Assign):
        if isinstance(node.value, ast.Call) and re.search(r"^tok$|tokenizer|apply_chat_template", last_name(node.value.func)):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def _element(node: ast.expr) -> ast.Name | None:
    """A name, or the value half of one that stands for a pair: `kv[1]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 1:
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _every_value(file: SourceFile, call: ast.Call, name: ast.Name, encoded: set[str]) -> bool:
    """Whether `name` runs over all values of a batch, and nothing asks whether it is floating."""
    child: ast.AST = call
    parent = file.parents.get(child)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.Module)):
        if isinstance(parent, (ast.IfExp, ast.If)) and not _asks_for_a_tensor(parent.test):
            return False
        if isinstance(parent, ast.Lambda):
            return [a.arg for a in parent.args.args] == [name.id] and _maps_a_batch(file, parent, encoded)
        generators = getattr(parent, "generators", [])
        if isinstance(parent, ast.For):
            generators = [parent]
        for generator in generators:
            if _is_value_of(generator.target, generator.iter, name.id) and all(map(_asks_for_a_tensor, getattr(generator, "ifs", []))):
                return _is_batch(generator.iter, encoded)
        child, parent = parent, file.parents.get(parent)
    return False


def _asks_for_a_tensor(test: ast.expr) -> bool:
    """`torch.is_tensor(v)`, `isinstance(v, torch.Tensor)`, `hasattr(v, "to")`: true of ids as well."""
    if not isinstance(test, ast.Call):
        return False
    called = last_name(test.func)
    return called in ("is_tensor", "hasattr") or (called == "isinstance" and last_name(test.args[-1]) == "Tensor")


def _maps_a_batch(file: SourceFile, function: ast.Lambda, encoded: set[str]) -> bool:
    """`map(function, batch.items())` and `tree_map(function, batch)`."""
    call = file.parents.get(function)
    if not isinstance(call, ast.Call) or len(call.args) < 2 or call.args[0] is not function:
        return False
    called = last_name(call.func)
    return (called == "map" and _is_batch(call.args[1], encoded)) or (called == "tree_map" and _names_batch(call.args[1], encoded))


def _each_of(file: SourceFile, call: ast.Call, receiver: ast.expr, encoded: set[str]) -> str | None:
    """The batch, when `for key in batch:` casts `batch[key]` for every key."""
    if not isinstance(receiver, ast.Subscript) or not isinstance(receiver.slice, ast.Name) or not isinstance(receiver.value, ast.Name):
        return None
    parent = file.parents.get(call)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.Module, ast.If, ast.IfExp)):
        generators = getattr(parent, "generators", [])
        for loop in [parent] if isinstance(parent, ast.For) else generators:
            source = loop.iter
            if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "keys":
                source = source.func.value
            if last_name(loop.target) == receiver.slice.id and not getattr(loop, "ifs", []) and last_name(source) == receiver.value.id:
                return receiver.value.id if _names_batch(receiver.value, encoded) else None
        parent = file.parents.get(parent)
    return None


def _is_value_of(target: ast.expr, source: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Name):  # over the values alone, or over pairs of which the cast takes the second half
        return target.id == name
    return isinstance(target, ast.Tuple) and len(target.elts) == 2 and last_name(target.elts[1]) == name and last_name(source) == "items"


def _is_batch(source: ast.expr, encoded: set[str]) -> bool:
    """`batch.items()` and `batch.values()`."""
    if not (isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr in ("items", "values")):
        return False
    return _names_batch(source.func.value, encoded)


def _names_batch(node: ast.expr, encoded: set[str]) -> bool:
    name = last_name(node)
    return name in encoded or bool(BATCH.search(name)) or "tokenizer" in name
