"""Random changes of every kind of file and request that comes from elsewhere: read, or refused in one
line. Each parser is tried for a minute, or for ISOTYPE_FUZZ_SECONDS.
"""

import csv
import io
import itertools
import json
import os
import shutil
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.schema import ImagesSection
from isotype.errors import IsotypeError
from isotype.model.adapter import load_adapter
from isotype.report import write_report
from tests.api import Metrics, WatchServer, collect_pictures, read_pairs, read_run
from tests.faults.hostile import Material, _damage, _safetensors, weights
from tests.faults.mutate import mutated_bytes, mutated_json
from tests.models import lora, tiny
from tests.report.runs import whole

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SECONDS = float(os.environ.get("ISOTYPE_FUZZ_SECONDS", "60"))
SLOW = 20.0  # seconds of processor time for one input


def fuzz(attempt):
    """Calls `attempt` with a source of chance until the time is over. It may refuse its input in
    one line; every other error is a fault.
    """
    deadline = time.monotonic() + SECONDS
    refused = total = 0

    def check(draw):
        nonlocal refused, total
        total += 1
        begin = time.process_time()
        try:
            attempt(draw)
        except IsotypeError as refusal:
            refused += 1
            assert "\n" not in refusal.message, refusal.message
            assert len(refusal.message) < 2000
        assert time.process_time() - begin < SLOW

    for number in itertools.count():
        if time.monotonic() > deadline:
            break
        limits = settings(
            max_examples=20,  # the time is looked at between rounds
            database=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seed(number)(limits(given(draw=st.randoms(use_true_random=False))(check)))()
    print(f"{total} inputs, {refused} refused")
    assert total >= 20


def changed_json(content, draw):
    """A JSON text with changed values or changed bytes."""
    if draw.random() < 0.7:
        return json.dumps(mutated_json(json.loads(content), draw)).encode("utf-8", "surrogatepass")
    return mutated_bytes(content, draw)


def changed_header(content, draw):
    """A safetensors file with a changed header."""
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size]
    if draw.random() < 0.7:
        return _safetensors(mutated_json(json.loads(header), draw), content[8 + size :])
    return mutated_bytes(content[: 8 + size], draw) + content[8 + size :]


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    tiny("llama", num_hidden_layers=1).save_pretrained(folder)
    return folder


def test_settings_of_a_model(base):
    from tests.model.test_value_ranges import load

    content = (base / "config.json").read_bytes()

    def attempt(draw):
        (base / "config.json").write_bytes(changed_json(content, draw))
        load(base)

    fuzz(attempt)


def test_headers_of_gguf_files(tmp_path):
    pytest.importorskip("gguf")
    from tests.gguf_files import splitting, write
    from tests.model.test_value_ranges import load_gguf

    splitting().save_pretrained(tmp_path / "tokenizer")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 320, "num_hidden_layers": 1}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    file = tmp_path / "model.gguf"
    write(tiny("llama", **sizes, **ids), tmp_path / "tokenizer", file, "Q8_0")
    content = file.read_bytes()
    head = content.index(b"token_embd.weight") + 2000

    def attempt(draw):
        file.write_bytes(mutated_bytes(content[:head], draw) + content[head:])
        load_gguf(file)

    fuzz(attempt)


def test_headers_of_weights(base, tmp_path):
    from tests.model.test_value_ranges import load

    file = base / "model.safetensors"
    content = file.read_bytes()
    material = Material(None)

    def attempt(draw):
        if draw.random() < 0.5:
            file.unlink(missing_ok=True)  # the last model has mapped it
            file.write_bytes(changed_header(content, draw))
            load(base)
        else:
            shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
            (tmp_path / "checkpoints").mkdir()
            weights(material, tmp_path / "checkpoints", draw)

    fuzz(attempt)


def test_adapters(tmp_path):
    folder = tmp_path / "adapter"
    lora(tiny(), target_modules=["q_proj", "up_proj"]).save_pretrained(folder)
    names = ("adapter_config.json", "adapter_model.safetensors")
    config, tensors = [(folder / name).read_bytes() for name in names]

    def attempt(draw):
        changes_config = draw.random() < 0.7
        (folder / names[0]).write_bytes(changed_json(config, draw) if changes_config else config)
        (folder / names[1]).unlink(missing_ok=True)
        (folder / names[1]).write_bytes(
            tensors if changes_config else changed_header(tensors, draw)
        )
        for read in (lambda: load_adapter(tiny(), folder), lambda: read_pairs(folder, "vLLM")):
            read()

    fuzz(attempt)


def list_runs(folder):
    listed = CliRunner().invoke(build_app(), ["ls", str(folder)])
    assert listed.exit_code == 0, listed.exception
    assert "\x1b" not in listed.output


def test_run_folders(tmp_path):
    whole(tmp_path / "good", steps=12)
    folder = tmp_path / "runs" / "run"

    def attempt(draw):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in draw.sample(files, draw.randint(1, 3)):
            _damage(file, tmp_path, draw)
        list_runs(tmp_path / "runs")
        read_run(folder)
        write_report(folder, tmp_path / "report.html")

    fuzz(attempt)


def test_metrics(tmp_path):
    (tmp_path / "runs").mkdir()
    folder = whole(tmp_path / "runs" / "run", steps=12)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()

    def attempt(draw):
        changed = [
            changed_json(line, draw) if draw.random() < 0.3 else line
            for line in draw.choices(lines, k=draw.randint(0, 30))
        ]
        separator = draw.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n"))
        (folder / "metrics.jsonl").write_bytes(separator.join(changed))
        list_runs(tmp_path / "runs")
        write_report(folder, tmp_path / "report.html")
        Metrics(folder / "metrics.jsonl").cut_after(draw.randint(-1, 13))
        read_run(folder)

    fuzz(attempt)


def write_captions(folder, draw):
    """Three pictures with captions in text files or in a table."""
    from tests.tasks.diffusion.models import draw as draw_picture

    rows = [{"image": f"{name}.png", "text": f"a red {name}"} for name in "abc"]
    for row in rows:
        draw_picture("circle", "red").save(folder / row["image"])
    kind = draw.choice(("text", "caption", "jsonl", "json", "csv", "parquet"))
    if kind in ("text", "caption"):
        ending = ".txt" if kind == "text" else ".caption"
        for row in rows:
            (folder / row["image"]).with_suffix(ending).write_text(row["text"])
        return draw.choice(sorted(folder.glob(f"*{ending}"))), mutated_bytes
    file = folder / f"metadata.{kind}"
    if kind == "csv":
        with io.StringIO() as text:
            writer = csv.DictWriter(text, ["image", "text"])
            writer.writeheader()
            writer.writerows(rows)
            file.write_text(text.getvalue())
        return file, mutated_bytes
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
        return file, mutated_bytes
    if kind == "json":
        file.write_text(json.dumps(rows))
        return file, changed_json
    file.write_text("\n".join(map(json.dumps, rows)))
    return file, mutated_bytes


def test_captions(tmp_path):
    folder = tmp_path / "pictures"

    def attempt(draw):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        file, change = write_captions(folder, draw)
        file.write_bytes(change(file.read_bytes(), draw))
        train = str(file) if file.stem == "metadata" and draw.random() < 0.5 else str(folder)
        try:
            collect_pictures(ImagesSection(train=train, eval_split=0.0), seed=0)
        except IsotypeError as refusal:
            # one line for each picture
            assert all(len(line) < 2000 for line in refusal.message.splitlines())

    fuzz(attempt)


def exchange(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError:  # refused before all was sent
            return b""


def test_requests_to_watch(tmp_path, capfd):
    folder = whole(tmp_path / "run", steps=12)
    with WatchServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_port
        host = f"Host: 127.0.0.1:{port}\r\n"
        good = f"GET /{server.token}/ HTTP/1.1\r\n{host}Connection: close\r\n\r\n".encode()
        requests = [
            good,
            f"GET /{server.token}/watch.js HTTP/1.1\r\n{host}\r\n".encode(),
            f"GET /{server.token}/samples/step_1_0.png HTTP/1.1\r\n{host}\r\n".encode(),
            f"POST /{server.token}/stop HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n".encode(),
            f"GET /{server.token}/ HTTP/1.1\r\n{host}If-None-Match: abc\r\n\r\n".encode(),
        ]

        def attempt(draw):
            exchange(port, mutated_bytes(draw.choice(requests), draw))
            assert exchange(port, good).startswith(b"HTTP/1.1 200 ")
            shown = capfd.readouterr()
            assert "Traceback" not in shown.out + shown.err, shown.err

        fuzz(attempt)
        server.shutdown()
        thread.join()
