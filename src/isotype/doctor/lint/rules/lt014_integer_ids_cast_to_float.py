from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ....finding import Severity
from ..rule import Hit, Rule
from ..source import SourceFile, keyword, last_name

IDS = re.compile(r"(^|_)(input_ids|token_ids|decoder_input_ids|generated_ids|prompt_ids)$")
BATCH = re.compile(r"(^|_)(batch|inputs?|encodings?|encoded|features|tokens|tokenized|model_inputs|enc)$")
LOW = frozenset({"torch.bfloat16", "torch.float16", "torch.half"})


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

    Fix safety
    ----------
    There is no automatic fix.

    Known problems
    --------------
    A tensor counts as ids by its name, a dictionary as a batch by its name or because a tokenizer made it.
    """

    code = "LT014"
    name = "integer-ids-cast-to-float"
    severity = Severity.ERROR
    words = ("bfloat16", "float16", "half(")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        encoded = _made_by_tokenizer(file)
        for call in file.nodes(ast.Call):
            if not _casts_low(file, call):
                continue
            assert isinstance(call.func, ast.Attribute)
            receiver = call.func.value
            name = _key(receiver)
            if IDS.search(name):
                yield _hit(file, call, name, "holds token ids, which are integers")
            elif (batch := _each_of(file, call, receiver, encoded)) is not None:
                yield _hit(file, call, batch, "has the integer input_ids among its values, and the loop casts each of them")
            elif isinstance(receiver, ast.Name) and _every_value(file, call, receiver.id, encoded):
                yield _hit(file, call, receiver.id, "goes through every value of the batch, the integer input_ids among them")


def _hit(file: SourceFile, call: ast.Call, name: str, why: str) -> Hit:
    return Hit(
        node=call,
        message=f"`{file.snippet(call)}` casts integer ids to a floating dtype",
        cause=f"`{name}` {why}; bf16 counts exactly to 256 only, and an embedding refuses floating indices",
        fix="cast only what is floating: `v.to(dtype) if v.is_floating_point() else v`",
    )


def _casts_low(file: SourceFile, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in ("half", "bfloat16") and not call.args:
        return True
    if call.func.attr not in ("to", "type"):
        return False
    given = [a for a in (*call.args, keyword(call, "dtype")) if a is not None]
    return any(file.dotted(a) in LOW or (isinstance(a, ast.Name) and a.id in _names_for_low(file, call)) for a in given)


def _names_for_low(file: SourceFile, call: ast.Call) -> set[str]:
    """Names that stand for a low precision: assigned once in this function or the module, or an argument's default."""
    function = file.function_of(call)
    found: set[str] = set()
    spec = function.args if function is not None else None
    if spec is not None:
        positional = [*spec.posonlyargs, *spec.args]
        defaults = [*zip(reversed(positional), reversed(spec.defaults)), *zip(spec.kwonlyargs, spec.kw_defaults)]
        found |= {a.arg for a, default in defaults if default is not None and file.dotted(default) in LOW}
    for scope in (file.tree, function):
        for node in file.own(scope) if scope is not None else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and file.dotted(node.value) in LOW:
                found.add(node.targets[0].id)
    return found


def _key(node: ast.expr) -> str:
    """`batch["input_ids"]` and `batch.input_ids` and `input_ids` -> input_ids."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return last_name(node)


def _made_by_tokenizer(file: SourceFile) -> set[str]:
    found: set[str] = set()
    for node in file.nodes(ast.Assign):
        if isinstance(node.value, ast.Call) and re.search(r"^tok$|tokenizer|apply_chat_template", last_name(node.value.func)):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def _every_value(file: SourceFile, call: ast.Call, name: str, encoded: set[str]) -> bool:
    """Whether `name` runs over all values of a batch, and nothing asks whether it is floating."""
    child: ast.AST = call
    parent = file.parents.get(child)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.Module)):
        if isinstance(parent, (ast.IfExp, ast.If)):
            return False
        generators = getattr(parent, "generators", [])
        if isinstance(parent, ast.For):
            generators = [parent]
        for generator in generators:
            if _is_value_of(generator.target, name) and not getattr(generator, "ifs", []):
                return _is_batch(generator.iter, encoded)
        child, parent = parent, file.parents.get(parent)
    return False


def _each_of(file: SourceFile, call: ast.Call, receiver: ast.expr, encoded: set[str]) -> str | None:
    """The batch, when `for key in batch:` casts `batch[key]` whatever the key is."""
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
                return receiver.value.id if receiver.value.id in encoded or BATCH.search(receiver.value.id) else None
        parent = file.parents.get(parent)
    return None


def _is_value_of(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Tuple) and len(target.elts) == 2 and last_name(target.elts[1]) == name


def _is_batch(source: ast.expr, encoded: set[str]) -> bool:
    if not (isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "items"):
        return False
    name = last_name(source.func.value)
    return name in encoded or bool(BATCH.search(name)) or "tokenizer" in name
