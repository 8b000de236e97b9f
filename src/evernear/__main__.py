"""The entry point of the ``evernear`` command and of ``python -m evernear``."""

import sys
from typing import NoReturn

from evernear.common.processes import shadowed_modules


def main() -> None:
    """Run the command line. A failed import whose cause is known ends with a message."""
    try:
        from evernear.cli.app import main as run_command
    except KeyboardInterrupt:
        _fail("Interrupted before the command started.", 130)
    except (Exception, SystemExit):
        if sentence := shadowed_modules():
            _fail(sentence, 1)
        raise
    run_command()


def _fail(sentence: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"evernear: {sentence}\n")
    sys.exit(exit_code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which may contain a user's random.py or torch.py
    main()
