"""What every result file says of the machine, and how it is written."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import evernear  # noqa: F401 - benchmarks import this module first, and evernear sets what torch reads when it is loaded

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    import torch

    return {
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


def write(name: str, machine: Mapping[str, Any], result: Mapping[str, Any], table: Sequence[Sequence[str]]) -> None:
    """``results/<name>.json`` with everything and ``<name>.md`` with ``table``, its first row the heading."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown(table))
    print(markdown(table))


def markdown(table: Sequence[Sequence[str]]) -> str:
    """``table``, its first row the heading, as Markdown."""
    heading, *rows = ["| " + " | ".join(row) + " |" for row in table]
    rule = "|" + " --- |" * len(table[0])
    return "\n".join([heading, rule, *rows]) + "\n"
