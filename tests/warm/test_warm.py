"""`interpreter()` behaves as `python` does to who starts it."""

import os
import signal
import subprocess
import sys

from tests.warm import interpreter


def both(*arguments: str, **given) -> list[tuple[int, str, str]]:
    """(status, stdout, stderr) of Python itself and of the fork."""
    made = (
        subprocess.run([program, *arguments], capture_output=True, text=True, **given)
        for program in (sys.executable, interpreter())
    )
    return [(done.returncode, done.stdout, done.stderr) for done in made]


def test_arguments_environment_folder_and_input_are_the_callers(tmp_path):
    code = "import os, sys; print(sys.argv, __name__, os.getcwd(), sorted(os.environ), sys.stdin.read(), sys.path[0]); sys.exit(7)"
    given = {
        "cwd": tmp_path,
        "env": {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "ONE": "1"},
        "input": "typed",
    }
    script = tmp_path / "script.py"
    script.write_text(code)
    for arguments in (("-c", code, "a b"), (str(script), "-c"), ("-u", "-m", "script", "--x")):
        real, fork = both(*arguments, **given)
        assert real == fork
        assert real[0] == 7


def test_signals_arrive_and_a_killed_command_is_gone():
    # what starts the tests in the background may have them ignore SIGINT, and nohup SIGHUP, which
    # every process below would inherit
    def heard():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    waits = "import os, time\ntry:\n print(os.getpid(), flush=True)\n time.sleep(900)\nexcept KeyboardInterrupt:\n raise SystemExit(5)"
    for number, status in (
        (signal.SIGINT, 5),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGKILL, -signal.SIGKILL),
    ):
        command = subprocess.Popen(
            [interpreter(), "-c", waits], stdout=subprocess.PIPE, text=True, preexec_fn=heard
        )
        process = int(command.stdout.readline())
        command.send_signal(number)
        assert command.wait() == status
        assert command.stdout.read() == ""  # ends when the command itself has ended
        assert not os.path.exists(f"/proc/{process}") or number == signal.SIGKILL
        command.stdout.close()
