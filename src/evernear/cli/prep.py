"""``evernear prep``: the preprocessing server in front of TorchServe."""

from evernear.cli.interrupts import interrupt_says
from evernear.cli.options import local_settings, with_options
from evernear.errors import ServingError
from evernear.output import print_line
from evernear.settings import Settings


@with_options(settings=local_settings)
def prep(settings: Settings) -> None:
    """Prepare images here and have TorchServe recognise them; stays until SIGTERM or Ctrl-C."""
    try:
        from evernear.serving.prep.server import serve
    except ModuleNotFoundError as error:
        raise ServingError(f"{error.name} is not installed; run `pip install evernear[prep]`.") from None

    print_line(f"Images are taken at http://{settings.prep.host}:{settings.prep.port}/predict; see /docs there.")
    with interrupt_says("Interrupted. Requests in flight were answered; `evernear prep` starts the server again."):
        serve(settings)
