"""The entry point of the ``evernear`` command and of ``python -m evernear``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C during imports also ends with a message instead of a traceback."""
    try:
        from evernear.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("evernear: Interrupted before the command started.\n")
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
