"""`isotype try` trains the same run for a few steps with several precisions and compares them.

Each precision is trained in a process of its own, with the same seed, rows and held-out rows. The
reference is trained a second time with another seed. The difference of its two held-out losses is
the noise: a precision whose loss differs by less is as good, as far as these steps can tell.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.load import LoadedConfig, load
from ..environment.hardware import Hardware, detect
from ..errors import IsotypeError, RunError, UsageError
from ..precision import PRESETS, Precision
from ..runs.checkpoint.atomic_folder import write_text
from ..runs.folder import RunFolder
from ..runs.metrics import read_all_rows
from ..tasks.choose import plan_run
from ..wording import align_columns

STEPS = 30  # steps of each run that is compared
RESULT_FILE = "try.json"
TABLE_FILE = "try.md"
# formats to which Isotype quantises the frozen weights itself, beside the presets
QUANTISED_BASES = ("fp8", "int8")
# a trial uploads nothing, and its held-out loss is the loss after the last step
_TRIAL_SETTINGS = (
    "run.push_to_hub=null",
    "run.push_merged=false",
    "run.push_private=true",
    "run.trackers=[]",
    "run.save=last",
    "run.log_every=1",
    "run.samples=[]",
    "run.sample_every=0",
    "run.report=false",
)
_QLORA_IN_FP16 = "nf4-lora compute=fp16 loss_scaling=dynamic"
_SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11}  # bits of a number's mantissa, with the implicit one
# quantised dtype of the base -> what its rounding costs, for the table
_BASE_LOSSES = {
    "nf4": "frozen weights have 16 values in each block of 64",
    "fp8": "frozen weights keep 4 bits",
    "int8": "frozen weights have 255 values in each row",
}


@dataclass(frozen=True)
class Candidate:
    """A precision that is compared.

    name      as the user wrote it: a preset, a preset with roles (`nf4-lora compute=fp16`), fp8 or
              int8
    settings  the settings of the configuration that give this precision
    loses     what this precision loses against fp32
    """

    name: str
    settings: tuple[str, ...]
    loses: str = ""

    @property
    def yaml(self) -> str:
        """The line of the configuration file that gives this precision."""
        pairs = [setting.removeprefix("precision.").replace("=", ": ") for setting in self.settings]
        return f"precision: {{{', '.join(pairs)}}}"


@dataclass(frozen=True)
class Trial:
    """The result of one short run; `error` is "" if it ended."""

    name: str
    seed: int
    tokens_per_second: float = 0.0
    peak_bytes: int = 0
    eval_loss: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Comparison:
    """Contains all results.

    reference  the name of the precision with which the others are compared
    noise      the difference of the held-out losses of the reference with two seeds
    trials     one for each candidate, in their order
    left_out   name of a candidate -> the reason why it was not trained
    """

    steps: int
    reference: str
    noise: float
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    left_out: dict[str, str]

    def verdict(self, trial: Trial) -> str:
        """Compares the held-out loss of a trial with the loss of the reference."""
        if trial.error:
            return f"failed: {trial.error}"
        if trial.name == self.reference:
            return "reference"
        difference = trial.eval_loss - self._find_loss(self.reference)
        if abs(difference) <= self.noise:
            return "within noise"
        return f"{abs(difference):.4f} {'worse' if difference > 0 else 'better'}"

    def best(self) -> Candidate:
        """Returns the fastest of the precisions that are not worse than the reference."""
        reference_loss = self._find_loss(self.reference)
        good = {
            trial.name: trial.tokens_per_second
            for trial in self.trials
            if not trial.error and trial.eval_loss <= reference_loss + self.noise
        }
        name = max(good, key=lambda name: good[name])
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def _find_loss(self, name: str) -> float:
        return next(trial.eval_loss for trial in self.trials if trial.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "verdicts": {trial.name: self.verdict(trial) for trial in self.trials},
            "write": self.best().yaml,
        }

    def table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("precision", "tokens/s", "peak memory", "held-out loss", "", "loses")
        ]
        for candidate, trial in zip(self.candidates, self.trials):
            measures = ("", "", "")
            if not trial.error:
                measures = (
                    f"{trial.tokens_per_second:.0f}",
                    f"{trial.peak_bytes / (1 << 30):.2f} GiB",
                    f"{trial.eval_loss:.4f}",
                )
            rows.append((candidate.name, *measures, self.verdict(trial), candidate.loses))
        return rows


def compare_presets(
    file: Path,
    arguments: Sequence[str],
    *,
    names: Sequence[str] = (),
    steps: int = STEPS,
    out: Path,
    print_line: Callable[[str], None] = print,
) -> Comparison:
    """Trains the run of a configuration file with each precision and writes try.json and try.md.

    arguments  further settings, `section.key=value`
    names      the precisions; by default those that fit into the memory of the device
    out        the folder for the two files
    Raises     UsageError for an unknown precision and for a run without held-out rows, RunError if
               no run or not the reference ended
    """
    loaded = load(file, list(arguments), {})
    _refuse_run(loaded)
    candidates, left_out = choose_candidates(file, arguments, loaded, names)
    for name, reason in left_out.items():
        print_line(f"left out  {name}: {reason}")
    if not candidates:
        raise UsageError("no precision is left to compare", fix="--presets")
    reference = next(
        (candidate for candidate in candidates if candidate.name == "fp32"), candidates[0]
    )
    seed = loaded.config.train.seed

    def run(candidate: Candidate, seed_of_run: int) -> Trial:
        held_out = loaded.config.data.eval_seed
        settings = [
            *reset_roles(loaded),
            *arguments,
            *candidate.settings,
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            f"train.seed={seed_of_run}",
            f"data.eval_seed={seed if held_out is None else held_out}",
            *_TRIAL_SETTINGS,
        ]
        trial = run_trial(candidate.name, file, settings, seed=seed_of_run)
        print_line(_trial_line(trial))
        return trial

    trials = [run(candidate, seed) for candidate in candidates]
    repeated = run(reference, seed + 1)
    first = next(trial for trial in trials if trial.name == reference.name)
    if first.error or repeated.error:
        raise RunError(f"{reference.name}, the reference, failed: {first.error or repeated.error}")
    comparison = Comparison(
        steps=steps,
        reference=reference.name,
        noise=abs(first.eval_loss - repeated.eval_loss),
        candidates=tuple(candidates),
        trials=tuple(trials),
        left_out=left_out,
    )
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RESULT_FILE, json.dumps(comparison.to_json(), indent=1) + "\n")
    write_text(out / TABLE_FILE, markdown_table(comparison))
    return comparison


def _refuse_run(loaded: LoadedConfig) -> None:
    config = loaded.config
    if detect_run_kind(config) == DIFFUSION:
        raise UsageError("isotype try compares runs that train language models")
    if config.data.eval is None and not config.data.eval_split:
        raise UsageError(
            "data.eval_split: 0: there are no held-out rows to compare", fix="data.eval_split: 0.05"
        )


def choose_candidates(
    file: Path, arguments: Sequence[str], loaded: LoadedConfig, names: Sequence[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Returns the precisions that can be trained here, and for each other one the reason why not.
    The plan of a run decides whether it fits.
    """
    hardware = detect(loaded.config.model.device)
    is_lora = loaded.config.adapter.kind != "none"
    candidates: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name in names or default_names(hardware, is_lora=is_lora):
        settings = parse_name(name, hardware)
        try:
            plan = plan_run(load(file, [*reset_roles(loaded), *arguments, *settings], {}))
        except IsotypeError as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        if plan.fits is False:
            left_out[name] = f"the plan needs {plan.peak / (1 << 30):.1f} GiB"
            continue
        loses = describe_losses(plan.resolved.precision)
        candidates.append(Candidate(name, tuple(settings), loses))
    return candidates, left_out


def reset_roles(loaded: LoadedConfig) -> list[str]:
    """Returns the settings that remove the precision roles of a configuration file. They would
    change the precision that the name of a candidate stands for.
    """
    roles = loaded.config.precision.model_dump(exclude={"preset"}, exclude_none=True)
    return [f"precision.{role}=null" for role in roles]


def default_names(hardware: Hardware, *, is_lora: bool) -> list[str]:
    has_bf16 = hardware.bf16 != "none"
    if is_lora and has_bf16:
        return ["bf16-lora", "nf4-lora", *QUANTISED_BASES, "fp32"]
    if is_lora:
        return ["fp16-mixed", _QLORA_IN_FP16, "fp32"]
    if has_bf16:
        return ["bf16-mixed", "bf16-pure", "fp32"]
    return ["fp16-mixed", "fp32"]


def parse_name(name: str, hardware: Hardware) -> list[str]:
    """Returns the settings for a precision. Raises UsageError for an unknown name."""
    first, *roles = name.split()
    if first in QUANTISED_BASES:
        preset = "fp16-mixed" if hardware.bf16 == "none" else "bf16-lora"
        settings = [f"precision.preset={preset}", f"precision.base={first}"]
    elif first in PRESETS:
        settings = [f"precision.preset={first}"]
    else:
        raise UsageError(
            f"--presets {first}: there is no such precision",
            fix=" ".join([*PRESETS, *QUANTISED_BASES]),
        )
    return [*settings, *(f"precision.{role}" for role in roles)]


def describe_losses(precision: Precision) -> str:
    """Says what a precision loses against fp32."""
    losses = []
    if precision.base in _BASE_LOSSES:
        losses.append(_BASE_LOSSES[precision.base])
    elif precision.base in _SIGNIFICANT_BITS and precision.base != precision.compute:
        losses.append(f"frozen weights keep {_SIGNIFICANT_BITS[precision.base]} bits")
    if precision.compute in _SIGNIFICANT_BITS:
        losses.append(f"products keep {_SIGNIFICANT_BITS[precision.compute]} bits")
    if precision.compute == "fp16":
        losses.append("steps whose gradients overflow are skipped")
    if precision.trainable in _SIGNIFICANT_BITS:
        losses.append(f"trained weights keep {_SIGNIFICANT_BITS[precision.trainable]} bits")
    return "; ".join(losses) or "nothing"


def run_trial(name: str, file: Path, settings: Sequence[str], *, seed: int) -> Trial:
    """Trains in a process of its own. Its run folder is deleted."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable, "-m", "isotype", "train", str(file), *settings]
        process = subprocess.run(
            [*command, f"run.folder={folder}", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            return Trial(name, seed, error=_first_error_line(process.stderr))
        run = RunFolder(folder)
        with run.metrics.open("rb") as metrics:
            rows = read_all_rows(metrics).rows
        speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        return Trial(
            name,
            seed,
            # the first steps compile and allocate
            tokens_per_second=statistics.median(speeds[len(speeds) // 4 :]),
            peak_bytes=max(row.get("memory_bytes", 0) for row in rows),
            eval_loss=float(run.read_json("result.json")["eval_loss"]),
        )


def _first_error_line(text: str) -> str:
    """Returns the first line of the error in what a command printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("isotype: ", "error "))]
    return (errors or lines[-1:] or ["no output"])[0].removeprefix("isotype: ")


def _trial_line(trial: Trial) -> str:
    if trial.error:
        return f"failed    {trial.name}: {trial.error}"
    return (
        f"trained   {trial.name}, seed {trial.seed}: held-out loss {trial.eval_loss:.4f},"
        f" {trial.tokens_per_second:.0f} tokens/s"
    )


def result_lines(comparison: Comparison) -> list[str]:
    """Returns the table as text, and the line to write into the configuration file."""
    best = comparison.best()
    return [
        *align_columns(comparison.table()),
        "",
        (
            f"noise     {comparison.noise:.4f}: the difference between two seeds of"
            f" {comparison.reference}, after {comparison.steps} steps"
        ),
        f"write     {best.yaml}   # the fastest of those that are not worse than the noise",
    ]


def markdown_table(comparison: Comparison) -> str:
    header, *rows = comparison.table()
    lines = [header, ("---",) * len(header), *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{text}\n\nNoise {comparison.noise:.4f}: two seeds of {comparison.reference},"
        f" {comparison.steps} steps. Write `{comparison.best().yaml}`.\n"
    )
