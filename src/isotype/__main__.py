"""`isotype` and `python -m isotype`: from here on Ctrl-C ends with 130 and no traceback, out of an import too. Imports only `sys` first."""

import sys


def main() -> None:
    try:
        from isotype.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
