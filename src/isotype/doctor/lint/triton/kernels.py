"""Runs a Triton kernel's source on dtypes, as its front end would, for pointers whose element type is not known.

A value loaded from a pointer has that pointer's element type until it is cast; `elem(x_ptr)` stands for it. Events tell what Triton
refuses, or computes imprecisely, once that type is bf16.

Long because it is one interpreter: statements, expressions and calls evaluate each other.
"""

# ruff: noqa: SIM905 - the tables are read and edited as words
from __future__ import annotations

import ast
import re

from ..source import SourceFile, keyword, last_name
from .kernel import NOTHING, Kernel, KernelEvent, Kind, Value, describe, is_jit

FLOATS = ("fp64", "fp32", "bf16", "fp16")
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
_INTEGERS = re.compile(r"^u?int\d+$")
_NUMBER = re.compile(r"scale|scaling|coef|momentum|alpha|beta$|eps|softcap|temperature|dropout|smoothing|^p$|^lr$|decay")
_MATH = frozenset("exp exp2 log log2 sqrt_rn sin cos rsqrt erf sqrt tanh fast_expf fast_dividef pow".split())
_SAME = frozenset(
    "abs max min maximum minimum where broadcast_to reshape view trans permute expand_dims ravel join clamp sigmoid cumsum sum softmax "
    "flip sort fdiv".split()
)


def kernels(file: SourceFile) -> list[Kernel]:
    if "kernels" not in file.memo:
        found = [describe(node) for node in file.nodes(ast.FunctionDef) if any(is_jit(file, d) for d in node.decorator_list)]
        file.memo["jit_functions"] = {kernel.node.name: kernel for kernel in found}
        told: set[tuple[str, int, str]] = set()  # what several kernels call is reported once
        for kernel in found:
            _Run(file, kernel, told).block(kernel.node.body)
        file.memo["kernels"] = found
    kernels: list[Kernel] = file.memo["kernels"]
    return kernels


class _Run:
    """Runs one kernel, and the device functions that it calls, on dtypes."""

    def __init__(self, file: SourceFile, kernel: Kernel, told: set[tuple[str, int, str]], depth: int = 0) -> None:
        self.file, self.kernel, self.depth = file, kernel, depth
        self.compile_time = set(kernel.constexprs)
        self.values: dict[str, Value] = {}
        self.loop_depth = 0
        self.innermost: ast.stmt | None = None  # the loop being run
        self.done = told
        self.returned: list[Value] = []
        self.stored: set[str] = set()  # pointers that were written to, and of those the ones that were read again
        self.reread: set[str] = set()
        self.uncast: list[ast.If] = []  # compile-time branches being run whose other side casts to fp32

    def emit(self, kind: Kind, node: ast.expr | ast.stmt, name: str, before: Value, after: Value, test: ast.expr | None = None) -> None:
        if (kind, node.lineno, name) not in self.done:
            self.done.add((kind, node.lineno, name))
            flags = frozenset(n.id for branch in self.uncast for n in ast.walk(branch.test) if isinstance(n, ast.Name))
            self.kernel.events.append(KernelEvent(kind, node, name, before, after, test, flags))

    # -- statements ------------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            self.note_assigned_sum(node)
            for target in node.targets:
                self.assign(target, value, node)
        elif isinstance(node, ast.AnnAssign):
            if node.value is None:
                return
            self.assign(node.target, self.value(node.value), node)
            if isinstance(node.target, ast.Name) and "constexpr" in ast.unparse(node.annotation):
                self.compile_time.add(node.target.id)
        elif isinstance(node, ast.AugAssign):
            left, right = self.value(node.target), self.value(node.value)
            result = self.promote(node, left, right)
            if self.loop_depth and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
                self.note_sum(node, node.target.id, left, right)
            self.assign(node.target, result, node)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, (ast.For, ast.While)):
            self.loop(node)
        elif isinstance(node, (ast.Expr, ast.Return)):
            value = self.value(node.value) if node.value is not None else NOTHING
            if isinstance(node, ast.Return):
                self.returned.append(value)
        elif isinstance(node, ast.With):
            self.block(node.body)

    def assign(self, target: ast.expr, value: Value, node: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            if value.type is None and value.pointer is None and isinstance(node, ast.Assign) and self.is_compile_time(node.value):
                self.compile_time.add(target.id)
            elif not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
                self.compile_time.discard(target.id)
            # a float written out becomes an fp32 scalar once it has a name, which promotes; an integer stays one
            named = value.number and not (value.type == "fp32" and isinstance(node, ast.Assign))
            self.values[target.id] = Value(value.type, value.node or node, named, value.pointer)
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = node.value.elts if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Tuple, ast.List)) else []
            for position, element in enumerate(target.elts):
                self.assign(element, self.value(items[position]) if position < len(items) else NOTHING, ast.Pass())

    def branch(self, node: ast.If) -> None:
        compile_time = self.is_compile_time(node.test)
        before = dict(self.values)
        test = node.test
        self.value(test)
        self.side(node, node.body, node.orelse if compile_time else [])
        then = self.values
        self.values = dict(before)
        self.side(node, node.orelse, node.body if compile_time else [])
        other = self.values
        joined: dict[str, Value] = {}
        for name in then.keys() | other.keys():
            left, right = then.get(name), other.get(name)
            if left is None or right is None:
                if compile_time:  # a value that only one side of a run-time branch defines does not exist after it
                    joined[name] = left or right or NOTHING
            elif left.type == right.type:
                joined[name] = left
            else:
                either = next((v for v in (left.type, right.type, left.perhaps, right.perhaps) if v and v.startswith("elem(")), None)
                joined[name] = Value(
                    None, pointer=left.pointer if left.pointer == right.pointer else None, perhaps=either if compile_time else None
                )
                if not compile_time and not _ends(node.body) and not _ends(node.orelse):
                    start = before.get(name)
                    changed, kept = (left, right) if start is None or right.type == start.type else (right, left)
                    if start is not None or node.orelse:
                        self.compare("branch", node, name, kept, changed, node.test)
        self.values = joined

    def side(self, node: ast.If, body: list[ast.stmt], other: list[ast.stmt]) -> None:
        """One side of a branch. other: the side taken instead, which may be there for other dtypes."""
        if any(isinstance(n, ast.Call) and last_name(n.func) == "to" and self.dtype_of(n.args[0] if n.args else None) == "fp32"
               for statement in other for n in ast.walk(statement)):  # fmt: skip
            self.uncast.append(node)
            self.block(body)
            self.uncast.pop()
        else:
            self.block(body)

    def loop(self, node: ast.For | ast.While) -> None:
        unrolled = isinstance(node, ast.For) and last_name(node.iter) == "static_range"
        if isinstance(node, ast.For):
            self.assign(node.target, Value("int", node, True), node)
        # a Python float that a loop carries becomes an fp32 scalar
        self.values = {k: Value(v.type, v.node) if v.number and v.type == "fp32" and not unrolled else v for k, v in self.values.items()}
        before = dict(self.values)
        long = not _is_short(node)
        self.loop_depth += long
        outer, self.innermost = self.innermost, node
        for _ in range(2):
            self.block(node.body)
            if not unrolled:
                for name, start in before.items():
                    self.compare("loop", node, name, start, self.values.get(name, NOTHING))
        self.loop_depth -= long
        self.innermost = outer
        for name, start in before.items():
            if self.values.get(name, start).type != start.type:
                self.values[name] = NOTHING
        if not unrolled:  # what a loop defines does not outlive it
            self.values = {name: value for name, value in self.values.items() if name in before}

    def compare(
        self, kind: Kind, node: ast.If | ast.For | ast.While, name: str, before: Value, after: Value, test: ast.expr | None = None
    ) -> None:
        """Records an event where a variable certainly changes its type in a place where Triton forbids that."""
        if before.type is None or after.type is None or before.type == after.type or after.node is None:
            return
        if before.pointer or after.pointer or "bool" in (before.type, after.type):
            return
        if before.loaded and after.loaded:
            return  # two pointers may well have one element type
        if before.type == "int" and (not before.number or after.type == "int"):
            return
        at = _last_assignment(node, name) or after.node
        self.emit(kind, at, name, before, after, test)

    # -- expressions -----------------------------------------------------------------------------------------------------

    def is_compile_time(self, node: ast.expr) -> bool:
        """Whether Triton decides this while compiling: constants, constexpr names, dtypes, `is None`."""
        if isinstance(node, ast.BoolOp):
            return all(map(self.is_compile_time, node.values))
        if isinstance(node, ast.UnaryOp):
            return self.is_compile_time(node.operand)
        if isinstance(node, ast.BinOp):
            return self.is_compile_time(node.left) and self.is_compile_time(node.right)
        if isinstance(node, ast.Compare):
            if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                return True
            return all(map(self.is_compile_time, [node.left, *node.comparators]))
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            known_at_run_time = node.id in self.values or node.id in self.kernel.parameters
            return node.id in self.compile_time or not known_at_run_time
        if isinstance(node, ast.Attribute):
            return node.attr in ("dtype", "element_ty", "type", "shape", "value", "numel") or self.is_compile_time(node.value)
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in ("load", "program_id", "num_programs", "atomic_add", "sum", "max", "min", "arange", "atomic_cas", "debug_barrier"):
                return False
            inner = [*node.args, *(k.value for k in node.keywords)]
            inner += [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return all(map(self.is_compile_time, inner))
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(map(self.is_compile_time, node.elts))
        if isinstance(node, ast.Subscript):
            return self.is_compile_time(node.value)
        return isinstance(node, (ast.JoinedStr, ast.Slice))

    def value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Constant):
            kind = (
                "bool"
                if isinstance(node.value, bool)
                else "int"
                if isinstance(node.value, int)
                else "literal"
                if isinstance(node.value, float)
                else None
            )
            return Value("fp32" if kind == "literal" else kind, node, True)
        if isinstance(node, ast.BinOp):
            return self.promote(node, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp):
            return self.value(node.operand)
        if isinstance(node, (ast.Compare, ast.BoolOp)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child)
            return Value("bool", node)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)
        if isinstance(node, ast.IfExp):
            left, right = self.value(node.body), self.value(node.orelse)
            return left if left.type == right.type else NOTHING
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Attribute) and node.attr == "T":
            return self.value(node.value)
        return NOTHING

    def name(self, node: ast.Name) -> Value:
        if node.id in self.values:
            return self.values[node.id]
        if node.id in self.compile_time:
            return Value(None, node, True)
        if node.id in self.kernel.parameters:
            if _NUMBER.search(node.id.lower()) and not node.id.lower().endswith(("ptr", "stride")):
                # a float handed in at run time is an fp32 scalar, which promotes; one written out is not
                return Value(None if node.id in self.kernel.addresses else "fp32", node)
            return Value(None, node, pointer=node.id)
        return NOTHING

    def promote(self, node: ast.AST, left: Value, right: Value) -> Value:
        at = node if isinstance(node, (ast.expr, ast.stmt)) else None
        for one, two in ((left, right), (right, left)):
            if one.pointer in self.kernel.parameters and one.node is not None and isinstance(one.node, ast.Name) and _is_float(two.type):
                # addresses are added to integers only: this parameter is a number
                return Value("fp32", at) if two.type == "fp32" else NOTHING
        if left.pointer or right.pointer:
            return Value(None, at, pointer=left.pointer or right.pointer)
        if left.type is None or right.type is None:
            known = left if right.type is None else right
            # fp32 with anything narrower stays fp32; everything else depends on what is not known
            return Value("fp32", at) if known.type == "fp32" and not known.number else NOTHING
        if left.type == right.type:
            return Value(left.type, at, left.number and right.number)
        for one, two in ((left, right), (right, left)):
            if two.number and not one.number:  # a Python number takes the block's type, unless it is a float beside integers
                return Value(one.type if one.type not in ("int", "bool") or two.type in ("int", "bool") else "fp32", at)
            if two.type in ("int", "bool"):
                return Value(one.type, at, left.number and right.number)
        if "fp32" in (left.type, right.type) and "fp64" not in (left.type, right.type):
            return Value("fp32", at)
        return NOTHING

    def call(self, node: ast.Call) -> Value:
        name = last_name(node.func)
        args = [self.value(a) for a in node.args]
        for item in node.keywords:
            self.value(item.value)
        method = isinstance(node.func, ast.Attribute) and not self.file.dotted(node.func).startswith(("triton", "tl."))
        if method and isinstance(node.func, ast.Attribute):
            args = [self.value(node.func.value), *args]
        first = args[0] if args else NOTHING
        called = self.file.memo["jit_functions"].get(name) if isinstance(node.func, ast.Name) else None
        if called is not None and self.depth < 3 and called.node is not self.kernel.node:
            return self.enter(called, node, args)
        if name == "store" and first.pointer:
            if first.pointer in self.reread:
                self.emit("reread", node, first.pointer, Value(f"elem({first.pointer})", node), NOTHING)
            self.stored.add(first.pointer)
            return NOTHING
        if name == "load" and first.pointer in self.stored:
            self.reread.add(first.pointer)
        if name == "load":
            return Value(f"elem({first.pointer})", node) if first.pointer else NOTHING
        if name == "atomic_add" and first.pointer and len(args) > 1 and args[1].type not in ("int", "bool"):
            self.emit("atomic", node, first.pointer, Value(f"elem({first.pointer})", node), args[1])
            return NOTHING
        if name == "make_block_ptr":
            return Value(None, node, pointer=first.pointer)
        if name in ("advance", "make_tensor_descriptor"):
            return Value(None, node, pointer=first.pointer)
        if name == "to" or name == "cast":
            return self.cast(node, first)
        if name in ("zeros", "full", "zeros_like"):
            return self.made(node, name, first)
        if name == "dot":
            return self.dot(node, args)
        if name in ("program_id", "num_programs", "arange", "cdiv", "argmax", "argmin"):
            return Value("int", node)
        if name in _MATH and (first.loaded or first.type in ("bf16", "fp16")):
            return Value("fp32", node)  # it does not compile for these
        if name in _MATH:
            return Value(first.type, node) if first.type == "fp32" else NOTHING
        if name in _SAME:
            return self.same(node, name, args)
        return NOTHING

    def enter(self, called: Kernel, node: ast.Call, args: list[Value]) -> Value:
        """A call of another function under @triton.jit: it is run with these arguments, its faults are this kernel's."""
        given = dict(zip(called.parameters, zip(node.args, args)))
        given |= {k.arg: (k.value, self.value(k.value)) for k in node.keywords if k.arg in called.parameters}
        inner = Kernel(called.node, called.constexprs, called.parameters, self.kernel.events, self.kernel.casts, self.kernel.floats)
        run = _Run(self.file, inner, self.done, self.depth + 1)
        run.compile_time |= {name for name, (source, _) in given.items() if self.is_compile_time(source)}
        run.values = {name: value for name, (_, value) in given.items() if name not in run.compile_time}
        run.loop_depth = self.loop_depth
        run.block(called.node.body)
        types = {value.type for value in run.returned}
        return Value(run.returned[0].type, node) if len(types) == 1 else NOTHING

    def same(self, node: ast.Call, name: str, args: list[Value]) -> Value:
        """Functions that keep or promote their arguments' type."""
        first = args[0] if args else NOTHING
        if name == "where":
            return self.promote(node, args[1], args[2]) if len(args) == 3 else NOTHING
        if name in ("maximum", "minimum", "fdiv"):
            return self.promote(node, args[0], args[1]) if len(args) >= 2 else NOTHING
        if name in ("max", "min") and (first.loaded or first.type in FLOATS):
            return Value("fp32", node)  # Triton reduces floats narrower than 32 bits in fp32
        if name in ("sum", "cumsum") and first.type in ("int", "bool"):
            return Value("int", node)
        if name in ("sum", "cumsum") and keyword(node, "dtype") is None:
            self.note_narrowed_sum(node)
        if name in ("sum", "sigmoid", "softmax", "cumsum") and first.type != "fp32":
            return NOTHING
        return Value(first.type, node)

    def dtype_of(self, node: ast.expr | None) -> str | None:
        """`tl.float32` -> fp32; `x.dtype` -> that of x; `ptr.dtype.element_ty` -> elem(ptr)."""
        if node is None:
            return None
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            return self.value(node.value).type
        if isinstance(node, ast.Attribute) and node.attr == "element_ty":
            inner = node.value.value if isinstance(node.value, ast.Attribute) else node.value
            pointer = self.value(inner).pointer
            return f"elem({pointer})" if pointer else None
        word = last_name(node)
        return "int" if _INTEGERS.match(word) else _DTYPES.get(word)

    def cast(self, node: ast.Call, first: Value) -> Value:
        given = keyword(node, "dtype") or (node.args[-1] if node.args else None)
        word = self.dtype_of(given)
        if word == "fp32" and first.loaded:
            self.kernel.casts.add(first.loaded)
        result = Value(word, node)
        if result.loaded and first.type in FLOATS:
            self.kernel.floats.add(result.loaded)
        return result

    def made(self, node: ast.Call, name: str, first: Value) -> Value:
        if name == "zeros_like":
            return Value(first.type, node)
        position = 1 if name == "zeros" else 2
        given = keyword(node, "dtype") or (node.args[position] if len(node.args) > position else None)
        return Value(self.dtype_of(given), node)

    def dot(self, node: ast.Call, args: list[Value]) -> Value:
        left, right = (args[0], args[1]) if len(args) >= 2 else (NOTHING, NOTHING)
        types = {left.type, right.type}
        if len(types) == 2 and not types & {None, "int"} and not (left.loaded and right.loaded):
            self.emit("dot", node, "tl.dot", left, right)
        elif left.loaded and right.loaded and left.loaded != right.loaded and keyword(node, "input_precision") is None:
            self.emit("dot_of_pointers", node, "tl.dot", left, right)
        given = keyword(node, "out_dtype")
        out = self.dtype_of(given) or ("fp32" if given is None else None)
        acc = keyword(node, "acc") or (node.args[2] if len(node.args) > 2 else None)
        if acc is not None and self.loop_depth and isinstance(acc, ast.Name):
            before = self.value(acc)
            self.note_sum(node, acc.id, before, Value("fp32", node))
            return Value(before.type, node)
        return Value(out, node)

    def note_assigned_sum(self, node: ast.Assign) -> None:
        """`acc = acc + x` in a loop."""
        target, value = node.targets[0], node.value
        if self.loop_depth and isinstance(target, ast.Name) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            for own, other in ((value.left, value.right), (value.right, value.left)):
                if isinstance(own, ast.Name) and own.id == target.id:
                    self.note_sum(node, own.id, self.value(own), self.value(other))

    def note_narrowed_sum(self, node: ast.Call) -> None:
        """`tl.sum(dy * (x * rstd).to(x.dtype))`: what was computed is cast down, and the parts are added in that dtype."""
        added = node.args[0] if isinstance(node.func, ast.Attribute) and node.args else None
        factors = [added.left, added.right] if isinstance(added, ast.BinOp) and isinstance(added.op, ast.Mult) else [added]
        values = [v if v.type else Value(v.perhaps, v.node) for v in (self.value(f) for f in factors if f is not None)]
        casts = [f for f in factors if isinstance(f, ast.Call) and isinstance(f.func, ast.Attribute) and last_name(f) in ("to", "cast")]
        if not any(isinstance(c.func.value, ast.BinOp) for c in casts):  # type: ignore[attr-defined]  # the casts were chosen as method calls
            return
        by_option = [self.is_dtype_option(f) for f in factors]
        if all(v.loaded or v.type in ("bf16", "fp16") or option for v, option in zip(values, by_option)):
            shown = next((v for v in values if v.type), None)
            if shown is not None:
                self.emit("sum", node, last_name(node.func), shown, shown)

    def is_dtype_option(self, node: ast.expr | None) -> bool:
        """`.to(X_dtype)` of a constexpr argument: the launcher chooses, and mostly the input's dtype."""
        given = node.args[0] if isinstance(node, ast.Call) and node.args else None
        return isinstance(given, ast.Name) and given.id in self.kernel.constexprs and "dtype" in given.id.lower()

    def note_sum(self, node: ast.expr | ast.stmt, name: str, before: Value, added: Value) -> None:
        """A sum over a run-time loop in less than fp32, in something made before the loop."""
        made = before.node
        if (
            isinstance(made, ast.Call)
            and not (self.innermost and self.innermost.lineno <= made.lineno <= (self.innermost.end_lineno or 0))
            and last_name(made.func) in ("zeros", "full", "zeros_like")
            and (before.type in ("fp16", "bf16") or before.loaded)
        ):
            self.emit("accumulator", made, name, before, added)


def _is_float(type_: str | None) -> bool:
    return type_ is not None and (type_ in FLOATS or type_.startswith("elem("))


def _is_short(node: ast.For | ast.While) -> bool:
    """A loop over a few numbers written out: three axes, a pair. A sum of so few parts loses little."""
    if not isinstance(node, ast.For) or last_name(node.iter) not in ("range", "static_range"):
        return False
    arguments = node.iter.args if isinstance(node.iter, ast.Call) else []
    numbers = [a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, int)]
    return len(numbers) == len(arguments) and max(numbers, default=0) <= 8


def _ends(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return)


def _last_assignment(inside: ast.stmt, name: str) -> ast.stmt | None:
    """The statement in this block that last gives `name` a value."""
    found: ast.stmt | None = None
    for node in ast.walk(inside):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            found = node if found is None or node.lineno >= found.lineno else found
    return found
