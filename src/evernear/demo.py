"""The whole journey on one laptop, told as it happens: what ``make demo`` runs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evernear.data.shards import Dataset
from evernear.deployment.local import stop
from evernear.disk import disk_errors
from evernear.local_run import RunResult, run
from evernear.output import printable
from evernear.progress import Event
from evernear.serving.client import Client
from evernear.settings import Settings

SHOWN_NEIGHBORS = 3


def demo(settings: Settings, console: Console, show: Callable[[Event], None], *, keep: bool) -> None:
    """Run the pipeline, deploy the release on a real TorchServe, and recognise images it never saw."""
    source = (printable(settings.data.source), "cyan")
    console.print(Text.assemble(("1. The pipeline", "bold"), ", each step its own process, on ", source))
    try:
        result = run(settings, show)
        _tell_verdict(result, console)
        if result.promoted:
            _recognise(settings, result, console)
        _tell_places(settings, result, console, keep=keep and result.promoted)
    finally:
        if not keep:
            stop(settings)


def _tell_verdict(result: RunResult, console: Console) -> None:
    what = f": {result.state}" + f", release {result.release}" * result.promoted
    console.print(Text.assemble(("\n2. The verdict", "bold"), printable(what)))
    for reason in result.reasons:
        console.print(Text(printable(f"  - {reason}")), soft_wrap=True)


def _recognise(settings: Settings, result: RunResult, console: Console) -> None:
    console.print("\n[bold]3. Images that were never trained on[/], answered by TorchServe")
    dataset = Dataset.open(Path(result.paths["ingest.dataset"]))
    table = Table("image", "is", "answer", "distance", "neighbours", box=box.SIMPLE)
    client = Client.of(settings)
    for label, path in unseen_images(dataset, settings.workdir / "demo-images"):
        answer = client.predict_file(path)
        near = " ".join(f"{n['label']}:{n['dist']:.2f}" for n in answer["neighbors"][:SHOWN_NEIGHBORS])
        shown = f"{answer['pred']} (unknown)" if answer["unknown"] else answer["pred"]
        colour = "green" if answer["pred"] == label else "red"
        cells = (path.name, ""), (label, ""), (shown, colour), (f"{answer['dist']:.3f}", ""), (near, "")
        table.add_row(*(Text(printable(text), style) for text, style in cells))
    console.print(table)


def unseen_images(dataset: Dataset, directory: Path) -> Iterator[tuple[str, Path]]:
    """One PNG of each class from the test split, written to ``directory``: (label, path)."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = set(range(len(dataset.labels)))
    for block in dataset.blocks("test"):
        for row in range(len(block.labels)):
            label = int(block.labels[row])
            if label in wanted:
                wanted.remove(label)
                path = directory / f"{printable(dataset.labels[label])}-{bytes(block.digests[row]).hex()[:8]}.png"
                with disk_errors(path):
                    Image.fromarray(np.squeeze(block.images[row])).save(path)
                yield dataset.labels[label], path
        if not wanted:
            return


def _tell_places(settings: Settings, result: RunResult, console: Console, *, keep: bool) -> None:
    own_s = sum(result.steps_s.values())
    console.print(
        f"\n[bold]4. What it took[/]: {result.wall_s:.1f} s for the pipeline, {own_s:.1f} s of it its steps' own work"
    )

    def tell(line: str) -> None:  # to be copied as it is
        console.print(Text(printable(line)), soft_wrap=True)

    tell(f"   artifacts and log  {Path(result.paths['log']).parent}")
    tell(f"   releases           {settings.store_uri}/releases")
    command = "evernear" if settings.workdir == Settings().workdir else f"EVERNEAR_WORKDIR={settings.workdir} evernear"
    console.print("\n[bold]5. Next[/] (commands stand in .venv/bin)")
    if not keep:
        tell(f"   {command} serve                     the release again, on TorchServe")
    tell(f"   {command} predict {settings.workdir}/demo-images/*.png")
    tell(f"   {command} run --source folder:IMAGES --workdir mine   your own, one folder per class")
    tell(f"   {command} stop                      end the server")
