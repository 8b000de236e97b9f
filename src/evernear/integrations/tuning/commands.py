import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import JsonOption, layers_anywhere, options_of
from evernear.common.masking import mask
from evernear.common.output import print_json, print_line
from evernear.settings import Settings
from evernear.settings.layers import Layers, command_for

if TYPE_CHECKING:
    from evernear.data.shards import Dataset

SpaceOption = Annotated[
    Path | None, typer.Option("--space", help="Search space (TOML). [the one that comes with evernear]")
]


@options_of(layers_anywhere)
def tune(
    layers: Layers[Settings],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Total number of trials in the study.")] = 20,
    space: SpaceOption = None,
    study: Annotated[Path | None, typer.Option("--study", help="Directory of the study. [WORKDIR/study]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for better training settings on this machine. A killed study continues where it
    stopped."""
    settings = layers.settings()  # refuses a typo before torch is imported
    from evernear.integrations.tuning.space import BUILT_IN, load_space
    from evernear.integrations.tuning.study import BEST_FILE, run_study

    searched = load_space(space or BUILT_IN)
    directory = study or settings.workdir / "study"
    result = run_study(_ingest_source(settings, directory), settings, searched, trials, directory, _report)
    if as_json:
        print_json(result)
        return
    failed = f", and {result.failed} that failed to train" if result.failed else ""
    print_line(f"{result.trials} trials{failed}. Label right on the query split, which chose the settings:")
    print_line(f"  unchanged settings  {result.baseline}")
    if not result.settings:
        print_line("No trial was better; the settings stay as they are.")
        return
    print_line(f"  best trial          {result.best}")
    remembered = (layers.remembered or {}).get("data", {}).get("source")
    from_source = [] if settings.data.source == remembered else ["--source", mask(settings.data.source)]
    again = command_for(settings.workdir, "run", *from_source, "--config", str(directory / BEST_FILE))
    print_line(f"Next: {again}    the gate compares it with the champion")


@options_of(layers_anywhere)
def trial(layers: Layers[Settings]) -> None:
    """Train once and print the accuracy on the query split as ``accuracy=0.97``, which Katib
    reads."""
    settings = layers.settings()  # refuses a typo before torch is imported
    from evernear.integrations.tuning.trial import measure_trial

    with TemporaryDirectory() as work:
        accuracy = measure_trial(_ingest_source(settings, Path(work)), settings, Path(work), _report)
    print_line(f"accuracy={accuracy.value:.6f}")


def _ingest_source(settings: Settings, directory: Path) -> "Dataset":
    """Ingest the source. The dataset's manifest is written to ``directory``."""
    from evernear.common.store.current import current_store
    from evernear.data.ingest import ingest_source
    from evernear.data.list import ClassMinimum
    from evernear.data.manifest import save_manifest
    from evernear.data.shards import Dataset
    from evernear.release.champion import live_classes

    directory.mkdir(parents=True, exist_ok=True)
    live = live_classes(current_store(settings.store_uri))
    minimum = ClassMinimum(settings.validation.min_class_images, live)
    save_manifest(ingest_source(settings.data, settings.store_uri, _report, minimum=minimum), directory)
    return Dataset.open(directory)


def _report(text: str) -> None:
    print_line(text, sys.stderr)
