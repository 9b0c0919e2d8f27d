"""The precision of a run, from its configuration and the device: for training it, and for loading it."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.schema import RunConfig
from ..environment.hardware import Hardware
from ..precision.resolve import Resolved, resolve


def resolve_precision(
    config: RunConfig, sources: Mapping[str, str], hardware: Hardware, task_roles: Mapping[str, str] | None = None
) -> Resolved:
    """The contract of this configuration on this hardware. Raises UsageError with every contradiction.

    task_roles  roles that only this kind of run has -> a dtype by default, or the role that is followed
    """
    return resolve(
        config.precision.model_dump(),
        device=hardware,
        adapter=config.adapter.kind,
        optimizer=config.train.optimizer,
        sources=sources,
        task_roles=task_roles,
    )
