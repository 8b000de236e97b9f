"""``evernear report``: the page of one run, or a page with two runs side by side."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from evernear.cli.options import local_settings, options_of
from evernear.common.output import print_line
from evernear.errors import SettingsError
from evernear.settings import Settings

RunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN [RUN]]", help="Run IDs or releases. [the last run in --workdir]")
]


@options_of(local_settings)
def report(
    settings: Settings,
    runs: RunsArgument = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Print the path of a run's page (by default, the last run in --workdir), or compare two
    runs."""
    page = _write_page(settings, runs) if runs else _last(settings.workdir)
    print_line(str(page))
    if open_:
        webbrowser.open(page.as_uri())


def _last(workdir: Path) -> Path:
    from evernear.common.progress import run_directories
    from evernear.kubeflow.local_run import PAGE_FILE

    runs = run_directories(workdir) if (workdir / "runs").is_dir() else []
    pages = [page for run in runs if (page := run / PAGE_FILE).exists()]
    if not pages:
        raise SettingsError(f"{workdir} has no run with a page; name a run or a release, or choose another --workdir.")
    return pages[-1]


def _write_page(settings: Settings, names: list[str]) -> Path:
    """Write the page of one or two runs to a file below the working directory."""
    from evernear.common.disk import write_atomically
    from evernear.common.store import open_store
    from evernear.reporting.page import compare_page, run_page
    from evernear.reporting.run_report import find_run

    if len(names) > 2:
        raise SettingsError("At most two runs can be compared.")
    store = open_store(settings.store_uri)
    records = [find_run(store, name) for name in names]
    html = run_page(records[0]) if len(records) == 1 else compare_page(*records)
    path = settings.workdir.resolve() / "reports" / f"{'-and-'.join(record.run for record in records)}.html"
    write_atomically(path, html)
    return path
