"""Defines `precision.json`, the file into which a run writes the dtypes that it observes while it
trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..observe import Observation
from ..observe.record import from_file_record, merge_observation, to_file_record
from ..precision.resolution import Resolved
from .folder import RunFolder

PRECISION_FILE = "precision.json"


class PrecisionRecord:
    """Writes and reads the file with the dtypes that one run has observed.

    task_roles   the roles (purposes of tensors, such as `grads`) that only this kind of run has
    lora_branch  `model.lora_branch`: "fp32" if the matrix products of the adapters are computed in
                 fp32, else "compute"
    is_writer    whether this process writes the file. Only the first process writes the file; the
                 other processes only check their own observations
    """

    def __init__(
        self,
        folder: RunFolder,
        resolved: Resolved,
        task_roles: Iterable[str] = (),
        *,
        lora_branch: str = "compute",
        is_writer: bool = True,
    ) -> None:
        self.folder = folder
        self.resolved = resolved
        self.task_roles = tuple(task_roles)
        self.is_writer = is_writer
        if lora_branch == "fp32":
            self._lora_branch_entry = {
                "lora_branch": {"value": "fp32", "reason": "model.lora_branch"}
            }
        else:
            self._lora_branch_entry = {}
        self._observed: dict[str, Any] = {}

    @property
    def observed(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the dtypes at the last observation: role (the purpose of a tensor, such as
        `grads`) -> dtype -> number of tensors.
        """
        observed: Mapping[str, Mapping[str, int]] = self._observed.get("observed", {})
        return observed

    def add(self, observation: Observation) -> None:
        """Adds an observation. Roles that are not in the observation keep their earlier counts.
        Raises DtypeError DT003 if an observed dtype is not the dtype that the run's precision sets.
        """
        self._observed = merge_observation(self._observed, observation)
        if self.is_writer:
            declared = {
                "precision": self.resolved.text,
                "preset": self.resolved.preset,
                "declared": {**self.resolved.to_dict(), **self._lora_branch_entry},
            }
            written = to_file_record(
                self._observed, self.task_roles, compute=self.resolved.precision.compute
            )
            self.folder.write_json(PRECISION_FILE, {**declared, **written})
        observation.raise_if_violated()

    def set_watched_phases(self, names: Iterable[str]) -> None:
        """Sets the names of the phases in which dtypes are recorded, such as generation. The dtypes
        in training steps and in files are always recorded. The record lists all other phases as
        `not watched`.
        """
        self._observed["watched"] = list(names)

    def restore(self, step: int) -> None:
        """When a run is resumed, reads the observations that it recorded up to `step`. If the file
        is missing or damaged, the record starts empty.
        """
        self._observed = {}
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._observed = from_file_record(self.folder.read_json(PRECISION_FILE), step)
