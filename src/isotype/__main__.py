"""`isotype` and `python -m isotype`. Ctrl-C while a command is imported ends with status 130, as it
does later.
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
