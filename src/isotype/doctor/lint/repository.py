"""Evidence about precision in the repository around a file. It is read as text, and only when a finding needs it.

A finding supposes a scenario: bf16 inputs, an autocast region. In a repository that runs its models itself and never brings the scenario
about, nobody meets it. A library alone is no evidence, because its users choose the precision.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from .configured import low_settings
from .dataflow.events import Scenario
from .files import SKIPPED_FOLDERS, regular
from .source import SourceFile

MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
MAX_FILES = MAX_FOLDERS = 20_000  # more is no repository but a disk
FEW = 4  # files: too few to say anything by their silence
MOSTLY = 5  # times as many files without gradients as with them: an engine

_LOW = (b"bfloat16", b"float16", b".half()", b"bf16", b"fp16", b"autocast", b"mixed_precision", b"float8", b"fp8")
# a cast, or a dtype to be cast to; a comparison with one is neither, nor is an autocast region
_CAST = re.compile(
    rb"\.half\(\)|\.bfloat16\(\)|torch_dtype|^(?!.*autocast)(?!.*(?:==|!=|\bin\b|\bis\b)).*torch\.(?:bfloat16|float16|half)\b", re.MULTILINE
)
_REGION = re.compile(rb"\bautocast\((?!False|[^)\n]*enabled\s*=\s*False)")
_CPU_REGION = re.compile(
    rb"autocast\((?![^)\n]*enabled\s*=\s*False)[^)\n]*(?:[\"']cpu[\"']|device(?!_type\s*=\s*[\"']))|\bcpu\.amp\.autocast\b"
)
# what hands the choice to a trainer's option
_TRAINER = re.compile(
    rb"GradScaler|mixed_precision\s*[=:]|AmpOptimWrapper|amp\.initialize|auto_fp16|TrainingArguments|LightningModule|\bAccelerator\(|"
    rb"precision\s*=\s*[\"'](?:16|bf16)"
)
# the names that a model of transformers leaves in fp32 when it is cast
_KEPT = re.compile(rb"_keep_in_fp32_modules\w*\b[^=\n]*=\s*[\[({]([^\])}]*)[\])}]")
# what leaves some weights in fp32 beside activations of less: the preparation of a quantised model, norms kept or cast
_WIDE = re.compile(
    rb"prepare_model_for_(?:kbit|int8)|keep_in_fp32|upcast_layernorm|cast_norms?_to_fp32|load_in_[48]bit|BitsAndBytesConfig|"
    rb"norm\w*(?:\.weight)?(?:\.data)?\.(?:to\(torch\.float32\)|float\(\))"
)
_LOW_IS_GIVEN = rb"=(?!\s*(?:None|torch\.(?:float(?:32|64)?|double)\b|[\"'](?:float32|fp32)))"
# a whole model in a low precision, and not some tensor of it
_MODEL_CAST = re.compile(
    rb"\b\w*(?:model|net|unet|vae|transformer|encoder|decoder|pipe|pipeline|policy|backbone|llm|lm)\w*(?:\.\w+\([^()\n]*\))*"
    rb"\.(?:half\(\)|bfloat16\(\)|to\([^)\n]*(?:dtype|bfloat16|float16|torch\.half))|torch_dtype\s*%b|"
    rb"\b(?:from_pretrained|from_config|from_single_file)\([^)]*?(?<![.\w])dtype\s*%b|"
    rb"set_default_dtype\([^)\n]*(?:bfloat16|float16|half|dtype\))|[\"']bf16[\"']\s*:\s*\{" % (_LOW_IS_GIVEN, _LOW_IS_GIVEN)
)
# FSDP casts the parameters and inputs of what it shards
_POLICY = re.compile(rb"\bMixedPrecision(?:Policy)?\(|param_dtype\s*=\s*torch\.")
_DECORATED = re.compile(rb"^\s*@[\w.]*(?:custom_[fb]wd|autocast_custom)\w*", re.MULTILINE)
_DEFINITION = re.compile(rb"[ \t]*(?:async[ \t]+)?def\b")
_STEP = re.compile(rb"(?:optimi[sz]er|optim|opt|scaler)\w*(?:\[\w+\])?\.step\(")
_TESTS = re.compile(r"(^|[_/])(tests?|testing|bench\w*)([_/.]|$)")
_BENCHMARKS = re.compile(r"(^|[_/])bench\w*([_/.]|$)")
_REFERENCES = re.compile(r"(^|[_/])references?(/|\.py$)")
_INFERENCE = re.compile(r"(^|[_/])infer(ence)?([_/.]|$)")
_EXAMPLES = re.compile(r"(^|[_/])examples?([_/.]|$)")


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a file, written from the repository's root."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Repository:
    """The Python files under `root`, with what they say together."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[Path, SourceFile] = {}
        self._places: dict[tuple[re.Pattern[bytes], Path], Spot | None] = {}
        self._long_texts: dict[Path, set[int]] = {}
        self._uses: dict[tuple[str, Path], Spot | None] = {}

    @cached_property
    def texts(self) -> dict[Path, bytes]:
        """The files' bytes, without tests and benchmarks."""
        return dict(_python_under(self.root, tests=False))

    @cached_property
    def tests(self) -> dict[Path, bytes]:
        """The bytes of the files of tests."""
        return dict(_python_under(self.root, tests=True))

    @cached_property
    def _settings(self) -> list[tuple[str, Path, int]]:
        return low_settings(self.root)

    def configured(self, scenario: Scenario) -> Spot | None:
        """The line of a configuration file that asks for weights, or for autocast, in a low precision."""
        if scenario.mixed_weights:
            return None
        wanted = "autocast" if scenario.autocast is not None else "weights"
        return next((Spot(file.relative_to(self.root).as_posix(), line) for kind, file, line in self._settings if kind == wanted), None)

    @cached_property
    def own(self) -> list[bytes]:
        """Those of them that are no examples, without their own demonstrations: what is shown there is the users' business."""
        return [
            text.partition(b"\nif __name__")[0]
            for path, text in self.texts.items()
            if not _EXAMPLES.search(path.relative_to(self.root).as_posix())
        ]

    @cached_property
    def trains(self) -> bool:
        """It has its own loop."""
        return any(_STEP.search(text) for text in _having(self.own, b".step(")) and bool(_having(self.own, b".backward("))

    @cached_property
    def serves(self) -> bool:
        """It runs models, and hardly ever for gradients."""
        running = len(_having(self.own, b"no_grad(", b"inference_mode"))
        return running >= 2 * MOSTLY and running >= MOSTLY * len(_having(self.own, b".backward(", b"autograd.Function"))

    @cached_property
    def infers(self) -> bool:
        """A program that loads a trained model and runs it without gradients, however small."""
        texts = self.texts.values()
        loads = _having(texts, b"load_state_dict(", b"safe_open(", b"torch.load(", b"load_file(")
        program = _having(texts, b"__name__ ==", b"argparse", b"gradio", b"uvicorn", b"import fire", b"import click", b"import typer")
        runs = _having(texts, b"no_grad(", b"inference_mode")
        return bool(loads and program and runs) and not _having(texts, b".backward(", b"def backward(", b"GradScaler")

    @cached_property
    def low(self) -> bool:
        """Any low precision at all."""
        return bool(_having(self.texts.values(), *_LOW)) or bool(self._settings)

    @cached_property
    def casts(self) -> bool:
        """Something may be cast to a low precision as a whole."""
        return any(map(_CAST.search, _having(self.texts.values(), b".half()", b"bfloat16", b"float16", b"torch.half", b"torch_dtype")))

    @cached_property
    def widens(self) -> bool:
        """Some weights stay in fp32, or are cast to it, while the rest of a model is narrower."""
        return any(map(_WIDE.search, _having(self.texts.values(), b"norm", b"fp32", b"kbit", b"int8", b"in_4bit", b"in_8bit", b"BitsAnd")))

    @cached_property
    def autocast(self) -> bool:
        """An autocast region is opened, or can be by an option of the trainer. Code that only switches autocast off also counts.

        An engine has copied such a line with the model, and has no trainer.
        """
        mentioned = _having(self.texts.values(), b"autocast")
        if self.trains and mentioned:
            return True
        words = (b"precision", b"GradScaler", b"OptimWrapper", b"amp.", b"auto_fp16", b"TrainingArg", b"Lightning", b"Accelerator(")
        return any(map(_REGION.search, mentioned)) or any(map(_TRAINER.search, _having(self.texts.values(), *words)))

    @cached_property
    def decorates(self) -> Spot | None:
        """Where an autograd.Function is decorated for autocast: its author reckons with users that open a region."""
        return self._spot(_DECORATED, {p: t for p, t in self.texts.items() if b"autocast" in t or b"custom_fwd" in t}, self.root)

    def autocast_of_the_cpu(self, path: Path) -> Spot | None:
        """The place, nearest to this file, where an autocast region is opened for a CPU, or for a device that a variable names."""
        return self._nearest(_CPU_REGION, path, b"autocast")

    def place_of(self, scenario: Scenario, path: Path, *, sharded: bool = True) -> Spot | None:
        """The place, nearest to this file, where the repository brings the scenario about.

        sharded  whether FSDP may cast the code's inputs
        """
        if scenario.autocast is not None:
            return self._nearest(_REGION, path, b"autocast") or self._nearest(_TRAINER, path)
        if scenario.mixed_weights:
            return self._nearest(_WIDE, path)
        return self._nearest(_MODEL_CAST, path) or (self._nearest(_POLICY, path) if sharded else None)

    def use_of(self, name: str, but: Path) -> Spot | None:
        """Where another file names it; a file that defines the same name itself does not count."""
        word, own = name.encode(), re.compile(rb"^\s*(?:def|class) %b\b" % re.escape(name.encode()), re.MULTILINE)
        if (name, but) not in self._uses:
            texts = {p: t for p, t in self.texts.items() if word in t and p != but.resolve() and not own.search(t)}
            self._uses[name, but] = self._spot(re.compile(rb"\b%b\b" % re.escape(word)), texts, but)
        return self._uses[name, but]

    def _nearest(self, pattern: re.Pattern[bytes], path: Path, word: bytes = b"") -> Spot | None:
        if (pattern, path.parent) not in self._places:
            texts = {p: t for p, t in self.texts.items() if word in t}
            self._places[pattern, path.parent] = self._spot(pattern, texts, path, definitions=False)
        return self._places[pattern, path.parent]

    def _spot(self, pattern: re.Pattern[bytes], texts: dict[Path, bytes], near: Path, *, definitions: bool = True) -> Spot | None:
        """The first match outside of comments, in the file that shares most folders with `near`; or also outside of lines with `def`."""
        above = set(near.resolve().parents)
        for file in sorted(texts, key=lambda p: -len(above.intersection(p.parents))):
            text = texts[file]
            for match in pattern.finditer(text):
                line = text.rfind(b"\n", 0, match.start()) + 1
                number = text.count(b"\n", 0, match.start()) + 1
                if not definitions and _DEFINITION.match(text, line):
                    continue
                if b"#" not in text[line : match.start()] and not self._in_a_text(file, number):
                    return Spot(file.relative_to(self.root).as_posix(), number)
        return None

    def _in_a_text(self, file: Path, line: int) -> bool:
        """Whether the line is inside a string of several lines, such as a docstring: text there is not executed."""
        if file not in self._long_texts:
            lines: set[int] = set()
            with suppress(SyntaxError, ValueError):
                for node in ast.walk(ast.parse(self.texts[file])):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and (node.end_lineno or node.lineno) > node.lineno:
                        lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            self._long_texts[file] = lines
        return line in self._long_texts[file]

    def region_near(self, path: Path) -> bool:
        """Whether a region is opened in the folder of this file or below it. An engine keeps a folder for each model, with what runs it."""
        return any(_REGION.search(text) for file, text in self.texts.items() if path.parent in file.parents and b"autocast" in text)

    def kept_in_fp32(self, path: Path, names: tuple[str, ...]) -> str:
        """Which of these buffers and classes a model in this file's folder keeps in fp32 by name, or ""."""
        beside = b"\n".join(text for file, text in self.texts.items() if file.parent == path.resolve().parent)
        kept = {word for group in _KEPT.findall(beside) for word in re.findall(rb"[\"'.](\w+)[\"']", group)}
        kept |= {cls for word in kept for cls in re.findall(rb"\bself\.%b\s*=\s*(\w+)\(" % word, beside)}
        return next((name for name in names if name.encode() in kept), "")

    def mentions(self, name: str, but: Path) -> bool:
        """Whether another file has the name, and does not define a function so called itself."""
        word, own = name.encode(), f"def {name}(".encode()
        return any(word in text and own not in text for path, text in self.texts.items() if path != but.resolve())

    def files_with(self, words: bytes, but: Path) -> list[SourceFile]:
        """The files, parsed, whose text has these bytes, except this one."""
        found: list[SourceFile] = []
        for path, text in self.texts.items():
            if words in text and path != but.resolve():
                with suppress(SyntaxError, ValueError):
                    found.append(self._parsed.get(path) or SourceFile(str(path), text.decode("utf-8", "replace")))
                    self._parsed[path] = found[-1]
        return found

    def against(self, scenario: Scenario, path: Path, text: str) -> str:
        """Why the scenario does not occur in this file, or ""."""
        here = path.resolve().relative_to(self.root).as_posix()
        bare = scenario.autocast is not None and "autocast" not in text
        if bare and "__main__" in text and _BENCHMARKS.search(here):
            return "a benchmark chooses its dtypes, and this one opens no autocast region"
        if bare and _INFERENCE.search(here):
            return "a file for inference, which opens no autocast region"
        if _REFERENCES.search(here):
            return "a reference computes in the dtypes that its tests choose"
        if scenario.mixed_weights and _EXAMPLES.search(here):
            return "an example chooses its dtypes"
        if len(self.texts) <= FEW:
            return ""
        # to put a library's module under autocast, its users need nothing from it; to cast it, they mostly find how in it
        if not (self.low or self.autocast) and (self.trains or self.serves or not scenario.autocast):
            return "nothing in this repository uses a low precision"
        if scenario.autocast and self.infers and not self.autocast:
            return "this repository runs models without gradients, and opens no autocast region"
        if not (self.trains or self.serves):
            return ""
        if scenario.mixed_weights and not self.widens:
            return "this repository runs its models itself, and keeps no weights in fp32 beside narrower ones"
        if scenario.autocast and not self.autocast:
            return "this repository runs its models itself, and opens no autocast region"
        if scenario.autocast and self.serves and not self.trains and not self.region_near(path.resolve()):
            return "this repository runs each model in its own way, and opens no other autocast region"
        if not scenario.autocast and self.trains and not self.casts:
            return "this repository trains its models itself, and casts none to a low precision"
        return ""


def _python_under(root: Path, *, tests: bool) -> Iterator[tuple[Path, bytes]]:
    """The Python files below a folder with their bytes: those of tests and benchmarks, or the others."""
    found = 0
    for count, (here, folders, files) in enumerate(os.walk(root)):
        if count > MAX_FOLDERS or found >= MAX_FILES:
            return
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(here, name)
            if name.endswith(".py") and regular(path) and bool(_TESTS.search(path.relative_to(root).as_posix())) is tests:
                with suppress(OSError):
                    yield path, path.read_bytes()
                    found += 1


def _having(texts: Iterable[bytes], *words: bytes) -> list[bytes]:
    return [text for text in texts if any(word in text for word in words)]


def repository_of(path: Path, named: tuple[Path, ...] = ()) -> Repository | None:
    """The project around a file, else the folder named that holds it or its outermost package, whichever is outer; None for a lone file."""
    return _at(_root_of(path.resolve().parent, named))


def look_again() -> None:
    """Forgets what was read: files may have changed since the last run."""
    _at.cache_clear()
    _root_of.cache_clear()


@lru_cache(maxsize=4)
def _at(root: Path | None) -> Repository | None:
    return Repository(root) if root is not None else None


@lru_cache(maxsize=4096)
def _root_of(folder: Path, named: tuple[Path, ...]) -> Path | None:
    above = (folder, *folder.parents)
    for one in above:
        if any((one / marker).exists() for marker in MARKERS):
            return one
    package = None
    for one in above:
        if not (one / "__init__.py").exists():
            break
        package = one
    holding = [one for one in (*named, package) if one is not None and (one == folder or one in folder.parents)]
    return min(holding, key=lambda one: len(one.parts), default=None)
