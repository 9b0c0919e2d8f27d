from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..rule import Edit, FixSafety, Hit, Rule
from ..source import SourceFile, keyword, last_name

CUDA_ONLY = ("torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast")
GENERAL = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
MEANS_BF16 = re.compile(r"bfloat16|\bbf16\b|is_bf16_supported", re.IGNORECASE)
MEANS_FP16 = re.compile(r"GradScaler|\bscaler\b|float16(?<!bfloat16)|\bfp16\b|\.half\(")


class AutocastDefaultsToFp16(Rule):
    """autocast without a dtype means fp16 on CUDA, in code that otherwise says bf16

    Why
    ---
    `torch.cuda.amp.autocast()` and `torch.autocast("cuda")` mean fp16. Around a bf16 model every activation is rounded to a format whose
    largest value is 65504; without a GradScaler small gradients become zero. It is the remedy that circulates for "mat1 and mat2 must
    have the same dtype", and it hides that failure behind another precision.

    Example
    -------
    ```python
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    with torch.cuda.amp.autocast():
        model.generate(**inputs)
    ```

    Use instead
    -----------
    ```python
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model.generate(**inputs)
    ```

    Fix safety
    ----------
    Unsafe: `dtype=torch.bfloat16` is added, which changes what is computed.

    Known problems
    --------------
    What was meant is read from the file: it has to speak of bf16, and neither of fp16 nor of a GradScaler. `torch.set_autocast_dtype`
    called elsewhere is not seen. A partial counts where no call of it in the file says more.
    """

    code = "LT013"
    name = "autocast-defaults-to-fp16"
    first_look = (0, 2)
    on = False
    fix_safety = FixSafety.UNSAFE
    words = ("autocast",)

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        calls = [c for c in file.nodes(ast.Call) if _is_fp16_by_default(file, c)]
        if not calls:
            return
        code = _code_without_text(file)
        if not MEANS_BF16.search(code) or MEANS_FP16.search(code) or "set_autocast" in code:
            return
        for call in calls:
            if _for_another_torch(file, call):
                continue
            yield Hit(
                node=call,
                message=f"{file.snippet(call)} names no dtype: on CUDA that is fp16, and this file means bf16",
                cause="autocast's default dtype on CUDA is fp16 (float16), not bf16; the file speaks of bfloat16 and uses no GradScaler",
                fix='torch.autocast("cuda", dtype=torch.bfloat16)',
                edit=Edit.at("keyword", call, "dtype=torch.bfloat16"),
            )


def _is_fp16_by_default(file: SourceFile, call: ast.Call) -> bool:
    name = file.dotted(call.func)
    if name == "functools.partial" and call.args:
        given = ast.copy_location(ast.Call(call.args[0], call.args[1:], call.keywords), call)
        return _is_fp16_by_default(file, given) and not _completed(file, call)
    if any(k.arg is None for k in call.keywords) or keyword(call, "dtype"):
        return False
    enabled = keyword(call, "enabled")
    if isinstance(enabled, ast.Constant) and enabled.value is False:
        return False
    if name in CUDA_ONLY:
        return len(call.args) < 2 and not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is False)
    device = call.args[0] if call.args else keyword(call, "device_type")
    return name in GENERAL and len(call.args) < 2 and isinstance(device, ast.Constant) and str(device.value).startswith("cuda")


def _for_another_torch(file: SourceFile, call: ast.Call) -> bool:
    """Whether a branch around it asks for torch's version: of before 1.10, whose autocast takes no dtype."""
    around = file.parents.get(call)
    while around is not None:
        if isinstance(around, ast.If) and "version" in ast.unparse(around.test).lower():
            return True
        around = file.parents.get(around)
    return False


def _completed(file: SourceFile, partial: ast.Call) -> bool:
    """Whether some call of the partial names a dtype, or switches autocast off."""
    parent = file.parents.get(partial)
    names = {last_name(t) for t in parent.targets} if isinstance(parent, ast.Assign) else set()
    uses = [c for c in file.nodes(ast.Call) if last_name(c.func) in names]
    return not uses or any(c.args or c.keywords for c in uses)


def _code_without_text(file: SourceFile) -> str:
    """The file's names and constants. Comments and docstrings are left out, as they are no evidence of what the code does."""
    names = [n.id for n in file.nodes(ast.Name)] + [n.attr for n in file.nodes(ast.Attribute)]
    names += [a.arg for a in file.nodes(ast.arg)] + [k.arg or "" for k in file.nodes(ast.keyword)]
    words = [n.value for n in file.nodes(ast.Constant) if isinstance(n.value, str) and len(n.value) < 20]
    return " ".join([*names, *words, *(f".{n.attr}(" for n in file.nodes(ast.Attribute))])
