"""A Service in front of pods, as kube-proxy implements it.

Each new connection uses the next known endpoint. A connection stays with its pod until either side
closes it, even after the pod is removed from the endpoints. Changes take effect with a delay, as in
kube-proxy.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK_BYTES = 2**16


class Balancer:
    """Listens on ``port``; ``refused`` counts connections without a pod."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.refused = 0
        self._endpoints: list[int] = []
        self._next = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()

    def add(self, port: int, lag_s: float = 0) -> None:
        """Add ``port`` as an endpoint after ``lag_s``."""
        self._loop.call_soon_threadsafe(self._loop.call_later, lag_s, self._endpoints.append, port)

    def remove(self, port: int, lag_s: float = 0) -> None:
        """Remove ``port`` from the endpoints after ``lag_s``."""
        self._loop.call_soon_threadsafe(self._loop.call_later, lag_s, self._endpoints.remove, port)

    @contextmanager
    def running(self) -> Iterator["Balancer"]:
        thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        thread.start()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._done.set)
            thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, sock=self._listener)
        await self._done.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next += 1
        try:
            port = self._endpoints[self._next % len(self._endpoints)]
            pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", port)
        except (ZeroDivisionError, OSError):
            self.refused += 1
            writer.transport.abort()
            return
        self._writers.update((writer, pod_writer))
        await asyncio.gather(_pass(reader, pod_writer), _pass(pod_reader, writer))
        self._writers.difference_update((writer, pod_writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection, including its end; a reset is passed on."""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.close()
    except OSError:
        writer.transport.abort()
