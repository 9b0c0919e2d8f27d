"""A comment that silences mypy names the error's code and the reason. mypy itself reports those that silence nothing."""

import io
import re
import tokenize
from pathlib import Path

import isotype

ROOT = Path(__file__).parent.parent
PACKAGE = Path(isotype.__file__).parent
WHOLE = re.compile(r"# type: ignore\[[a-z]+(-[a-z]+)*(, ?[a-z]+(-[a-z]+)*)*\]  # \w.{7,}")


def ignores(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if "type: ignore" not in text:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT and token.string.startswith("# type: ignore")]


def test_every_type_ignore_has_its_code_and_its_reason():
    found = {path: ignores(path) for path in PACKAGE.rglob("*.py")}
    assert sum(map(len, found.values())) > 5
    bare = [f"{path.name}: {one}" for path, several in found.items() for one in several if not WHOLE.fullmatch(one)]
    assert not bare, "write `# type: ignore[code]  # reason`:\n" + "\n".join(bare)


def test_no_type_ignore_in_files_that_mypy_does_not_check():
    found = []
    for folder in ("tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            found += [] if "fixtures" in path.parts else [f"{path}: {one}" for one in ignores(path)]
    assert not found
