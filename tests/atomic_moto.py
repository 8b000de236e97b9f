"""moto with atomic conditional writes, like S3. Plain moto checks the condition and writes in two
steps."""

import functools
import io
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


def start_moto() -> ThreadedMotoServer:
    """Start moto on a free port of the loopback interface."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    server, lock = moto._server, threading.Lock()
    assert server is not None
    server.RequestHandlerClass.log_request = lambda *_: None  # type: ignore[attr-defined] - no time for its format
    application = server.app
    # Without this cache, moto lists the directories of all services for each request, which is a
    # fourth of its time.
    application.get_backend_for_host = functools.cache(application.get_backend_for_host)

    def atomic(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # not while others wait
        with lock:
            return application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    server.app = atomic
    return moto


if __name__ == "__main__":  # prints its port; for settings that are global in moto, such as authorization
    print(start_moto().get_host_and_port()[1], flush=True)
    threading.Event().wait()
