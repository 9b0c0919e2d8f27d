"""Implements `isotype plan`, which describes what a run would do (precision, parameters, data,
memory, schedule). `isotype plan` does not load the weights and does not write a run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.schema import RunConfig
from ..distributed.rank import Batching
from ..environment.hardware import Hardware, detect, lookup_hardware
from ..errors import UsageError
from ..precision.resolution import Resolved
from ..wording import format_binary_bytes, pluralise
from .console import quiet_libraries
from .device_setup import DeviceSetup, check_run, prepare_data
from .duration import TimeEstimate, estimate_time
from .header import attention_line
from .memory.blocks import BLOCKS, OffloadPlan, plan_offload
from .memory.choice import planned_checkpointing
from .memory.device import memory_limit, memory_saving_advice, overhead_memory
from .memory.plan import MemoryPlan, plan_with_offload
from .memory.recomputation import AUTO, Checkpointing
from .parallel import HYBRID, REPLICATE, SHARD, Parallel, choose_by_plan
from .schedule import RunSchedule, learning_rate, repeated_rows_warning, warmup_steps
from .step import peak_memory
from .task import ModelOutline, StepOutline, Task, evaluation_batch_size

# the most memory beyond its plan that a process was measured to use if malloc keeps freed memory
RETAINED_MEMORY = "up to 340 MiB"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run.

    resolved          the precision, with the reason for each dtype
    architecture      the model in words
    attention         the attention implementation, with the reason for it
    trainable, total  the number of trained parameters, and of all parameters
    data              the counts and settings of the data, for `--json`
    data_lines        the same as lines of text
    schedule          the numbers of steps, epochs and rows per step
    process_bytes     on a CPU, the bytes that this process uses without a model; 0 on a GPU
    notes             remarks that are printed after the plan
    processes         how the work is divided; None for one process
    offload           the layers and bytes of `model.offload`; None without it
    alternatives      if the run does not fit into the memory of the GPU: other settings, and the
                      bytes at their peak
    row_name          what the task calls a row of its data
    time              the estimated time of the run; None for a device other than this machine's CPU
    model_outline     the run's model without weights, with which other settings can be planned
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
    process_bytes: int = 0
    notes: Sequence[str] = field(default=())
    processes: ProcessesPlan | None = None
    offload: OffloadPlan | None = None
    time: TimeEstimate | None = None
    alternatives: Mapping[str, int] = field(default_factory=dict)
    row_name: str = "row"
    model_outline: ModelOutline | None = field(default=None, repr=False, compare=False)

    @property
    def peak(self) -> int:
        return self.memory.peak + self.process_bytes

    @property
    def fits(self) -> bool | None:
        """True if the peak is at most the `memory_limit` of the device, None if the size of its
        memory is unknown.
        """
        if self.hardware.memory:
            return self.peak <= memory_limit(self.hardware.memory)
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.hardware.to_dict(),
            "precision": {
                "preset": self.resolved.preset,
                "why": self.resolved.preset_reason,
                "roles": self.resolved.to_dict(),
            },
            "warnings": [warning.to_dict() for warning in self.resolved.warnings],
            "attention": self.attention,
            "parameters": {
                "architecture": self.architecture,
                "trainable": self.trainable,
                "total": self.total,
            },
            "data": self.data,
            "schedule": self.schedule,
            "checkpointing": {
                **self.checkpointing.to_settings(),
                "of": self.checkpointing.layer_count,
                "reason": self.checkpointing.reason,
            },
            **({} if self.time is None else {"time": self.time.to_dict()}),
            "memory": {
                **self.memory.to_dict(),
                "process": self.process_bytes,
                "peak_with_process": self.peak,
                "fits": self.fits,
            },
            **({"alternatives": dict(self.alternatives)} if self.alternatives else {}),
            **({} if self.offload is None else {"offload": dict(self.offload.__dict__)}),
            "notes": list(self.notes),
            **({} if self.processes is None else {"processes": self.processes.to_dict()}),
        }

    def to_text(self) -> str:
        schedule = self.schedule
        # the preset's reason is printed once, above the roles
        preset_reason = self.resolved.preset_reason
        roles = [
            (role, value, "" if preset_reason.startswith(reason) else reason)
            for role, value, reason in self.resolved.list_roles()
        ]
        name_width = max(10, *(len(role) + 1 for role, _, _ in roles))
        value_width = max(len(value) for _, value, _ in roles)
        lines = [
            (
                f"device      {self.hardware.name} ({self.hardware.generation}), bf16"
                f" {self.hardware.bf16}"
            ),
            f"precision   {self.resolved.preset}: {self.resolved.preset_reason}",
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
                f"schedule    {pluralise(schedule['steps'], 'step')} of"
                f" {pluralise(schedule['rows_per_step'], self.row_name)} ({schedule['epochs']:.3g} epochs), learning"
                f" rate {schedule['learning_rate']:g} {schedule['shape']}, {schedule['warmup']} of them warm-up, ends at"
                f" {schedule['last_learning_rate']:.2g}"
            ),
            (
                f"  {_format_interval('evaluation', schedule['eval_every'])},"
                f" {_format_interval('checkpoint', schedule['save_every'])}, {_format_interval('samples', schedule['sample_every'])}"
            ),
            *([f"  {schedule['evaluation']}"] if schedule["evaluations"] else []),
            *([f"  {schedule['note']}"] if schedule["note"] else []),
            *([f"time        {self.time}"] if self.time is not None else []),
            *([f"attention   {self.attention}"] if self.attention else []),
            f"recompute   {self.checkpointing}",
            *([] if self.offload is None else [f"offload     {self.offload}"]),
            *self._memory_lines(),
            *self._alternative_lines(),
            *([] if self.processes is None else self.processes.lines()),
            *[
                f"warning     {warning.code} {warning.message}; {warning.fix}"
                for warning in self.resolved.warnings
            ],
            *[f"note        {note}" for note in self.notes],
        ]
        return "\n".join(lines)

    def _alternative_lines(self) -> list[str]:
        if not self.alternatives:
            return []
        fitting = {
            settings: peak
            for settings, peak in self.alternatives.items()
            if peak <= memory_limit(self.hardware.memory)
        }
        if fitting:
            width = max(map(len, fitting))
            rows = [
                f"  {settings:<{width}}  {format_binary_bytes(peak)}"
                for settings, peak in fitting.items()
            ]
            return ["fits with", *rows]
        settings, peak = min(self.alternatives.items(), key=lambda item: item[1])
        return [
            f"least       {format_binary_bytes(peak)} with {settings}: too much for this device"
        ]

    def _memory_lines(self) -> list[str]:
        memory = self.memory
        parts = [
            ("frozen weights", memory.frozen),
            ("trained weights", memory.trained),
            ("gradients", memory.gradients),
            ("optimizer", memory.optimizer),
            (f"activations of {memory.rows} x {memory.length}", memory.activations),
            ("loss and backward", memory.working),
            ("update", memory.update),
            ("evaluation", memory.evaluation),
            ("a sample", memory.sampling or 0),
            ("this process, without a model", self.process_bytes),
        ]
        limit_text = (
            f" of {format_binary_bytes(self.hardware.memory)}" if self.hardware.memory else ""
        )
        # where a run needs more than half of the memory, `train` makes malloc return freed blocks
        has_plenty = self.hardware.kind == "cpu" and self.peak <= self.hardware.memory // 2
        if has_plenty:
            retained_note = (
                f"; the process may keep {RETAINED_MEMORY} of freed memory on top of this"
            )
        else:
            retained_note = ""
        lines = [
            f"memory      {format_binary_bytes(self.peak)}{limit_text} at the peak{retained_note}"
        ]
        lines += [f"  {name:<34}{format_binary_bytes(size):>10}" for name, size in parts if size]
        if memory.not_simulated:
            lines.append(
                "  without activations: this architecture could not be simulated"
                f" ({memory.not_simulated})"
            )
        return lines


def plan_run(
    task: Task, sources: Mapping[str, str], *, device: str | None = None, gpus: int | None = None
) -> Plan:
    """Computes everything about a run that can be known before the weights are loaded. Raises
    UsageError in the same cases as `train`.

    device  the name of a device whose published specifications the plan uses; by default the device
            of this machine
    gpus    if set, also plans for this number of processes, each on its own GPU
    """
    batching = None
    if gpus is not None:
        batching = split_step(task, gpus)
        eval_rows = evaluation_batch_size(task.config.train)
        rows = {
            "batch_size": batching.micro_batch_size,
            "accumulate": batching.micro_batches,
            "eval_batch_size": eval_rows,
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
    device_setup = prepare_data(task, sources, hardware)
    precision = device_setup.resolved.precision
    model_outline = task.outline_model(precision, device_type=device_setup.device.type)
    architecture, notes = task.model_notes(model_outline, precision)
    step_outline = task.outline_largest_step(precision)
    if device_setup.device.type == "cpu":
        device_setup.process_bytes = peak_memory(device_setup.device)
    process_bytes = overhead_memory(device_setup.process_bytes)
    checkpointing, memory = planned_checkpointing(
        task,
        device_setup,
        model_outline,
        step_outline,
        available=hardware.memory,
        overhead=process_bytes,
    )
    estimate = None
    if hardware.kind == "cpu" and gpus is None:
        run_schedule = RunSchedule.from_config(config, rows=task.rows, eval_rows=task.eval_rows)
        estimate = estimate_time(
            task, model_outline, step_outline, run_schedule, precision, checkpointing
        )
    peak = memory.peak + process_bytes
    if hardware.memory and peak > memory_limit(hardware.memory):
        advice = memory_saving_advice(config, checkpointing.kind)
        notes = [*notes, f"{_excess_text(peak, hardware.memory)}: {advice}"]
    return Plan(
        processes=(
            None
            if gpus is None or batching is None
            else plan_processes(
                task,
                device_setup,
                model_outline,
                step_outline,
                batching,
                gpus,
                whole_model=(checkpointing, memory),
            )
        ),
        config=config,
        hardware=hardware,
        resolved=device_setup.resolved,
        architecture=architecture,
        attention=attention_line(
            model_outline.model,
            config.model.attention,
            precision,
            device_type=device_setup.device.type,
        ),
        trainable=model_outline.trainable,
        total=model_outline.total,
        data=task.plan_facts(),
        data_lines=task.plan_lines(),
        schedule=_schedule_facts(
            config,
            rows=task.rows,
            eval_rows=task.eval_rows,
            stream=config.data.stream,
            samples=task.samples,
            row_name=task.metric_names.row_noun,
        ),
        memory=memory,
        checkpointing=checkpointing,
        process_bytes=process_bytes,
        time=estimate,
        offload=plan_offload(
            model_outline.model,
            hardware,
            micro_batches=config.train.accumulate
            if batching is None
            else len(batching.local_micro_batches),
            compute=precision.compute,
            flops=step_outline.block_flops,
        ),
        notes=tuple(notes),
        row_name=task.metric_names.row_noun,
        model_outline=model_outline,
    )


def _excess_text(peak: int, device_bytes: int) -> str:
    """Says in words that a peak above `memory_limit` may not or will not fit."""
    if peak > device_bytes:
        return f"this will not fit into {format_binary_bytes(device_bytes)}"
    limit = format_binary_bytes(memory_limit(device_bytes))
    return (
        f"this may not fit: of {format_binary_bytes(device_bytes)} a run can use about {limit},"
        " because the driver, other programs and freed memory need the rest"
    )


def plan_peaks(
    task: Task,
    offload_task: Task | None,
    sources: Mapping[str, str],
    hardware: Hardware,
    model_outline: ModelOutline | None = None,
) -> tuple[int, int | None]:
    """Plans the peak memory of a run on a GPU. Also plans the peak of the same run with its frozen
    blocks in host memory; the second number is None if the run cannot keep its blocks there.

    task           a run that recomputes every layer
    offload_task   the same run with `model.offload: blocks`; None if only the first peak is needed
    model_outline  the model of the run, if it was outlined before; its blocks are marked as
                   offloaded
    Raises         UsageError if the settings of `task` are not valid
    """
    device_setup = prepare_data(task, sources, hardware)
    precision = device_setup.resolved.precision
    if model_outline is None:
        model_outline = task.outline_model(precision, device_type=device_setup.device.type)

    def plan_step(task: Task) -> MemoryPlan:
        _, memory = planned_checkpointing(
            task,
            device_setup,
            model_outline,
            task.outline_largest_step(precision),
            available=hardware.memory,
            overhead=0,
        )
        return memory

    memory = plan_step(task)
    if offload_task is None:
        return memory.peak, None
    try:
        check_run(offload_task, sources, hardware)
        offload_memory = plan_with_offload(model_outline, memory)
        if memory.sampling:  # a second model that samples need may be in host memory too
            offload_task.load_data()
            offload_memory = plan_step(offload_task)
    except UsageError:
        return memory.peak, None
    return memory.peak, offload_memory.peak


def _format_interval(event: str, steps: int) -> str:
    if steps > 1:
        return f"{event} every {steps} steps"
    if steps:
        return f"{event} every step"
    return f"no {event}"


def _schedule_facts(
    config: RunConfig, *, rows: int, eval_rows: int, stream: bool, samples: int, row_name: str
) -> dict[str, Any]:
    train = config.train
    schedule = RunSchedule.from_config(config, rows=rows, eval_rows=eval_rows)
    rows_per_step = train.batch_size * train.accumulate
    return {
        "steps": schedule.total,
        "rows_per_step": rows_per_step,
        "epochs": schedule.total * rows_per_step / rows,
        "learning_rate": train.learning_rate,
        "last_learning_rate": learning_rate(train, schedule.total, schedule.total),
        "shape": train.schedule,
        "warmup": warmup_steps(train, schedule.total),
        "eval_every": schedule.eval_every,
        "evaluations": schedule.evaluations,
        "evaluated_rows": schedule.evaluated_rows,
        "evaluation": schedule.describe_evaluation(row_name),
        "save_every": schedule.save_every,
        "sample_every": schedule.sample_every if samples else 0,
        "note": None if stream else repeated_rows_warning(rows_per_step, rows),
    }


GPUS_PER_MACHINE = 8  # assumed for a plan of more GPUs


@dataclass(frozen=True)
class ProcessesPlan:
    """The plan of several processes.

    processes      number of processes, one per GPU
    nodes          number of machines
    micro_batches  number of micro-batches of one process in a step
    rows           number of rows of a micro-batch
    kinds          maps a kind of parallelism to the recomputation and the memory of one process
    parallel       the kind that `auto` chooses
    """

    processes: int
    nodes: int
    micro_batches: int
    rows: int
    kinds: Mapping[str, tuple[Checkpointing, MemoryPlan]]
    parallel: Parallel

    def to_dict(self) -> dict[str, Any]:
        return {
            "processes": self.processes,
            "machines": self.nodes,
            "micro_batches": self.micro_batches,
            "rows": self.rows,
            "kinds": {
                kind: {"memory": memory.to_dict(), "checkpointing": checkpointing.to_settings()}
                for kind, (checkpointing, memory) in self.kinds.items()
            },
            "auto": {"kind": self.parallel.kind, "reason": self.parallel.reason},
        }

    def lines(self) -> list[str]:
        if self.nodes == 1:
            machines = "one machine"
        else:
            machines = f"{self.nodes} machines of {self.processes // self.nodes}"
        return [
            (
                f"processes   {self.processes} on {machines}, each {self.micro_batches} x {self.rows}"
                f" rows of each step: {self.parallel}"
            ),
            f"  {'kind':<11}{'memory per process':>18}   recomputed",
            *(
                f"  {kind:<11}{format_binary_bytes(memory.peak):>18}   {checkpointing.kind}"
                for kind, (checkpointing, memory) in self.kinds.items()
            ),
        ]


def split_step(task: Task, processes: int) -> Batching:
    """Splits a step over processes. Raises UsageError if this number of processes cannot share a
    step, or if one of the machines would use only some of its GPUs.
    """
    if processes > GPUS_PER_MACHINE and processes % GPUS_PER_MACHINE:
        raise UsageError(
            f"--gpus {processes}: machines of {GPUS_PER_MACHINE} are planned for, and the last one"
            " would not be full",
            fix=(
                f"--gpus {processes // GPUS_PER_MACHINE * GPUS_PER_MACHINE} or"
                f" {(processes // GPUS_PER_MACHINE + 1) * GPUS_PER_MACHINE}"
            ),
        )
    return Batching.plan_step(task.config.train, size=processes)


def plan_processes(
    task: Task,
    device_setup: DeviceSetup,
    model_outline: ModelOutline,
    step_outline: StepOutline,
    batching: Batching,
    processes: int,
    *,
    whole_model: tuple[Checkpointing, MemoryPlan],
) -> ProcessesPlan:
    """Plans the memory of one process for each kind of parallelism.

    task         a task whose setting `train.batch_size` is the number of rows that one process has
                 in a micro-batch
    whole_model  the plan of a process that has the whole model
    """
    available = device_setup.hardware.memory
    nodes = max(1, processes // GPUS_PER_MACHINE)
    kinds = {REPLICATE: whole_model}
    config = task.config
    peak = whole_model[1].peak
    for kind in (
        () if config.model.offload == BLOCKS else (SHARD, HYBRID) if nodes > 1 else (SHARD,)
    ):
        parts = processes // nodes if kind == HYBRID else processes
        kinds[kind] = planned_checkpointing(
            task,
            device_setup,
            model_outline,
            step_outline,
            available=available,
            overhead=0,
            parts=parts,
        )
    kind_setting = config.parallel.kind
    if kind_setting == AUTO:
        parallel = choose_by_plan(peak, available, lambda: peak, config=config)
    else:
        parallel = Parallel(kind_setting, "parallel.kind")
    return ProcessesPlan(
        processes,
        nodes,
        len(batching.local_micro_batches),
        batching.micro_batch_size,
        kinds,
        parallel,
    )
