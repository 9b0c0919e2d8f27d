"""Comments that silence a rule, each with its reason.

    y = f(x)  # isotype: ignore[LT004] the buffer is fp32: see build()
    # isotype: ignore-file[LT007, LT009] masks here are boolean

A comment without a reason, with a code that does not exist, or that silences nothing, is itself a finding (LT099).
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field

PAGES = {
    "LT000": """# LT000 unreadable: the file could not be linted

(severity error)

## Why
A file that Python cannot parse, or that is not text, was not looked at; neither was one in which a rule itself failed ("a rule failed":
please report it). Silence about it would read as a clean bill.

## Use instead
Correct the syntax, or leave the file out with `exclude` in `[tool.isotype.lint]`. `isotype lint` parses with the Python it runs under.
""",
    "LT099": """# LT099 suppression: a suppression says why, and silences something

(severity note)

## Why
A suppression is a claim that the rule is wrong here. The next reader needs the reason, and one that silences nothing hides the next fault.

## Example
```python
grad_w = torch.zeros_like(w)  # isotype: ignore[LT004]
```

## Use instead
```python
grad_w = torch.zeros_like(w)  # isotype: ignore[LT004] w is the fp32 master copy
```
For a whole file: `# isotype: ignore-file[LT004] reason`, on a line of its own.
""",
}

_COMMENT = re.compile(r"#\s*isotype:\s*(?P<kind>ignore-file|ignore)\s*(?:\[(?P<codes>[^\]]*)\])?(?P<reason>.*)$")


@dataclass(slots=True)
class Suppression:
    """codes: those named (none named means every rule, and is never accepted); used: those that silenced a finding."""

    line: int
    column: int
    whole_file: bool
    codes: tuple[str, ...]
    reason: str
    used: set[str] = field(default_factory=set)

    def silences(self, code: str, first_line: int, last_line: int) -> bool:
        if code not in self.codes or not (self.whole_file or first_line <= self.line <= last_line):
            return False
        self.used.add(code)
        return True


def suppressions(text: str) -> list[Suppression]:
    """Those of a file, in order; only real comments count, not strings that look like one."""
    if "isotype:" not in text:
        return []
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            codes = tuple(code.strip().upper() for code in (match["codes"] or "").split(",") if code.strip())
            reason = match["reason"].strip(" -:\t")
            found.append(Suppression(token.start[0], token.start[1], match["kind"] == "ignore-file", codes, reason))
    return found
