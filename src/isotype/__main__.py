"""`isotype` and `python -m isotype`: from here on Ctrl-C ends with 130 and no traceback, out of an import too. Imports only `sys` first."""

import sys


def main() -> None:
    try:
        from isotype.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # a second Ctrl-C, while Python shuts down, ends the process without a traceback
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
