"""Run one step on disks of growing size until its output fits:
``STEP RESULT IMAGES DIRECTORY``.

Prints a line of JSON for each disk. Needs permission to mount, as in a namespace created by
``unshare``.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from evernear import steps
from evernear.settings import of_run
from tests.ports import free_ports
from tests.real.scenarios.workspace import PORTS

SIZES_KB = (4, 16, 24, 32, 64, 96, 160, 256, 384, 640, 1024, 1536, 2048, 4096)
NO_MOUNT = 77


def calls(artifacts: dict[str, str], images: Path, disk: Path) -> dict[str, Callable[[], object]]:
    """Each step with outputs and store on ``disk``; ``made`` has the artifacts of an earlier run,
    on another disk."""

    def out(name: str) -> str:
        return str(disk / "out" / name)

    def settings(store: str = "", **sections: dict[str, Any]) -> dict[str, Any]:
        train = {"epochs": 1, "batch_size": 64, "width": 8} | sections.pop("train", {})
        serving: dict[str, Any] = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        tree = {"workdir": str(disk / "work"), "target": "registry", "train": train, "serving": serving, **sections}
        return of_run(tree, store=store or store_uri).model_dump(mode="json")

    store_uri, earlier = (disk / "store").as_uri(), Path(artifacts["log"]).parents[2].joinpath("store").as_uri()
    dataset, network, index = artifacts["ingest.dataset"], artifacts["export.network"], artifacts["index.index"]
    evaluation, verdict, release = (
        artifacts["evaluate.evaluation"],
        artifacts["gate.verdict"],
        artifacts["archive.release"],
    )
    unseen = artifacts["probe.open_set"]
    source = {"source": f"folder:{images}", "preset": "", "target": "registry", "serving_image": ""}
    parts = {"network": network, "index": index, "evaluation": evaluation, "verdict": verdict}
    two = settings(train={"processes": 2})
    return {
        "ingest": lambda: steps.ingest("run", store_uri, source, {}, out("dataset")),
        "train": lambda: steps.train("run", settings(), dataset, out("trained"), out("curves")),
        "train, two processes": lambda: steps.train("run", two, dataset, out("trained"), out("curves")),
        "export": lambda: steps.export("run", settings(), dataset, artifacts["train.trained"], out("network")),
        "reuse": lambda: steps.reuse("run", settings(earlier), dataset, out("network"), out("open_set")),
        "embed": lambda: steps.embed("run", settings(), dataset, network, out("embeddings")),
        "probe": lambda: steps.probe("run", settings(), dataset, out("open_set")),
        "index": lambda: steps.index("run", settings(), dataset, artifacts["embed.embeddings"], unseen, out("index")),
        "evaluate": lambda: steps.evaluate(
            "run", settings(earlier), dataset, network, index, unseen, out("evaluation")
        ),
        "gate": lambda: steps.gate("run", settings(), evaluation, out("verdict")),
        "archive": lambda: steps.archive("run", settings(), dataset, parts, out("release")),
        "deploy": lambda: steps.deploy("run", settings(), "a test", release, verdict),
        "notify": lambda: steps.notify(
            "run", store_uri, "continuous-training", "SUCCEEDED", "", out("outcome"), out("page")
        ),
    }


def main(step: str, result: Path, images: Path, store_uri: Path) -> int:
    """The exit code is 77 where nothing can be mounted."""
    artifacts, disk = json.loads(result.read_text())["paths"], store_uri / "disk"
    disk.mkdir()
    for size_kb in SIZES_KB:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", disk]).returncode:
            return NO_MOUNT
        message, code = StringIO(), 0
        with redirect_stdout(StringIO()), redirect_stderr(message):
            try:
                (disk / "temporary").mkdir()
                tempfile.tempdir = str(disk / "temporary")
                calls(artifacts, images, disk)[step]()
            except SystemExit as ended:
                code = int(ended.code or 0)
            except Exception as error:
                code = -1
                message.write(f"\n{type(error).__name__}: {error}")
        subprocess.run(["umount", "--lazy", disk], check=True)
        print(json.dumps({"size_kb": size_kb, "code": code, "said": message.getvalue()}), flush=True)
        if code == 0:
            break
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))
