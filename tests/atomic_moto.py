"""moto with atomic conditional writes, like S3.
Plain moto checks the condition and writes in two steps.
"""

import io
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_CONDITIONS = {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}


def start_moto(port: int = 0) -> ThreadedMotoServer:
    """Start moto on a port of the loopback interface; 0: a free one."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    moto.start()
    server, lock = moto._server, threading.Lock()
    assert server is not None
    application = server.app

    def atomic(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT" or not _CONDITIONS & environ.keys():
            return application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # not while others wait
        with lock:
            return application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    server.app = atomic
    return moto


if __name__ == "__main__":  # python atomic_moto.py PORT: for settings that are global in moto, such as authorization
    start_moto(int(sys.argv[1]))
    threading.Event().wait()
