"""A test client for the console."""

from starlette.testclient import TestClient

from evernear.common.store import Store
from evernear.console.access import SignIn
from evernear.console.backend import Backend
from evernear.console.runs import Runner
from evernear.console.server import create_console_app
from evernear.settings import Settings

TOKEN = "secret"


def console_client(
    settings: Settings, store: Store, runner: Runner, *, address: str = "127.0.0.1", **headers: str
) -> TestClient:
    """A client at ``address`` of a console whose token is `TOKEN`."""
    backend = Backend(settings, store, runner)
    app = create_console_app(backend, SignIn(settings, TOKEN, "ann"))
    return TestClient(app, base_url="http://console", client=(address, 1), headers=headers)


def with_csrf(client: TestClient) -> TestClient:
    """The client, whose requests come from a page of the console from now on."""
    client.headers["X-Evernear-CSRF"] = client.cookies["evernear-csrf"]
    return client
