"""Ingest of a bucket with 20 ms per request:
``MINIO=PATH/minio python -m benchmarks.scale.ingest``.

A MinIO server on loopback contains class folders of PNG files, 28 x 28 gray, behind a proxy that
delays each request by 20 ms. The store of the dataset is in the same bucket, behind the same proxy.
The rows are measured one after the other:

- ``2 in flight``: as many requests as this machine has cores,
  as in earlier versions, for a subset of the images;
- ``32 in flight``: the default;
- ``killed``, ``continued``: the same, killed with SIGKILL halfway and run again;
- ``unchanged``, ``+1%``: ingests again, without new images and with 1% more.
"""

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from minio import Minio
from PIL import Image

from benchmarks import machine

LATENCY_S = 0.02
CLASSES = 100
EARLIER_IMAGES_PER_S = 62.0
KEYS = ("benchmark", "benchmark-secret")
INGEST = """
import sys, time
from pathlib import Path
from evernear.data import ingest, parts
from evernear.settings import DataSettings
source, store, requests = sys.argv[1:]
ingest._REPORT_INTERVAL_S = 0
parts.REQUESTS_IN_FLIGHT = int(requests)
settings, started_s = DataSettings(source=source), time.monotonic()
ingest.ingest_source(settings, store, lambda text: print(text, flush=True))
wall_s = time.monotonic() - started_s
peak_kib = next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))
print("RESULT", wall_s, time.process_time(), peak_kib, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    images = parser.parse_args().images
    machine_info, rows = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch, minio(Path(scratch)) as port, proxy(port) as (delayed_port, sent):
        client = Minio(f"127.0.0.1:{port}", *KEYS, secure=False)
        client.make_bucket("images")
        few = min(images // 20, 1000)
        upload(client, "few", range(few))
        upload(client, "many", range(images))

        def measure(name: str, prefix: str, store: str, requests: int, kill_after: int = 0) -> dict[str, float | str]:
            before = sent[0]
            row = ingest(delayed_port, f"s3://images/{prefix}", f"s3://images/{store}", requests, kill_after)
            rows.append({"ingest": name, "requests_in_flight": requests, "sent_bytes": sent[0] - before, **row})
            print(rows[-1], flush=True)
            return rows[-1]

        earlier = measure("2 in flight", "few", "store-few", 2)
        first = measure("32 in flight", "many", "store-many", 32)
        measure("killed", "many", "store-killed", 32, images // 2)
        measure("continued", "many", "store-killed", 32)
        unchanged = measure("unchanged", "many", "store-many", 32)
        upload(client, "many", range(images, images + images // 100))
        more = measure("+1%", "many", "store-many", 32)
    result = {
        "latency_s": LATENCY_S,
        "images": images,
        "images_per_s": first["images_per_s"],
        "ratio_to_2_in_flight": round(first["images_per_s"] / earlier["images_per_s"], 2),
        "ratio_to_earlier_version": round(first["images_per_s"] / EARLIER_IMAGES_PER_S, 2),
        "unchanged_part_of_first": round(unchanged["wall_s"] / first["wall_s"], 4),
        "one_percent_part_of_first": round(more["wall_s"] / first["wall_s"], 4),
        "rows": rows,
    }
    table = [
        ["ingest", "images read", "seconds", "CPU seconds", "images per second", "MB sent to the store", "peak memory"]
    ]
    for row in rows:
        table.append(
            [
                str(row["ingest"]),
                f"{row['images_read']:,}",
                f"{row['wall_s']:.1f}",
                f"{row['cpu_s']:.1f}" if "cpu_s" in row else "",
                f"{row['images_per_s']:.0f}",
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else "",
            ]
        )
    machine.write("scale_ingest", "Ingest from a bucket that takes 20 ms per request", machine_info, result, table)


def ingest(port: int, source: str, store: str, requests: int, kill_after: int) -> dict[str, float]:
    """Ingest in a process, which is killed once it reports ``kill_after`` images."""
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEYS[0],
        "AWS_SECRET_ACCESS_KEY": KEYS[1],
        "OMP_NUM_THREADS": "1",
    }
    started_s, read = time.monotonic(), 0
    command = [sys.executable, "-c", INGEST, source, store, str(requests)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT"):
                wall_s, cpu_s, peak_kib = map(float, line.split()[1:])
            elif match := re.match(r"([\d,]+) of ([\d,]+) images", line):
                done, read = (int(number.replace(",", "")) for number in match.groups())
                if kill_after and done >= kill_after:
                    process.kill()
                    wall_s = time.monotonic() - started_s
                    return {"images_read": done, "wall_s": wall_s, "images_per_s": done / wall_s}
    assert process.returncode == 0
    result = {"images_read": read, "wall_s": wall_s, "cpu_s": cpu_s, "images_per_s": read / wall_s}
    return {**result, "peak_bytes": peak_kib * 1024}


def upload(client: Minio, prefix: str, numbers: range) -> None:
    def put(number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), np.uint8)
        buffer = BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        size_bytes = buffer.tell()
        buffer.seek(0)
        client.put_object("images", f"{prefix}/class-{number % CLASSES:03}/{number}.png", buffer, size_bytes)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(put, numbers):
            pass


@contextmanager
def minio(directory: Path) -> Generator[int]:
    """Start MinIO, whose binary is at ``MINIO``, and yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MINIO_ROOT_USER": KEYS[0], "MINIO_ROOT_PASSWORD": KEYS[1]}
    command = [os.environ["MINIO"], "server", str(directory / "data"), "--address", f"127.0.0.1:{port}", "--quiet"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None
                time.sleep(0.1)
            time.sleep(3)  # it listens before it is ready
            yield port
        finally:
            server.kill()


@contextmanager
def proxy(port: int) -> Generator[tuple[int, list[int]]]:
    """Start a TCP proxy that delays what it forwards to ``port``; yield its own port and a count of
    these bytes."""
    loop, sent, server_port = asyncio.new_event_loop(), [0], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)

        async def forward_responses() -> None:
            while data := await server_reader.read(2**16):
                writer.write(data)
            writer.close()

        responses = loop.create_task(forward_responses())
        while data := await reader.read(2**16):
            sent[0] += len(data)
            loop.call_later(LATENCY_S, server_writer.write, data)
        loop.call_later(LATENCY_S, server_writer.close)
        await responses

    started = threading.Event()

    def run() -> None:
        nonlocal server_port
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
        server_port = server.sockets[0].getsockname()[1]
        started.set()
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    started.wait()
    try:
        yield server_port, sent
    finally:
        loop.call_soon_threadsafe(loop.stop)


if __name__ == "__main__":
    main()
