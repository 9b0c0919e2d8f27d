"""`isotype` and `python -m isotype`: Ctrl-C ends with 130 and one line, out of an import too. Imports only `sys` first."""

import sys


def main() -> None:
    try:
        from isotype.cli.app import main as command

        command()
    except BaseException as error:
        from isotype.interrupted import by_interrupt, line

        if (isinstance(error, SystemExit) and not error.code) or not by_interrupt(error):
            raise
        import os

        if os.environ.get("RANK", "0") == "0" and (said := line(sys.argv[1:])):  # of a run on several processes one speaks
            print(said, file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
