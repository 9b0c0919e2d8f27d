"""Sends requests to one address. Redirects are not followed, so that the key is only sent to this
address. Answers are limited in time and size.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import IsotypeError, UsageError
from ...wording import remove_control_characters
from .server import RefusedError

KEY_VARIABLE = "ISOTYPE_SERVER_KEY"
DEFAULT_SECONDS = 60.0  # time limit of a request
_MAX_BYTES = 64 << 20  # of one answer
_CHUNK = 1 << 16  # bytes of an answer that are read at once
_MESSAGE_LENGTH = 200  # characters of a server's message that are shown


class UnknownCallError(UsageError):
    """Raised if the server does not know the path of a request."""


@dataclass(frozen=True)
class Address:
    """The address of a server.

    prefix  the path before `/v1`
    """

    url: str
    is_encrypted: bool
    host: str
    port: int
    prefix: str


def parse_address(url: str) -> Address:
    """Reads the address that the user gave. Raises UsageError for a scheme that is not supported,
    for a user name or password in the address, and for an address without a host.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--served {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--served {url}: expected an address such as http://127.0.0.1:8080")
    if parts.username is not None or parts.password is not None or parts.query:
        raise UsageError(
            "--served: an address without user name, password and query",
            fix=f"a key is read from the environment variable {KEY_VARIABLE}",
        )
    is_encrypted = parts.scheme == "https"
    default_port = 443 if is_encrypted else 80
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown_port = "" if port is None else f":{port}"
    address = f"{parts.scheme}://{host}{shown_port}{prefix}"
    return Address(address, is_encrypted, parts.hostname, port or default_port, prefix)


class Connection:
    """Sends requests to one address, each over a new connection.

    seconds  the time limit of one request
    """

    def __init__(self, address: Address, *, seconds: float = DEFAULT_SECONDS) -> None:
        self.address = address
        self.seconds = seconds
        self.key = os.environ.get(KEY_VARIABLE, "")
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise UsageError(f"{KEY_VARIABLE}: a key has only printable ASCII characters")

    def get(self, path: str) -> Any:
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._request("POST", path, json.dumps(body).encode())

    def try_get(self, path: str) -> Any:
        """Returns the answer, or None if the server does not know this path."""
        try:
            return self.get(path)
        except UnknownCallError:
            return None

    def try_post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the answer, or None if the server does not know this path."""
        try:
            return self.post(path, body)
        except UnknownCallError:
            return None

    def error(self, message: str, fix: str | None = None) -> UsageError:
        return UsageError(f"{self.address.url}: {message}", fix=fix)

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Converts exceptions to UsageError. The code within the `with` block reads an answer,
        which may not have the expected form.
        """
        try:
            yield
        except IsotypeError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self.error(
                f"{path}: an answer of another form than documented: {type(error).__name__}"
            ) from None

    def _request(self, method: str, path: str, body: bytes | None) -> Any:
        deadline = time.monotonic() + self.seconds
        connection = self._connect()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, self.address.prefix + path, body, headers)
            response = connection.getresponse()
            content = self._read(response, deadline)
        except TimeoutError:
            raise self.error(
                f"no whole answer to {path} within {self.seconds:g} s", "--timeout SECONDS"
            ) from None
        except ssl.SSLError as error:
            raise self.error(f"no encrypted connection: {error.reason or error}") from None
        except ConnectionError as error:
            reason = error.strerror or type(error).__name__
            raise self.error(f"no server answers there: {reason}") from None
        except OSError as error:
            raise self.error(f"no server answers there: {error.strerror or error}") from None
        except http.client.HTTPException as error:
            reason = type(error).__name__
            raise self.error(f"the answer to {path} is cut short or is no HTTP: {reason}") from None
        finally:
            connection.close()
        return self._parse(path, response, content)

    def _connect(self) -> http.client.HTTPConnection:
        address = self.address
        if not address.is_encrypted:
            return http.client.HTTPConnection(address.host, address.port, timeout=self.seconds)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            address.host, address.port, timeout=self.seconds, context=context
        )

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        """Reads an answer in pieces, so that the time limit also applies to a server that sends
        slowly.
        """
        content = bytearray()
        while piece := response.read1(_CHUNK):
            content += piece
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(content) > _MAX_BYTES:
                raise self.error(f"an answer of more than {_MAX_BYTES >> 20} MiB")
        if response.length:
            raise http.client.IncompleteRead(bytes(content), response.length)
        return bytes(content)

    def _parse(self, path: str, response: http.client.HTTPResponse, content: bytes) -> Any:
        status = response.status
        if 300 <= status < 400:
            target = _show(response.headers.get("Location", "nowhere"))
            raise self.error(
                f"{path} redirects to {target}, which is not followed", "give that address"
            )
        if status in (401, 403):
            advice = f"set the environment variable {KEY_VARIABLE}"
            reason = "refuses the key" if self.key else "needs a key"
            raise self.error(f"the server {reason} (status {status})", advice)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status in (404, 405, 501):
            raise UnknownCallError(f"{self.address.url}: {path}: {_error_message(answer, content)}")
        if status in (400, 422, 500):
            raise RefusedError(
                f"{self.address.url}: the server refuses {path}: {_error_message(answer, content)}"
            )
        if status != 200:
            raise self.error(f"{path}: status {status}: {_error_message(answer, content)}")
        if answer is None:
            raise self.error(f"{path}: no JSON but {_error_message(None, content)}")
        return answer


def _error_message(answer: Any, content: bytes) -> str:
    """Returns the message of an error in one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message", error.get("detail"))
    if isinstance(error, str):
        return _show(error)
    return _show(content[: 4 * _MESSAGE_LENGTH].decode("utf-8", errors="replace")) or "no text"


def _show(text: str) -> str:
    line = " ".join(remove_control_characters(text).split())
    return line if len(line) <= _MESSAGE_LENGTH else f"{line[:_MESSAGE_LENGTH]}..."
