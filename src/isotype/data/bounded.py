"""Limits the time, memory and text that a chat template may use for a conversation, since it is a program from elsewhere.

Jinja's sandbox blocks access to Python objects and limits `range`, but not nested loops or a text that a loop doubles.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UsageError

SECONDS = 10.0  # of processor time; stock templates take 0.1 ms a conversation
MEMORY = 2 << 30  # bytes beyond what the process holds
CHARACTERS = 1 << 26  # of a conversation's text
_FIX = "data.chat_template: FILE.jinja names another template"


class _OutOfTime(BaseException):
    """The template took too long. Not an Exception, so that no code handles it as an error of the template itself."""


@contextmanager
def bounded(place: str) -> Iterator[None]:
    """Runs a template under the limits within this block.

    Time is bounded in the main thread of a POSIX system, memory on Linux; elsewhere neither is.
    Raises  UsageError naming `place`
    """
    timed = _start_clock()
    limits = _limit_memory()
    try:
        yield
    except _OutOfTime:
        raise UsageError(f"{place}: the chat template takes more than {SECONDS:g} s for it", fix=_FIX) from None
    except MemoryError:
        raise UsageError(f"{place}: the chat template takes more than {MEMORY >> 20} MiB for it", fix=_FIX) from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if limits is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, limits)


def refuse_no_text(text: str, place: str) -> str:
    """The text, unless it is one that no tokenizer takes: too long, or with half a surrogate pair, which a template's literals may hold."""
    if len(text) > CHARACTERS:
        raise UsageError(f"{place}: the chat template makes {len(text):,} characters of it", fix=_FIX)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place}: the chat template writes half of a surrogate pair, which is not text", fix=_FIX) from None
    return text


def _ring(*_: Any) -> None:
    raise _OutOfTime


def _start_clock() -> bool:
    """Limits the CPU time of this process, not wall time, so that a busy machine does not refuse a good template."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGVTALRM) is not _ring:
        signal.signal(signal.SIGVTALRM, _ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    return True


def _limit_memory() -> tuple[int, int] | None:
    """Lowers the soft limit on address space; returns what it was, None where it cannot be set."""
    try:
        import resource

        held = _held()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY or soft > held + MEMORY:
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, hard))
            return soft, hard
    except (ImportError, OSError, ValueError):
        pass
    return None


def _held() -> int:
    """The process's address space now: a model may have been loaded since the last conversation. 11 of the 16 microseconds of a block."""
    import resource

    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
