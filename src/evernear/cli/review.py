"""``evernear review``: label uncertain live queries and correct suspect labels in a local page."""

import secrets
from typing import Annotated

import typer

from evernear.cli.interrupts import message_on_interrupt
from evernear.cli.options import run_settings, with_options
from evernear.output import print_line
from evernear.settings import Settings

PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")]


@with_options(settings=run_settings)
def review(
    settings: Settings,
    port: PortOption = 8095,
) -> None:
    """Serve a page on this machine in which a person labels uncertain live queries and corrects suspect labels."""
    from evernear.release.registry import whoami
    from evernear.review.answers import Answers, open_target
    from evernear.review.page import create_app, serve
    from evernear.review.suspects import load_suspects
    from evernear.store import open_store

    store, target = open_store(settings.store_uri), open_target(settings.data.source)
    answers = Answers(store, target)
    answers.recover()
    suspects = load_suspects(store, settings.data.source)
    token = secrets.token_urlsafe(24)
    with message_on_interrupt("Interrupted. Every answer is stored; `evernear review` continues with the queue."):
        app = create_app(store, answers, target, token, whoami(), suspects)
        serve(app, port, lambda bound: print_line(f"Open http://127.0.0.1:{bound}/?token={token}"))
