"""`isotype` and `python -m isotype`. Ctrl-C ends with status 130, also while a command is still
being imported.
"""

import sys


def main() -> None:
    try:
        from isotype.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
