"""A minimal server, which returns a constant response. ``trivial_app.py PARTS PORT``."""

import asyncio
import sys

import uvloop

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class ConstantResponse(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:  # a request is smaller than a segment of loopback
        self.transport.write(RESPONSE)  # pyright: ignore[reportAttributeAccessIssue]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(ConstantResponse, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
