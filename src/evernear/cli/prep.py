"""``evernear prep``: the preprocessing server in front of TorchServe."""

import logging

from evernear.cli.interrupts import message_on_interrupt
from evernear.cli.options import local_settings, with_options
from evernear.errors import ServingError
from evernear.output import log_to_stderr, print_line
from evernear.settings import Settings


@with_options(settings=local_settings)
def prep(settings: Settings) -> None:
    """Run the preprocessing server, which decodes images and forwards them to TorchServe."""
    try:
        from evernear.serving.prep.server import serve
    except ModuleNotFoundError as error:
        raise ServingError(f"{error.name} is not installed; run `pip install evernear[prep]`.") from None

    log_to_stderr(logging.INFO if settings.log_format == "json" else logging.WARNING, settings.log_format)
    url = f"http://{settings.prep.host}:{settings.prep.port}"
    print_line(f"Send images to {url}/predict; {url}/openapi.json describes the API.")
    with message_on_interrupt(
        "Interrupted. All requests in flight were answered; `evernear prep` starts the server again."
    ):
        serve(settings)
