"""`plan`: what `isotype train` would do, without weights and without a folder: precision, parameters, data, memory, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.load import LoadedConfig
from ..config.schema import RunConfig
from ..data.facts import source_lines
from ..data.load import load_data
from ..data.prompts import prompts_from
from ..data.rows import LoadedData, row_lengths
from ..environment.hardware import Hardware, detect
from ..model.adapter import check_branch
from ..model.load import check_vocabulary, load_architecture, load_tokenizer
from ..precision.quantised_base import check_base, check_share, of_config
from ..precision.resolve import Resolved
from .loop import Plan as Schedule
from .memory.auto_recomputation import auto_checkpointing
from .memory.device import peak_memory, shown
from .memory.pauses import Pauses
from .memory.plan import MemoryPlan, outline, plan_memory
from .memory.recomputation import AUTO, NONE, Checkpointing, as_configured, check_settings, checkpointable
from .quiet import quiet_libraries
from .schedule import learning_rate, warmup_steps
from .setup import resolve_precision

KEPT = "up to 340 MiB"  # measured beyond the plan where nothing is given back: docs/decisions/0077


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would happen. `process` is what this process takes without any model, which counts on a CPU; 0 on a GPU."""

    config: RunConfig
    hardware: Hardware
    resolved: Resolved
    architecture: str
    trainable: int
    total: int
    data: dict[str, Any]
    schedule: dict[str, Any]
    memory: MemoryPlan
    checkpointing: Checkpointing
    process: int = 0
    notes: Sequence[str] = field(default=())

    @property
    def peak(self) -> int:
        return self.memory.peak + self.process

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None where that is unknown."""
        return self.peak <= self.hardware.memory if self.hardware.memory else None

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.hardware.as_json(),
            "precision": {"preset": self.resolved.preset, "why": self.resolved.why_preset, "roles": self.resolved.as_json()},
            "warnings": [f.as_json() for f in self.resolved.warnings],
            "parameters": {"architecture": self.architecture, "trainable": self.trainable, "total": self.total},
            "data": self.data,
            "schedule": self.schedule,
            "checkpointing": {**self.checkpointing.as_settings(), "of": self.checkpointing.of, "reason": self.checkpointing.reason},
            "memory": {**self.memory.as_json(), "process": self.process, "peak_with_process": self.peak, "fits": self.fits},
            "notes": list(self.notes),
        }

    def as_text(self) -> str:
        d, s = self.data, self.schedule
        role_width = max(len(value) for _, value, _ in self.resolved.rows())
        lines = [
            f"device      {self.hardware.name} ({self.hardware.generation}), bf16 {self.hardware.bf16}",
            f"precision   {self.resolved.preset}: {self.resolved.why_preset}",
            *[f"  {role:<10}{value:<{role_width}}  {reason}" for role, value, reason in self.resolved.rows()],
            f"model       {self.config.model.name or 'model.config'} ({self.architecture}): {self.total:,} parameters, "
            f"{self.trainable:,} trained ({self.trainable / self.total:.2%})",
            self._data_line(),
            *[f"  {line}" for line in [*d["sources"], *d["notes"]]],
            f"schedule    {s['steps']:,} steps of {s['rows_per_step']} rows ({s['epochs']:.3g} epochs), learning rate "
            f"{s['learning_rate']:g} {s['shape']}, {s['warmup']} of them warm-up, ends at {s['last_learning_rate']:.2g}",
            f"  evaluation every {s['eval_every']}, checkpoint every {s['save_every']}, samples every {s['sample_every']} steps"
            if s["eval_every"]
            else f"  no evaluation, checkpoint every {s['save_every']}, samples every {s['sample_every']} steps",
            f"recompute   {self.checkpointing}",
            *self._memory_lines(),
            *[f"warning     {f.code} {f.message}; {f.fix}" for f in self.resolved.warnings],
            *[f"note        {note}" for note in self.notes],
        ]
        return "\n".join(lines)

    def _data_line(self) -> str:
        d = self.data
        rows = f"{d['train_rows']:,} training rows"
        if d["stream"]:
            rows = f"a stream, begun with {d['train_rows']:,} rows"
        elif d["packed_from"]:
            rows += f" packed from {d['packed_from']:,}"
        return f"data        {rows}, {d['train_tokens']:,} tokens, longest {d['longest']}; {d['eval_rows']:,} evaluation rows"

    def _memory_lines(self) -> list[str]:
        m = self.memory
        parts = [
            ("frozen weights", m.frozen), ("trained weights", m.trained), ("gradients", m.gradients), ("optimizer", m.optimizer),
            (f"activations of {m.rows} x {m.length} tokens", m.activations), ("loss and backward", m.working), ("update", m.update),
            ("evaluation", m.evaluation), ("a sample", m.sampling or 0),
            ("this process, without a model", self.process),
        ]  # fmt: skip
        has = f" of {shown(self.hardware.memory)}" if self.hardware.memory else ""
        # above half of what there is, `train` makes malloc give freed blocks back
        plenty = self.hardware.kind == "cpu" and self.peak <= self.hardware.memory // 2
        kept = f"; a process was seen to keep {KEPT} more of what was freed, since there is plenty" if plenty else ""
        lines = [f"memory      {shown(self.peak)}{has} at the peak{kept}"]
        lines += [f"  {name:<34}{shown(size):>10}" for name, size in parts if size]
        if m.not_simulated:
            lines.append(f"  without activations: this architecture could not be simulated ({m.not_simulated})")
        return lines


def plan(loaded: LoadedConfig) -> Plan:
    """Works out everything that can be known before the weights are loaded. Raises UsageError as `train` would."""
    config = loaded.config
    quiet_libraries()
    hardware = detect(config.model.device)
    device_type = "cpu" if hardware.kind == "cpu" else "cuda"
    check_settings(config.train, device_type=device_type)
    resolved = resolve_precision(config, loaded.sources, hardware)
    check_branch(config, resolved.precision)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config.data, tokenizer, seed=config.train.seed)
    architecture = load_architecture(config.model, tokenizer)
    notes = check_base(of_config(architecture), resolved.precision, config.model.name or "model.config")
    made = outline(architecture, config, resolved.precision, device_type=device_type)
    check_vocabulary(_inner(made.model), tokenizer)
    if resolved.precision.base == "nf4":
        notes += check_share(_inner(made.model), consent=config.model.allow_unquantised, kept_in=resolved.precision.unquantised)
    longest = len(data.longest(1)[0].input_ids)
    process = 0
    if device_type == "cpu":
        import torch

        process = peak_memory(torch.device("cpu"))

    prompts = prompts_from(config.run.samples, tokenizer, chat_template=data.chat_template) if config.run.samples else data.prompts
    pauses = Pauses.of(config, data, prompts)

    def simulate(checkpointing: Checkpointing) -> MemoryPlan:
        return plan_memory(
            made,
            config.train,
            resolved.precision,
            length=longest,
            checkpointing=checkpointing,
            device_type=device_type,
            packing=config.data.packing,
            pauses=pauses,
        )

    if config.train.gradient_checkpointing == AUTO:
        checkpointing, memory = auto_checkpointing(
            simulate, layers=len(checkpointable(made.model)), has=hardware.memory, besides=process, device_type=device_type
        )
    else:
        checkpointing = as_configured(made.model, config.train)
        memory = simulate(checkpointing)
    found = Plan(
        config=config,
        hardware=hardware,
        resolved=resolved,
        architecture=str(getattr(architecture, "model_type", "model")),
        trainable=made.trainable,
        total=made.total,
        data=_data(data),
        schedule=_schedule(config, rows=len(data.train), eval_rows=len(data.eval)),
        memory=memory,
        checkpointing=checkpointing,
        process=process,
        notes=tuple(notes),
    )
    if found.fits is False:
        recompute = "train.gradient_checkpointing=layers, " if checkpointing.kind == NONE else ""
        advice = f"{recompute}a smaller train.batch_size with more train.accumulate, or --preset qlora"
        found = Plan(
            **{
                **found.__dict__,
                "notes": (
                    *notes,
                    f"this will not fit into {shown(hardware.memory)}: {advice}",
                ),
            }
        )
    return found


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _data(data: LoadedData) -> dict[str, Any]:
    """Counts of the training rows as the run sees them: packed ones, and of a stream the first."""
    return {
        "train_rows": len(data.train),
        "eval_rows": len(data.eval),
        "train_tokens": int(sum(row_lengths(data.train))),
        "supervised_tokens": data.facts["train"]["supervised_tokens"],
        "longest": len(data.longest(1)[0].input_ids),
        "stream": data.stream is not None,
        "packed_from": data.facts["packing"]["rows"] if data.facts.get("packing") else None,
        "sources": source_lines(data.facts),
        "notes": list(data.facts["notes"]),
    }


def _schedule(config: RunConfig, *, rows: int, eval_rows: int) -> dict[str, Any]:
    train = config.train
    when = Schedule.of(config, rows=rows, eval_rows=eval_rows)
    per_step = train.batch_size * train.accumulate
    return {
        "steps": when.total,
        "rows_per_step": per_step,
        "epochs": when.total * per_step / rows,
        "learning_rate": train.learning_rate,
        "last_learning_rate": learning_rate(train, when.total, when.total),
        "shape": train.schedule,
        "warmup": warmup_steps(train, when.total),
        "eval_every": when.eval_every,
        "save_every": when.save_every,
        "sample_every": when.sample_every,
    }
