"""The Git commit of the running code."""

import subprocess
from pathlib import Path


def git_commit() -> str:
    """With the suffix ``-dirty`` if the source tree has uncommitted changes. Empty for an installed
    package."""
    module = Path(__file__)

    def git(*words: str) -> str:
        completed = subprocess.run(["git", "-C", module.parent, *words], capture_output=True, text=True, check=True)
        return completed.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", module.name)  # an installed copy may be inside an unrelated tree
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return ""
