"""The commit that this code is of."""

import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the source tree that this package runs from, ``-dirty`` if changed; else empty."""
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here.parent, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's tree
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return ""
