"""A minimal server, which returns a constant response. ``trivial_app.py PARTS PORT``."""

import asyncio
import re
import sys

import uvloop

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class ConstantResponse(asyncio.Protocol):
    missing_bytes = 0
    """Of the current request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:  # a head is smaller than a segment of loopback
        if not self.missing_bytes and (length := LENGTH.search(data)):
            self.missing_bytes = data.index(b"\r\n\r\n") + 4 + int(length[1])
        self.missing_bytes -= len(data)
        if not self.missing_bytes:
            self.transport.write(RESPONSE)  # pyright: ignore[reportAttributeAccessIssue]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(ConstantResponse, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
