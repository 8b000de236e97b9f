"""``evernear demo``: run the pipeline, deploy locally, and recognize images unseen in training."""

import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evernear.common.disk import disk_errors
from evernear.common.output import printable
from evernear.common.progress import Event, RunCommand
from evernear.data.shards import Dataset
from evernear.kubeflow.local_run import RunResult, run_pipeline
from evernear.serving.client import Client
from evernear.serving.decoding import as_picture
from evernear.serving.endpoints import home_of
from evernear.serving.responses import answer as in_words
from evernear.serving.responses import nearest
from evernear.serving.torchserve import stop_server
from evernear.settings import Settings
from evernear.settings.layers import command_for

SHOWN_UNSEEN = 3
NEW_CLASS = "new class"
"""The label of images whose class is not in the source, so the right answer is unknown."""


def run_demo(
    settings: Settings,
    console: Console,
    show: Callable[[Event], None],
    *,
    keep: bool,
    unseen: Path | None = None,
    command: RunCommand | None = None,
) -> None:
    """``unseen`` is a folder with images of a class that the source does not contain."""
    source = (printable(settings.data.source), "cyan")
    console.print(Text.assemble(("1. The pipeline", "bold"), ", each step its own process, on ", source))
    try:
        result = run_pipeline(settings, show, command=command)
        _print_verdict(result, console)
        if result.promoted:
            _recognize(settings, result, console, unseen)
        _print_next_steps(settings, result, console, unseen, keep=keep and result.promoted)
    finally:
        if not keep:
            stop_server(home_of(settings.workdir))


def _print_verdict(result: RunResult, console: Console) -> None:
    verdict = f": {result.state}" + f", release {result.release}" * result.promoted
    console.print(Text.assemble(("\n2. The verdict", "bold"), printable(verdict)))
    for reason in result.reasons:
        console.print(Text(printable(f"  - {reason}")), soft_wrap=True)


def _recognize(settings: Settings, result: RunResult, console: Console, unseen: Path | None) -> None:
    console.print("\n[bold]3. Images that were not trained on[/], recognized by TorchServe")
    dataset = Dataset.open(Path(result.paths["ingest.dataset"]))
    table = Table("image", "label", "answer", "distance", "neighbors", box=box.SIMPLE)
    client = Client.of(settings)
    new = sorted(unseen.glob("*.png"))[:SHOWN_UNSEEN] if unseen else []
    images = chain(unseen_images(dataset, settings.workdir / "demo-images"), ((NEW_CLASS, path) for path in new))
    for label, path in images:
        answer = client.predict_file(path)
        text = in_words(answer["pred"], answer["unknown"])
        right = answer["unknown"] if label == NEW_CLASS else answer["pred"] == label
        color = "green" if right else "red"
        cells = (path.name, ""), (label, ""), (text, color), (f"{answer['dist']:.3f}", ""), (nearest(answer), "")
        table.add_row(*(Text(printable(text), style) for text, style in cells))
    console.print(table)


def unseen_images(dataset: Dataset, directory: Path) -> Iterator[tuple[str, Path]]:
    """Write a test image of each class to ``directory`` as PNG, and yield (label, path)."""
    directory.mkdir(parents=True, exist_ok=True)
    remaining = set(range(len(dataset.labels)))
    for block in dataset.blocks("test"):
        for row in range(len(block.labels)):
            label = int(block.labels[row])
            if label in remaining:
                remaining.remove(label)
                path = directory / f"{printable(dataset.labels[label])}-{bytes(block.digests[row]).hex()[:8]}.png"
                with disk_errors(path):
                    as_picture(block.images[row]).save(path)
                yield dataset.labels[label], path
        if not remaining:
            return


def _print_next_steps(
    settings: Settings, result: RunResult, console: Console, unseen: Path | None, *, keep: bool
) -> None:
    steps_s = sum(result.steps_s.values())
    console.print(
        f"\n[bold]4. Duration[/]: {result.wall_s:.1f} s for the pipeline; the steps took {steps_s:.1f} s of it"
    )

    def print_unwrapped(line: str) -> None:  # users copy paths and commands
        console.print(Text(printable(line)), soft_wrap=True)

    print_unwrapped(f"   artifacts and log  {Path(result.paths['log']).parent}")
    print_unwrapped(f"   releases           {settings.store_uri}/releases")
    serve, predict, stop_it = (command_for(settings.workdir, word) for word in ("serve", "predict", "stop"))
    images = f"{shlex.quote(str(settings.workdir / 'demo-images'))}/*.png"
    console.print("\n[bold]5. Next steps[/] (the commands are in .venv/bin)")
    if result.promoted:
        if not keep:
            print_unwrapped(f"   {serve}                     start TorchServe with this release")
        print_unwrapped(f"   {predict} {images}")
        if unseen is not None:
            console_command = command_for(settings.workdir, "console")
            print_unwrapped(
                f"   {predict} {shlex.quote(str(unseen))}      images of a class that the release does not know"
            )
            print_unwrapped(f"   {console_command}      try them, name them as a new class, and reindex")
    else:
        for step in result.next_steps:
            print_unwrapped(f"   {step.purpose}: {step.command}")
    print_unwrapped("   evernear run --source folder:IMAGES --workdir mine   your own images, one folder per class")
    print_unwrapped("   Frames of one scene, such as a burst of photographs, are nearly the same picture.")
    print_unwrapped("   If some are tested and others trained on, accuracy on new scenes is lower than shown.")
    print_unwrapped("   Add --set data.group=stem (or folder) to keep each scene in one split.")
    if result.promoted:
        print_unwrapped(f"   {stop_it}                      stop the server")
    print_unwrapped(f"   run page           {result.page}")
