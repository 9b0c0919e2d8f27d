"""`plan`: what `isotype train` would do, without weights and without a folder: precision,
parameters, data, memory, schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.schema import RunConfig
from ..distributed.rank import Batching
from ..environment.hardware import Hardware, detect, lookup_hardware
from ..errors import UsageError
from ..precision.resolve import Resolved
from ..wording import format_binary_bytes, pluralise
from .console import quiet_libraries
from .memory.blocks import BLOCKS, OffloadPlan, plan_offload
from .memory.device import less_memory
from .memory.plan import MemoryPlan
from .memory.recomputation import AUTO, Checkpointing
from .schedule import RunSchedule, learning_rate, repeated_rows_warning, warmup_steps
from .setup import HYBRID, REPLICATE, SHARD, Basis, Parallel, by_plan, planned_checkpointing, settle
from .start import attention_line
from .step import peak_memory
from .task import Outline, Task, micro_batch

KEPT = "up to 340 MiB"  # measured beyond the plan where nothing is given back


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run. `process`: bytes of this process without a model, which use the same
    memory on a CPU; 0 on a GPU.
    """

    config: RunConfig
    hardware: Hardware
    resolved: Resolved
    architecture: str
    attention: str
    trainable: int
    total: int
    data: dict[str, Any]
    data_lines: Sequence[str]
    schedule: dict[str, Any]
    memory: MemoryPlan
    checkpointing: Checkpointing
    process: int = 0
    notes: Sequence[str] = field(default=())
    processes: ProcessesPlan | None = None
    offload: OffloadPlan | None = None
    row: str = "row"

    @property
    def peak(self) -> int:
        return self.memory.peak + self.process

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None where that is unknown."""
        if self.hardware.memory:
            return self.peak <= self.hardware.memory
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.hardware.to_dict(),
            "precision": {
                "preset": self.resolved.preset,
                "why": self.resolved.why_preset,
                "roles": self.resolved.to_dict(),
            },
            "warnings": [f.to_dict() for f in self.resolved.warnings],
            "attention": self.attention,
            "parameters": {
                "architecture": self.architecture,
                "trainable": self.trainable,
                "total": self.total,
            },
            "data": self.data,
            "schedule": self.schedule,
            "checkpointing": {
                **self.checkpointing.as_settings(),
                "of": self.checkpointing.of,
                "reason": self.checkpointing.reason,
            },
            "memory": {
                **self.memory.to_dict(),
                "process": self.process,
                "peak_with_process": self.peak,
                "fits": self.fits,
            },
            **({} if self.offload is None else {"offload": dict(self.offload.__dict__)}),
            "notes": list(self.notes),
            **({} if self.processes is None else {"processes": self.processes.to_dict()}),
        }

    def as_text(self) -> str:
        s = self.schedule
        # a reason that is the preset's own is said once, above the roles
        why = self.resolved.why_preset
        roles = [
            (role, value, "" if why.startswith(reason) else reason)
            for role, value, reason in self.resolved.rows()
        ]
        name_width = max(10, *(len(role) + 1 for role, _, _ in roles))
        value_width = max(len(value) for _, value, _ in roles)
        lines = [
            (
                f"device      {self.hardware.name} ({self.hardware.generation}), bf16"
                f" {self.hardware.bf16}"
            ),
            f"precision   {self.resolved.preset}: {self.resolved.why_preset}",
            *[
                f"  {role:<{name_width}}{value:<{value_width}}  {reason}".rstrip()
                for role, value, reason in roles
            ],
            (
                f"model       {self.config.model.name or 'model.config'} ({self.architecture}):"
                f" {self.total:,} parameters, {self.trainable:,} trained"
                f" ({self.trainable / self.total:.2%})"
            ),
            f"data        {self.data_lines[0]}",
            *[f"  {line}" for line in self.data_lines[1:]],
            (
                f"schedule    {pluralise(s['steps'], 'step')} of"
                f" {pluralise(s['rows_per_step'], self.row)} ({s['epochs']:.3g} epochs), learning"
                f" rate {s['learning_rate']:g} {s['shape']}, {s['warmup']} of them warm-up, ends at"
                f" {s['last_learning_rate']:.2g}"
            ),
            (
                f"  {_every('evaluation', s['eval_every'])},"
                f" {_every('checkpoint', s['save_every'])}, {_every('samples', s['sample_every'])}"
            ),
            *([f"  {s['note']}"] if s["note"] else []),
            *([f"attention   {self.attention}"] if self.attention else []),
            f"recompute   {self.checkpointing}",
            *([] if self.offload is None else [f"offload     {self.offload}"]),
            *self._memory_lines(),
            *([] if self.processes is None else self.processes.lines()),
            *[f"warning     {f.code} {f.message}; {f.fix}" for f in self.resolved.warnings],
            *[f"note        {note}" for note in self.notes],
        ]
        return "\n".join(lines)

    def _memory_lines(self) -> list[str]:
        m = self.memory
        parts = [
            ("frozen weights", m.frozen),
            ("trained weights", m.trained),
            ("gradients", m.gradients),
            ("optimizer", m.optimizer),
            (f"activations of {m.rows} x {m.length}", m.activations),
            ("loss and backward", m.working),
            ("update", m.update),
            ("evaluation", m.evaluation),
            ("a sample", m.sampling or 0),
            ("this process, without a model", self.process),
        ]
        has = f" of {format_binary_bytes(self.hardware.memory)}" if self.hardware.memory else ""
        # above half of what there is, `train` makes malloc give freed blocks back
        plenty = self.hardware.kind == "cpu" and self.peak <= self.hardware.memory // 2
        if plenty:
            kept = (
                f"; a process was seen to keep {KEPT} more of what was freed, since there is plenty"
            )
        else:
            kept = ""
        lines = [f"memory      {format_binary_bytes(self.peak)}{has} at the peak{kept}"]
        lines += [f"  {name:<34}{format_binary_bytes(size):>10}" for name, size in parts if size]
        if m.not_simulated:
            lines.append(
                "  without activations: this architecture could not be simulated"
                f" ({m.not_simulated})"
            )
        return lines


def plan(
    task: Task, sources: Mapping[str, str], *, device: str | None = None, gpus: int | None = None
) -> Plan:
    """Works out everything that can be known before the weights are loaded. Raises UsageError as
    `train` would.

    device  plans for this one, as published, instead of the one that is here
    gpus    plans for a process on each of so many too
    """
    batching = None
    if gpus is not None:
        batching = batching_of(task, gpus)
        evaluated = micro_batch(task.config.train)
        rows = {
            "batch_size": batching.rows,
            "accumulate": batching.total,
            "eval_batch_size": evaluated,
        }
        task.config = task.config.model_copy(
            update={"train": task.config.train.model_copy(update=rows)}
        )
    config = task.config
    quiet_libraries()
    if device in (None, "cpu"):
        hardware = detect(config.model.device if device is None else "cpu")
    else:
        hardware = lookup_hardware(str(device))
    basis = settle(task, sources, hardware)
    precision = basis.resolved.precision
    made = task.outline(precision, device_type=basis.device.type)
    architecture, notes = task.model_notes(made, precision)
    process = peak_memory(basis.device) if basis.device.type == "cpu" else 0
    checkpointing, memory = planned_checkpointing(
        task, basis, made, has=hardware.memory, besides=process
    )
    peak = memory.peak + process
    if hardware.memory and peak > hardware.memory:
        how = less_memory(config, checkpointing.kind)
        notes = [*notes, f"this will not fit into {format_binary_bytes(hardware.memory)}: {how}"]
    return Plan(
        processes=(
            None
            if gpus is None or batching is None
            else plan_processes(task, basis, made, batching, gpus, whole=(checkpointing, memory))
        ),
        config=config,
        hardware=hardware,
        resolved=basis.resolved,
        architecture=architecture,
        attention=attention_line(
            made.model, config.model.attention, precision, device_type=basis.device.type
        ),
        trainable=made.trainable,
        total=made.total,
        data=task.plan_facts(),
        data_lines=task.plan_lines(),
        schedule=_schedule(
            config,
            rows=task.rows,
            eval_rows=task.eval_rows,
            stream=config.data.stream,
            samples=task.samples,
        ),
        memory=memory,
        checkpointing=checkpointing,
        process=process,
        offload=plan_offload(
            made.model,
            hardware,
            micro_batches=config.train.accumulate if batching is None else len(batching.own),
            compute=precision.compute,
            flops=task.step_outline(precision).block_flops,
        ),
        notes=tuple(notes),
        row=task.words.row,
    )


def _every(what: str, steps: int) -> str:
    if steps > 1:
        return f"{what} every {steps} steps"
    if steps:
        return f"{what} every step"
    return f"no {what}"


def _schedule(
    config: RunConfig, *, rows: int, eval_rows: int, stream: bool, samples: int
) -> dict[str, Any]:
    train = config.train
    when = RunSchedule.from_config(config, rows=rows, eval_rows=eval_rows)
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
        "sample_every": when.sample_every if samples else 0,
        "note": None if stream else repeated_rows_warning(per_step, rows),
    }


OF_A_MACHINE = 8  # GPUs


@dataclass(frozen=True)
class ProcessesPlan:
    """processes  one a GPU;  nodes  machines;  micro_batches  of each process in a step, of `rows`
                  rows;  kinds  the ways to share the
    work, with the plan of one process;  taken  what `auto` takes
    """

    processes: int
    nodes: int
    micro_batches: int
    rows: int
    kinds: Mapping[str, tuple[Checkpointing, MemoryPlan]]
    taken: Parallel

    def to_dict(self) -> dict[str, Any]:
        return {
            "processes": self.processes,
            "machines": self.nodes,
            "micro_batches": self.micro_batches,
            "rows": self.rows,
            "kinds": {
                kind: {"memory": m.to_dict(), "checkpointing": c.as_settings()}
                for kind, (c, m) in self.kinds.items()
            },
            "auto": {"kind": self.taken.kind, "reason": self.taken.reason},
        }

    def lines(self) -> list[str]:
        if self.nodes == 1:
            where = "one machine"
        else:
            where = f"{self.nodes} machines of {self.processes // self.nodes}"
        return [
            (
                f"processes   {self.processes} on {where}, each {self.micro_batches} x {self.rows}"
                f" rows of each step: {self.taken}"
            ),
            f"  {'kind':<11}{'memory a process':>18}   recomputed",
            *(
                f"  {kind:<11}{format_binary_bytes(memory.peak):>18}   {chosen.kind}"
                for kind, (chosen, memory) in self.kinds.items()
            ),
        ]


def batching_of(task: Task, processes: int) -> Batching:
    """Raises  UsageError for a number of processes that cannot share a step, or that fills no whole
    machines
    """
    if processes > OF_A_MACHINE and processes % OF_A_MACHINE:
        raise UsageError(
            f"--gpus {processes}: machines of {OF_A_MACHINE} are planned for, and the last one"
            " would not be full",
            fix=(
                f"--gpus {processes // OF_A_MACHINE * OF_A_MACHINE} or"
                f" {(processes // OF_A_MACHINE + 1) * OF_A_MACHINE}"
            ),
        )
    return Batching.of(task.config.train, size=processes)


def plan_processes(
    task: Task,
    basis: Basis,
    made: Outline,
    batching: Batching,
    processes: int,
    *,
    whole: tuple[Checkpointing, MemoryPlan],
) -> ProcessesPlan:
    """task its configuration has `batching.rows` as `train.batch_size`
    whole  the plan of a process that has the whole model
    """
    has = basis.hardware.memory
    nodes = max(1, processes // OF_A_MACHINE)
    kinds = {REPLICATE: whole}
    config = task.config
    peak = whole[1].peak
    for kind in (
        () if config.model.offload == BLOCKS else (SHARD, HYBRID) if nodes > 1 else (SHARD,)
    ):
        parts = processes // nodes if kind == HYBRID else processes
        kinds[kind] = planned_checkpointing(task, basis, made, has=has, besides=0, parts=parts)
    given = config.parallel.kind
    if given == AUTO:
        taken = by_plan(peak, has, lambda: peak, config=config)
    else:
        taken = Parallel(given, "parallel.kind")
    return ProcessesPlan(processes, nodes, len(batching.own), batching.rows, kinds, taken)
