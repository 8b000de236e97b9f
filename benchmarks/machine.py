"""The description of the machine in every result file, and the result files' format."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import evernear  # noqa: F401 - imported first, because evernear sets variables that torch reads on import

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Describe the machine and the versions that affect the results."""
    import torch

    return {
        "command": without_paths(shlex.join(["python", *sys.orig_argv[1:]])),
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "bfloat16": bool(torch.cpu.get_capabilities().get("avx512_bf16")),
        "gpus": torch.cuda.device_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_before": round(os.getloadavg()[0], 2),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def without_paths(command: str) -> str:
    """``command`` with a placeholder for each absolute path, which is a path of this machine."""
    return re.sub(r"(?<![\w./])/(?!/)[^\s']+", "DIRECTORY", command)


def write(
    name: str, title: str, machine: Mapping[str, Any], result: Mapping[str, Any], table: Sequence[Sequence[str]]
) -> None:
    """Write all values to ``results/<name>.json``, and ``table`` with a heading to
    ``<name>.md``.

    The first row of ``table`` is its heading.
    """
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(one_row_a_line({"machine": machine, **result}))
    (RESULTS / f"{name}.md").write_text(heading(name, title, machine) + markdown(table))
    print(markdown(table))


def one_row_a_line(values: Mapping[str, Any]) -> str:
    """JSON with a line for each value, and for each item of a list, so that a diff shows rows."""
    lines = [f"{json.dumps(key)}: {_items(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _items(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n]"


def heading(name: str, title: str, machine: Mapping[str, Any]) -> str:
    """Title, command, date and machine of a result table."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, threads: {machine['threads']}"
    return (
        f"# {title}\n\n```sh\n{machine['command']}\n```\n\n"
        f"Measured on {machine['measured'][:10]}: {cpu}, torch {machine['torch']}, "
        f"load {machine['load_before']} before the start. [All values]({name}.json).\n\n"
    )


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Format ``table``, whose first row is the heading, as Markdown."""
    heading, *rows = ["| " + " | ".join(row) + " |" for row in table]
    rule = "|" + " --- |" * len(table[0])
    return "\n".join([heading, rule, *rows]) + "\n"
