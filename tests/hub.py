"""A hub of its own for a test: one server on this machine that answers for repositories in a folder
as the Hugging Face hub does.

folder/models/ORG/NAME/... and folder/datasets/ORG/NAME/... are its repositories, each with one
commit. Models can be made and written with the token `TOKEN`.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standin"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`url` for HF_ENDPOINT, and what was asked: `HEAD /org/name/resolve/main/config.json`, in
    order.
    """

    url: str
    asked: list[str] = field(default_factory=list)
    role: str = "write"
    """What the token may do."""
    private: dict[str, bool] = field(default_factory=dict)
    """Repository -> whether it was made private."""
    full: bool = False
    """Every commit is refused."""


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serves until the block ends. The port is the system's choice."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    found = Hub(f"http://127.0.0.1:{server.server_port}")
    server.folder, server.hub = folder, found
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "validate-yaml"]:
            self._send_json({"warnings": [], "errors": []})
        elif parts[1:] == ["repos", "create"] or parts[4:5] in (["preupload"], ["commit"]):
            self._write(parts, body)
        else:
            self._answer()

    def _write(self, parts: list[str], body: bytes) -> None:
        hub, models = self.server.hub, self.server.folder / "models"
        hub.asked.append(f"POST /{'/'.join(parts)}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "RepoNotFound")
        elif parts[-1] == "create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            (models / name).mkdir(parents=True, exist_ok=True)
            hub.private.setdefault(
                name, bool(asked.get("private")) or asked.get("visibility") == "private"
            )
            self._send_json({"url": f"{hub.url}/{name}"})
        elif parts[4] == "preupload":
            files = json.loads(body)["files"]
            self._send_json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        elif hub.full:
            self._refuse(403, "NoSpace")
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = models / parts[2] / parts[3] / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            self._send_json(
                {
                    "success": True,
                    "commitOid": COMMIT,
                    "commitUrl": f"{hub.url}/{parts[2]}/{parts[3]}/commit/{COMMIT}",
                }
            )

    def log_message(self, *given: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "whoami-v2"]:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                self._send_json(
                    {
                        "name": "me",
                        "type": "user",
                        "auth": {"accessToken": {"role": self.server.hub.role}},
                    }
                )
            else:
                self._refuse(401, "InvalidToken")
            return
        if parts[0] == "api" and len(parts) > 3:
            self._answer_api(parts[1], "/".join(parts[2:4]), parts[4:])
            return
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        if len(parts) > 4 and parts[2] == "resolve":
            self._answer_file(kind, "/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._send(200, b"")

    def _answer_api(self, kind: str, name: str, rest: list[str]) -> None:
        root = self._repository(kind, name)
        if root is None:
            self._refuse(401, "RepoNotFound")
            return
        files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        if rest[:1] == ["tree"]:
            under = "/".join(rest[2:])
            there = [f for f in files if f.startswith(f"{under}/" if under else "")]
            if not there:
                self._refuse(404, "EntryNotFound")
                return
            self._send_json(
                [
                    {
                        "type": "file",
                        "path": f,
                        "oid": _etag(root / f),
                        "size": (root / f).stat().st_size,
                    }
                    for f in there
                ]
            )
        elif rest[:1] == ["paths-info"]:
            self._send_json(
                [
                    {
                        "type": "file",
                        "path": f,
                        "oid": _etag(root / f),
                        "size": (root / f).stat().st_size,
                    }
                    for f in files
                ]
            )
        else:
            self._send_json(
                {
                    "id": name,
                    "sha": COMMIT,
                    "private": False,
                    "siblings": [{"rfilename": f} for f in files],
                    "tags": [],
                }
            )

    def _answer_file(self, kind: str, name: str, path: str) -> None:
        root = self._repository(kind, name)
        if root is None:
            self._refuse(401, "RepoNotFound")
        elif not (root / path).is_file():
            self._refuse(404, "EntryNotFound")
        else:
            self._send(200, (root / path).read_bytes(), etag=_etag(root / path))

    def _repository(self, kind: str, name: str) -> Path | None:
        root = self.server.folder / kind / name
        return root if root.is_dir() else None

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", headers={"X-Error-Code": code, "X-Error-Message": code})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        *,
        etag: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
