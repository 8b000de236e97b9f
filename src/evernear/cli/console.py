"""``evernear console``: the pages on which users try and name images, and make decisions."""

import os
import secrets
from typing import Annotated

import typer

from evernear.cli.interrupts import message_on_interrupt
from evernear.cli.options import (
    ConfigOption,
    PresetOption,
    RenameOption,
    RetireOption,
    SetOption,
    SourceOption,
    WorkdirOption,
    assignments,
    options_of,
    run_layers,
)
from evernear.common.output import print_line, print_secret
from evernear.errors import ServingError
from evernear.settings import Settings
from evernear.settings.layers import Layers, command_for

PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one. [console.port]", show_default=False)
]
HostOption = Annotated[
    str | None, typer.Option(help="Address to bind; another than loopback needs TLS or a proxy. [console.host]")
]


def console_layers(
    port: PortOption = None,
    host: HostOption = None,
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> Layers[Settings]:
    overrides = assignments(overrides, **{"console.port": port, "console.host": host})
    return run_layers(source, preset, config, overrides, workdir, retire, rename)


@options_of(console_layers)
def console(layers: Layers[Settings]) -> None:
    """Serve web pages on which users try images, name unknown images, correct suspect labels,
    reindex, promote and roll back."""
    from evernear.common.store import open_store
    from evernear.release.promotions import whoami

    try:
        from evernear.console.access import SignIn
        from evernear.console.backend import Backend
        from evernear.console.runs import LocalRuns, PipelineRuns
        from evernear.console.server import create_console_app, require_private, serve_console
    except ModuleNotFoundError as error:
        raise ServingError(f"{error.name} is not installed; run `pip install 'evernear[console]'`.") from None

    settings = layers.settings()
    require_private(settings.console)
    store = open_store(settings.store_uri)
    in_cluster = bool(settings.pipeline.endpoint) or "KUBERNETES_SERVICE_HOST" in os.environ
    runner = PipelineRuns(settings, store) if in_cluster else LocalRuns(settings, layers.later_words(keep=False))
    backend = Backend.open(settings, store, runner)
    for sentence in backend.answers.set_aside.values() if backend.answers else ():
        print_line(sentence)
    token = secrets.token_urlsafe(24)
    sign_in = SignIn(settings, token, whoami())

    def announce(url: str) -> None:
        query = f"?token={token}" if sign_in.by_token else ""
        print_secret(f"Open {url}/{query}")
        print_secret(f"Name unknown images and correct labels on {url}/review{query}")

    again = command_for(settings.workdir, "console")
    with message_on_interrupt(f"Interrupted. Every answer is stored; `{again}` continues. Runs in progress go on."):
        serve_console(create_console_app(backend, sign_in), settings.console, announce)
