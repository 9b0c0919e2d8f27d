"""Renders chat templates in a separate process with limits on time, memory and length of the text.
A template is a program that the author of the tokenizer wrote. Jinja's sandbox limits neither its
time, nor its memory, nor the length of its text.

The process is forked when the first conversation is rendered. The child process has a copy of the
tokenizer. It closes all files of the parent process, and ends when the parent process ends. The
limits work on Linux only. On other systems, the parent process renders without limits. The parent
process also renders without limits if the arguments cannot be pickled, for example if a tool is a
function.
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
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import jinja2

MAX_SECONDS = 10.0  # limit of processor time for one conversation; usual templates take 0.1 ms
MAX_MEMORY = 2 << 30  # limit in bytes, in addition to the memory that the process has at its start
MAX_CHARACTERS = 1 << 26  # largest length of a rendered conversation
# limits for the conversations that are rendered in advance: bytes of requests, characters of texts
MAX_PREPARED_BYTES = 1 << 24
MAX_PREPARED_CHARACTERS = 1 << 24
MAX_PROCESSES = 4  # largest number of child processes; each tokenizer has its own process
# exceptions of pickle for a value that cannot be sent to another process
_UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError, RecursionError)


class TemplateLimitError(Exception):
    """Raised for a template that exceeds a limit. The message describes the limit."""


class TemplateRefusal(Exception):
    """Raised if a template rejects a conversation or fails. The message is one line."""


def render_text(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Calls `tokenizer.apply_chat_template(messages, tokenize=False, **options)` with limits on its
    time, its memory and the length of the text.

    Raises  TemplateLimitError if a limit is exceeded; TemplateRefusal if the template rejects the
            conversation or fails; RecursionError or jinja2.TemplateSyntaxError if the template
            cannot be used; UnicodeEncodeError if a text contains half of a surrogate pair
    """
    request = {"conversation": list(messages), "tokenize": False, **options}
    if sys.platform != "linux":
        return _unpack_text(_render(tokenizer, request))
    try:
        message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    except _UNSENDABLE:
        return _unpack_text(_render(tokenizer, request))
    answer = _tokenizer_process(tokenizer).take_prepared(message)
    if answer is None:
        answer = _tokenizer_process(tokenizer).answer(message)
    return _unpack_text(answer)


def prepare_texts(
    tokenizer: Any, conversations: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
) -> None:
    """Lets the child process render these conversations while the parent process does other work.
    Each conversation is a pair (messages, options), with the arguments of a later call of
    `render_text`. The texts of the last two calls of this function are kept. The child process
    stops when its texts exceed the limits. `render_text` then renders each remaining conversation
    when it is called.

    A separate request and answer for each text would take as long as the rendering itself, so all
    conversations are sent together.
    """
    if sys.platform != "linux":
        return
    requests: dict[bytes, None] = {}
    total = 0
    for messages, options in conversations:
        request = {"conversation": list(messages), "tokenize": False, **options}
        try:
            message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        except _UNSENDABLE:
            continue
        total += len(message)
        if total > MAX_PREPARED_BYTES:
            break
        requests[message] = None
    if requests:
        _tokenizer_process(tokenizer).prepare(list(requests))


class _RenderProcess:
    """A child process that renders with one tokenizer. The child process uses the tokenizer in the
    state that it had when the process was forked.
    """

    def __init__(self, tokenizer: Any) -> None:
        # while this reference exists, no other tokenizer gets the same id()
        self.tokenizer = tokenizer
        self.owner_pid = os.getpid()
        self._lock = threading.Lock()
        # the requests whose answers were not received yet
        self._pending: list[bytes] = []
        # request -> answer, for each of the last two lists of requests
        self._prepared: deque[dict[bytes, dict[str, Any]]] = deque(maxlen=2)
        parent_end, child_end = Pipe()
        with warnings.catch_warnings():
            # Python warns about forking with threads; the child needs none of the parent's threads
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child == 0:
            _serve(tokenizer, child_end)
        child_end.close()
        self._connection: Connection = parent_end

    def prepare(self, messages: list[bytes]) -> None:
        """Sends a list of requests to the child process."""
        with self._lock:
            self._receive_prepared()
            if self._connection.closed:
                return
            try:
                self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))
                self._pending = messages
            except OSError:
                self._stop()
            except BaseException:
                self._stop()
                raise

    def take_prepared(self, message: bytes) -> dict[str, Any] | None:
        """Returns the answer to a request that was sent by `prepare`. Returns None if there is no
        such answer, or if the child process has ended.
        """
        with self._lock:
            for answers in self._prepared:
                if message in answers:
                    return answers[message]
            if not self._pending:
                return None
            return self._receive_prepared().get(message)

    def _receive_prepared(self) -> dict[bytes, dict[str, Any]]:
        """Receives the answers to the list of requests that `prepare` sent last."""
        if not self._pending:
            return {}
        messages = self._pending
        self._pending = []
        try:
            received = json.loads(self._connection.recv_bytes())
        # one of the conversations exceeds a limit: each is rendered on its own when it is needed
        except (EOFError, OSError):
            self._stop()
            return {}
        except BaseException:
            self._stop()
            raise
        answers = dict(zip(messages, received))
        self._prepared.append(answers)
        return answers

    def answer(self, message: bytes) -> dict[str, Any]:
        with self._lock:
            self._receive_prepared()
            is_ended = self._connection.closed
        if is_ended:
            return _tokenizer_process(self.tokenizer).answer(message)
        with self._lock:
            try:
                self._connection.send_bytes(message)
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
            except (EOFError, OSError):
                status = self._stop()
                limit = (
                    f"{MAX_SECONDS:g} s" if status == signal.SIGPROF else f"{MAX_MEMORY >> 20} MiB"
                )
                return {"limit": f"takes more than {limit} for it"}
            # after Ctrl-C the pending answer would be taken for the answer of the next request
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> int:
        """Ends the child process. If a signal ended the child process, returns the number of this
        signal, otherwise 0.
        """
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
        if self.owner_pid == os.getpid():
            self._stop()


_processes: OrderedDict[Any, _RenderProcess] = OrderedDict()
_processes_lock = threading.Lock()


def _tokenizer_key(tokenizer: Any) -> Any:
    """Returns a key that identifies a tokenizer and its special tokens, because templates read
    these tokens.
    """
    return id(tokenizer), repr(tokenizer.special_tokens_map)


def _tokenizer_process(tokenizer: Any) -> _RenderProcess:
    with _processes_lock:
        key = _tokenizer_key(tokenizer)
        process = _processes.get(key)
        if process is not None and process.owner_pid == os.getpid():
            _processes.move_to_end(key)
            return process
        if process is None and len(_processes) >= MAX_PROCESSES:
            _, oldest = _processes.popitem(last=False)
            oldest.close()
        process = _processes[key] = _RenderProcess(tokenizer)
        return process


@atexit.register
def close_processes() -> None:
    while _processes:
        _, process = _processes.popitem()
        process.close()


def _serve(tokenizer: Any, connection: Connection) -> NoReturn:
    """Runs in the child process and answers requests until the parent closes the connection."""
    try:
        gc.freeze()  # the parent process finalises the objects that exist here
        _close_files(connection.fileno())
        for signal_number in (
            signal.SIGINT,
            signal.SIGHUP,
        ):  # the parent process handles these signals
            signal.signal(signal_number, signal.SIG_IGN)
        for signal_number in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(signal_number, signal.SIG_DFL)
        _limit_memory()
        while True:
            request = pickle.loads(connection.recv_bytes())  # written by the parent process
            answer: Any
            if isinstance(request, list):
                answer = _render_list(tokenizer, request)
            else:
                signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
                answer = _render(tokenizer, request)
            content = json.dumps(answer).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(content)
    except BaseException:
        os._exit(0)


def _render_list(tokenizer: Any, messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """Renders conversations one by one, until all texts together exceed a limit."""
    answers = []
    characters = 0
    for message in messages:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        answer = _render(tokenizer, pickle.loads(message))
        characters += len(answer.get("text", ""))
        if characters > MAX_PREPARED_CHARACTERS:
            break
        answers.append(answer)
    return answers


def _close_files(descriptor: int) -> None:
    """In the child process, closes every open file except the connection to the parent process.
    Otherwise the child would keep locks, sockets and pipes of the parent open.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(devnull, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm", "rb") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + MAX_MEMORY
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _render(tokenizer: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Renders a conversation. Returns a dictionary with the text, or with the reason why it could
    not be rendered. All values of the dictionary can be written as JSON.
    """
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
