"""One run on several real processes (gloo): the same rows, losses and result; interrupted, killed
and gone on with.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from isotype.config.load import load
from isotype.tasks.choose import train
from tests.conftest import configure_in
from tests.distributed.processes import GUARD, children_of, ended, environment, run, start, succeeds
from tests.results import close_runs, metrics, read, same_result
from tests.warm import interpreter

pytestmark = pytest.mark.timeout(900)
LORA = {
    "train": {"steps": 6, "batch_size": 2, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 3}
}


@pytest.fixture
def file_of(configured, tmp_path):
    def make(folder, **sections):
        configured(folder, adapter={"kind": "none"}, **sections)
        return tmp_path / f"{folder}.yaml"

    return make


@pytest.fixture(scope="module")
def two_processes(workshop, tmp_path_factory):
    """The ended command of a run on two processes, whose folder is `two` in `place`."""
    place = tmp_path_factory.mktemp("two_processes")
    configure_in(workshop, place)("two", **LORA)
    # the command, whose processes are forks of one that has imported everything
    arguments = ["isotype", "train", str(place / "two.yaml"), "--processes", "2"]
    program = f"import sys; sys.executable, sys.argv = {interpreter()!r}, {arguments}; from isotype.__main__ import main; main()"
    command = [interpreter(), "-c", program]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=GUARD, check=False
    )
    return SimpleNamespace(done=done, folder=place / "two")


def test_the_command_on_two_processes_is_the_run_of_one(configured, two_processes, tmp_path):
    assert train(configured("one", **LORA)) == 0
    done = two_processes.done
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 6/6  loss") == 1  # one console
    assert (
        "2 on one machine, started by isotype, gloo: replicate (auto: a process cannot take more than "
        in done.stdout
    )
    assert ", each computes 2 x 2 rows of each step" in done.stdout
    assert done.stderr == ""
    one, two = tmp_path / "one", two_processes.folder
    close_runs(one, two, loss=2e-6, weight=2e-5)
    assert read(one, "manifest") == read(two, "manifest")
    assert read(two, "plan")["processes"] == 2
    precision = read(two, "precision")
    assert precision["violations"] == []
    assert precision["observed"]["reduce"] == {"fp32": 1}
    assert "reduce" not in precision["unobserved"]


def test_a_killed_process_is_named_and_the_run_continues_bit_for_bit(
    configured, two_processes, tmp_path
):
    whole = two_processes.folder
    configured("killed", **LORA)
    status, said = run(2, tmp_path / "killed.yaml", fault=[1, 4, "die"])
    assert status == 1
    assert "MP001 step 4: rank 1 on " in said
    assert f"last good checkpoint: {tmp_path / 'killed/checkpoints/step_3'}" in said
    assert said.count("isotype: ") == 1  # one message
    succeeds(2, resume=tmp_path / "killed")
    same_result(whole, tmp_path / "killed")
    # gone on with by one process: the same rows, told that dropout draws differently
    shutil.rmtree(tmp_path / "killed/checkpoints/step_6")
    (loaded, folder) = (
        load(tmp_path / "killed/resolved.yaml", [], {}, resolved=True),
        tmp_path / "killed",
    )
    assert train(loaded, resume=folder) == 0
    assert metrics(folder, "tokens") == metrics(whole, "tokens")


@pytest.mark.full
@pytest.mark.slow
def test_full_weights_continue_bit_for_bit_after_a_kill(file_of, tmp_path):
    """Each process holds all weights, which are trained, and all optimizer states."""
    sections = {**LORA, "parallel": {"kind": "replicate"}}
    succeeds(2, file_of("whole", **sections))
    status, said = run(2, file_of("killed", **sections), fault=[1, 4, "die"])
    assert status == 1
    assert "MP001 step 4: rank 1 on " in said
    resumed = succeeds(2, resume=tmp_path / "killed")
    assert "replicate" in resumed
    same_result(tmp_path / "whole", tmp_path / "killed")


def test_a_refusal_before_anything_is_started(file_of, tmp_path):
    file_of("run")
    command = [
        sys.executable,
        "-m",
        "isotype",
        "train",
        str(tmp_path / "run.yaml"),
        "--processes",
        "3",
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=GUARD, check=False
    )
    assert done.returncode == 2
    assert "3 processes cannot share 4 rows a step evenly" in done.stderr
    assert "2 or 4 processes can" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said_of_it"),
    [("hang", "does not come (it is at step 4: a step); waited 12 s"), ("stop", "was stopped")],
)
def test_a_process_that_does_not_come_is_named(file_of, what, said_of_it):
    process = start(2, "-m", "tests.distributed.worker",
                    json.dumps({"config": str(file_of("run", parallel={"timeout": 12})), "fault": [1, 4, what]}),
                    farewell=1.0)  # fmt: skip
    status, said = ended(process)
    assert status == 1
    assert said_of_it in said
    assert "step 4: rank 1 on " in said


@pytest.mark.slow
def test_one_interrupt_of_the_launcher_saves_and_ends_all(file_of, tmp_path):
    file = file_of("run", train={"steps": 100_000, "eval_every": 50_000})
    process = start(2, "-m", "tests.distributed.worker", json.dumps({"config": str(file)}))
    metrics = tmp_path / "run/metrics.jsonl"
    until = time.monotonic() + GUARD
    while time.monotonic() < until and not (
        metrics.is_file() and metrics.read_text().count("loss") > 3
    ):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    status, said = ended(process)
    assert status == 130, said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "interrupted"
    assert (tmp_path / f"run/checkpoints/step_{result['steps']}/DONE").is_file()


@pytest.mark.full
@pytest.mark.slow
def test_processes_end_with_a_launcher_that_is_killed(file_of, tmp_path):
    file = file_of("run", train={"steps": 100_000, "eval_every": 50_000})
    process = start(2, "-m", "tests.distributed.worker", json.dumps({"config": str(file)}))
    until = time.monotonic() + GUARD
    while (
        time.monotonic() < until
        and process.poll() is None
        and not (tmp_path / "run/metrics.jsonl").is_file()
    ):
        time.sleep(0.2)
    children = children_of(process.pid)
    assert len(children) == 2
    process.kill()
    process.wait()
    while time.monotonic() < until and any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.2)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    process.communicate()


# --- What processes do one after the other, and the errors of exchanges that no meeting knows of.


LEAVE = """
import json, sys, time
from pathlib import Path
import torch.distributed
from isotype.distributed.world import join

world = join("cpu", timeout=600)
destroys = torch.distributed.destroy_process_group

def destroy():
    Path(sys.argv[1], f"closed_{world.rank}").write_text(str(time.monotonic()))
    destroys()

torch.distributed.destroy_process_group = destroy
world.sum([1.0])
if world.rank == int(sys.argv[2]):
    time.sleep(1.0)
Path(sys.argv[1], f"through_{world.rank}").write_text(str(time.monotonic()))
world.close()
"""


def test_no_process_closes_its_connections_before_all_are_through(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVE)
    status, said = ended(start(3, str(script), str(tmp_path), "2"))  # the last one is late
    assert status == 0, said
    through, closed = (
        [float((tmp_path / f"{what}_{rank}").read_text()) for rank in range(3)]
        for what in ("through", "closed")
    )
    assert max(through) <= min(closed)


@pytest.mark.full
def test_a_process_whose_rows_have_no_picture_adds_nothing_to_the_tower(vlm, tmp_path):
    """Of each step's two rows one process sees a picture, the other none; tower and language part
    are those of one process.
    """
    from PIL import Image

    Image.new("RGB", (60, 44), (220, 20, 20)).save(tmp_path / "0.png")
    shown = [{"type": "image", "path": "0.png"}, {"type": "text", "text": "what colour?"}]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": f"it is {i}."}]
        for i in range(4)
        for asked in (shown, "?")
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )

    def given(name):
        sections = {
            "model": {"name": str(vlm("gemma3"))},
            "data": {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl"), "shuffle": False},
            "adapter": {"kind": "lora", "r": 2, "vision": "lora"}, "precision": {"preset": "fp32"},
            "train": {"steps": 3, "batch_size": 1, "accumulate": 2, "learning_rate": 1e-3, "eval_every": 3},
            "run": {"folder": str(tmp_path / name), "sample_every": 0, "report": False},
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(sections))
        return tmp_path / f"{name}.yaml"

    assert train(load(given("one"), [], {})) == 0
    succeeds(2, given("two"))
    close_runs(tmp_path / "one", tmp_path / "two", loss=2e-6, weight=2e-5)
