"""`isotype` and `python -m isotype`: from here on Ctrl-C ends with 130 and one line, out of an import too. Imports only `sys` first."""

import sys


def main() -> None:
    try:
        from isotype.cli.app import main as command

        command()
    except BaseException as error:
        from isotype.interrupted import by_interrupt, line

        if (isinstance(error, SystemExit) and not error.code) or not by_interrupt(error):
            raise
        _heed_no_more()
        import os

        # an interrupt inside exec, as of a dataclass being made, leaves a mark for which Python would end itself by the signal
        exec("")
        if os.environ.get("RANK", "0") == "0" and (said := line(sys.argv[1:])):  # of a run on several processes one speaks
            print(said, file=sys.stderr)
        sys.exit(130)
    finally:
        _heed_no_more()


def _heed_no_more() -> None:
    """A second Ctrl-C, while the line is said or Python shuts down, ends the process without a traceback."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
