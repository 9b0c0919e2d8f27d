"""Run folders from a stranger: values beyond the limits are named, and no command ends in a
traceback.
"""

import json
import struct
import zlib

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.report import write_report
from tests.api import MAX_SAMPLES, parse_json, parse_settings, read_picture, read_run
from tests.report.runs import run_folder, step

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 400
BOMB = "a: &a [1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)


@pytest.mark.parametrize("text", [DEEP, LONG, f'{{"a": [{LONG}]}}', "[" * 80 + "]" * 80, "{", ""])
def test_json_beyond_the_limits_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", [DEEP, f"a: {LONG}", BOMB, "a: [", "a: !!python/name:os.system"])
def test_yaml_beyond_the_limits_is_a_value_error(text):
    with pytest.raises(ValueError) as error:
        parse_settings(text)
    if text == DEEP:  # found at the 36th bracket: reading all of them took 4 s
        assert "nested too deep" in str(error.value)


def test_ordinary_values_pass():
    value = {"a": [1, 2.5, None, True, "x" * 10_000], "b": {"c": 10**18}}
    assert parse_json(json.dumps(value)) == value
    assert parse_settings("a: 1\nb: [x, 2.5]\n") == {"a": 1, "b": ["x", 2.5]}


def damage(folder, name):
    """Writes one hostile file into a run folder."""
    match name:
        case "digits":
            (folder / "metrics.jsonl").write_text(f'{{"step": {LONG}, "loss": {LONG}}}\n')
            (folder / "result.json").write_text(f'{{"status": {LONG}, "trained_seconds": {LONG}}}')
            (folder / "resolved.yaml").write_text(f"train:\n  clip: {LONG}\n")
        case "depth":
            for file in ("metrics.jsonl", "data.json", "precision.json", "resolved.yaml"):
                (folder / file).write_text(DEEP)
        case "aliases":
            (folder / "resolved.yaml").write_text(BOMB)
        case "samples":
            (folder / "samples").mkdir(exist_ok=True)
            rows = [{"prompt": f"p{n}", "answer": "a"} for n in range(100_000)]
            (folder / "samples" / "step_1.json").write_text(
                json.dumps({"step": 1, "samples": rows})
            )
        case "escapes":
            (folder / "resolved.yaml").write_text('model: {name: "a\\x1b[2Jb"}\n')


@pytest.mark.parametrize("name", ["digits", "depth", "aliases", "samples", "escapes"])
def test_report_and_ls_read_a_hostile_folder(tmp_path, name):
    (tmp_path / "runs").mkdir()
    folder = run_folder(tmp_path / "runs" / "bad", metrics=[step(1)], plan={"total": 20})
    run_folder(tmp_path / "runs" / "good", metrics=[step(1)], plan={"total": 20})
    (tmp_path / "runs" / "good" / "resolved.yaml").write_text("model: {name: base}\n")
    damage(folder, name)
    write_report(folder)
    result = CliRunner().invoke(build_app(), ["ls", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    assert "good" in result.output
    assert "\x1b" not in result.output
    if name in ("digits", "depth"):
        assert "damaged" in result.output
    if name == "samples":
        assert len(read_run(folder).samples[0]["samples"]) == MAX_SAMPLES


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


def test_a_picture_of_179_megapixels_is_not_shown(tmp_path):
    folder = run_folder(tmp_path / "run", metrics=[step(1)])
    (folder / "samples").mkdir(exist_ok=True)
    sample = {"file": "samples/step_1_0.png"}
    (folder / sample["file"]).write_bytes(png(13_400, 13_400))
    assert read_picture(folder, sample) is None
    (folder / sample["file"]).write_bytes(png(64, 64))
    assert read_picture(folder, sample) is not None
