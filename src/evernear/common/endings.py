"""How a process ended, and which modules on ``PYTHONPATH`` hide installed ones."""

import os
import pkgutil
import re
import signal
import sys
import sysconfig
from importlib.machinery import PathFinder

LINE_MAX_CHARACTERS = 500
SHADOWED_SHOWN = 3
_SHELL_SIGNAL = 128
"""Offset of signal numbers in a shell's exit code."""
_STOPPED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FRAME = re.compile(r"\s|note: run with |[-=~*#.]*$")
"""Lines that say nothing about a failure's cause: frames, Rust's backtrace note, separators."""


def describe_ending(status: int, output: str, ran_out_of_memory: bool = False) -> str:
    """The end of a sentence about a failed process, such as "was killed by SIGKILL".

    ``status`` is a `subprocess.Popen.returncode` or a shell's exit code. Without a signal, the text
    quotes the last informative line of ``output``. ``ran_out_of_memory`` says whether the kernel
    killed a process of the same container for lack of memory.
    """
    number = -status if status < 0 else status - _SHELL_SIGNAL
    line = last_line(output)
    if number in set(signal.Signals):
        if number == signal.SIGKILL and ran_out_of_memory:
            return "ran out of memory: the kernel killed it (SIGKILL)."
        killed = f"was killed by {signal.Signals(number).name}"
        if number in _STOPPED_FROM_OUTSIDE:
            return f"{killed}, which another process or the kernel sent; `dmesg` shows whether memory ran out."
        return f"{killed}: {line}" if line else f"{killed}."
    if not line:
        return f"ended with exit status {status} and printed nothing."
    return f"ended with exit status {status}: {line}"


def last_line(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines() if not _FRAME.match(line)]
    line = lines[-1] if lines else ""
    return line if len(line) <= LINE_MAX_CHARACTERS else f"{line[:LINE_MAX_CHARACTERS]}..."


def shadowed_modules(python_path: str | None = None) -> str:
    """A sentence about modules on ``PYTHONPATH`` that hide installed ones, or an empty string.

    Python and all libraries import a user's ``random.py`` or ``faiss.py`` instead of the module
    that they need, and fail with misleading errors.
    """
    if python_path is None:
        python_path = os.environ.get("PYTHONPATH", "")
    directories = [directory for directory in python_path.split(os.pathsep) if directory]
    hidden = [_location(module) for module in pkgutil.iter_modules(directories) if _is_installed(module.name)]
    if not hidden:
        return ""
    more = f" and {len(hidden) - SHADOWED_SHOWN} more" if len(hidden) > SHADOWED_SHOWN else ""
    files = f"{', '.join(hidden[:SHADOWED_SHOWN])}{more}"
    return f"On PYTHONPATH, {files} hides the installed module of that name; rename it or unset PYTHONPATH."


def _location(module: pkgutil.ModuleInfo) -> str:
    directory = getattr(module.module_finder, "path", "")
    return os.path.join(directory, module.name if module.ispkg else f"{module.name}.py")  # noqa: PTH118 - a string


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    paths = sysconfig.get_paths()
    return PathFinder.find_spec(name, [paths["purelib"], paths["platlib"]]) is not None
