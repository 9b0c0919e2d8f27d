"""Encodes errors as JSON, so that every process can raise the error of one."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..errors import IsotypeError, RunError


def as_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, IsotypeError):
        return {"kind": type(error).__name__, "message": error.message, "code": error.code, "fix": error.fix}
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return {"kind": type(error).__name__, "message": f"{type(error).__name__}: {first}" if first else type(error).__name__}


def from_json(told: dict[str, Any], *, of: str | None = None) -> BaseException:
    """Decodes the error; one that is no IsotypeError becomes a RunError. `of`: the process that raised it, for the message."""
    if told["kind"] == "KeyboardInterrupt":
        return KeyboardInterrupt()
    kind = getattr(errors, told["kind"], RunError)
    message = f"{of}: {told['message']}" if of else told["message"]
    return kind(message, code=told.get("code"), fix=told.get("fix"))
