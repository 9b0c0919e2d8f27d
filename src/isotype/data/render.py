"""Chat templates are rendered in a process of their own, under limits of time, memory and text: a
template is a program from whoever made the tokenizer, and Jinja's sandbox bounds none of these.

The process is a fork of this one, made at the first rendering: it has the tokenizer as it is, and
closes every file. It ends with this process. Linux only; elsewhere, and for what cannot be sent
(a function as a tool), this process renders without a limit.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import signal
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import jinja2

MAX_SECONDS = 10.0  # of processor time for a conversation; stock templates take 0.1 ms
MAX_MEMORY = 2 << 30  # bytes beyond what the process has at the start
MAX_CHARACTERS = 1 << 26  # of a conversation's text
MAX_PROCESSES = 4  # processes, one for each tokenizer
_UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError, RecursionError)


class TemplateLimitError(Exception):
    """The limit that a template exceeded, in words."""


class TemplateRefusal(Exception):
    """What a template said against a conversation, in one line."""


def render_text(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """`tokenizer.apply_chat_template(messages, tokenize=False, **options)` under the limits.

    Raises  TemplateLimitError; TemplateRefusal for an error of the template or its own refusal;
            RecursionError and jinja2.TemplateSyntaxError for a template that cannot be used;
            UnicodeEncodeError for half of a surrogate pair
    """
    request = {"conversation": list(messages), "tokenize": False, **options}
    if sys.platform != "linux":
        return _unpack_text(_render(tokenizer, request))
    try:
        message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    except _UNSENDABLE:
        return _unpack_text(_render(tokenizer, request))
    return _unpack_text(_tokenizer_process(tokenizer).answer(message))


class _Process:
    """One child with one tokenizer, as it was when the child was made."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer  # held, so that no other one gets its identity
        self.owner = os.getpid()
        self._lock = threading.Lock()
        parent_end, child_end = Pipe()
        with warnings.catch_warnings():
            # the child runs Python alone: no thread of this process is needed there
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child == 0:
            _serve(tokenizer, child_end)
        child_end.close()
        self._connection: Connection = parent_end

    def answer(self, message: bytes) -> dict[str, Any]:
        with self._lock:
            try:
                self._connection.send_bytes(message)
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
            except (EOFError, OSError):
                status = self._end()
                limit = (
                    f"{MAX_SECONDS:g} s" if status == signal.SIGPROF else f"{MAX_MEMORY >> 20} MiB"
                )
                return {"limit": f"takes more than {limit} for it"}
            except BaseException:  # Ctrl-C: an answer would be taken for the next one's
                self._end()
                raise

    def _end(self) -> int:
        """Ends the child; returns the signal that had ended it."""
        with suppress(KeyError):
            del _processes[_tokenizer_key(self.tokenizer)]
        self._connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if not ended:
                os.kill(self._child, signal.SIGKILL)
                _, status = os.waitpid(self._child, 0)
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return 0

    def close(self) -> None:
        if self.owner == os.getpid():
            self._end()


_processes: OrderedDict[Any, _Process] = OrderedDict()
_processes_lock = threading.Lock()


def _tokenizer_key(tokenizer: Any) -> Any:
    """Of a tokenizer as it is now: a template gets its special tokens."""
    return id(tokenizer), json.dumps(tokenizer.special_tokens_map, default=str)


def _tokenizer_process(tokenizer: Any) -> _Process:
    with _processes_lock:
        key = _tokenizer_key(tokenizer)
        process = _processes.get(key)
        if process is not None and process.owner == os.getpid():
            _processes.move_to_end(key)
            return process
        if process is None and len(_processes) >= MAX_PROCESSES:
            _, oldest = _processes.popitem(last=False)
            oldest.close()
        process = _processes[key] = _Process(tokenizer)
        return process


@atexit.register
def close_processes() -> None:
    while _processes:
        _, process = _processes.popitem()
        process.close()


def _serve(tokenizer: Any, connection: Connection) -> NoReturn:
    """The child: answers until this end of the connection closes."""
    try:
        gc.freeze()  # what is garbage here is the other process's to finalise
        _close_files(connection.fileno())
        for number in (signal.SIGINT, signal.SIGHUP):  # they are for the process that asks
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory()
        while True:
            request = pickle.loads(connection.recv_bytes())  # from this program
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
            answer = _render(tokenizer, request)
            content = json.dumps(answer).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(content)
    except BaseException:
        os._exit(0)


def _close_files(descriptor: int) -> None:
    """Closes every file but one: a lock, a socket or a pipe would stay held."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm", "rb") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = held + MAX_MEMORY
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _render(tokenizer: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The text, or why there is none, as JSON."""
    try:
        text: str = tokenizer.apply_chat_template(**request)
    except MemoryError:
        return {"limit": f"takes more than {MAX_MEMORY >> 20} MiB for it"}
    except RecursionError as error:
        return {"nested": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": error.message, "line": error.lineno}
    except Exception as error:
        lines = str(error).splitlines() or [repr(error)]
        error_type = type(error).__name__
        template_errors = (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError)
        return {
            "refusal": lines[0].strip("'")
            if isinstance(error, template_errors)
            else f"{error_type}: {lines[0]}"
        }
    if len(text) > MAX_CHARACTERS:
        return {"limit": f"makes {len(text):,} characters of it"}
    return {"text": text}


def _unpack_text(answer: Mapping[str, Any]) -> str:
    if "limit" in answer:
        raise TemplateLimitError(answer["limit"])
    if "refusal" in answer:
        raise TemplateRefusal(answer["refusal"])
    if "nested" in answer:
        raise RecursionError(answer["nested"])
    if "syntax" in answer:
        raise jinja2.TemplateSyntaxError(answer["syntax"], answer["line"])
    text: str = answer["text"]
    text.encode()
    return text
