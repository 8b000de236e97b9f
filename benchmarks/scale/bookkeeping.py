"""The stages of an ingest in the step's own process: list, plan, combine and publish.
``python -m benchmarks.scale.bookkeeping``.

The parts are not decoded: their results are written directly, as if other nodes had
decoded them, and this time is left out. The images are 28 x 28 gray and random. The
source is a bucket whose pages of 1,000 names take 20 ms, without a network. The CPU
time for making the pages is left out, and the CPU time for reading them is not. The
store is a directory whose requests take 20 ms. The rows are measured one after the
other, each in its own process:

- ``first``: an ingest of all names;
- ``unchanged``: the same names again;
- ``+1%``: the same names, and 1% more.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks import machine
from benchmarks.scale.bucket import LATENCY_S
from evernear.common.disk import sha256_bytes
from evernear.common.parts import OpenWorker, Parts
from evernear.common.store import FileStore
from evernear.common.store.s3 import S3Store
from evernear.common.store.s3_connection import S3Connection
from evernear.data import ingest
from evernear.data import parts as parts_stage
from evernear.data.parts import DecodedFile, IngestPart, encode_result
from evernear.data.snapshots import Snapshots
from evernear.data.sources.folder import Bucket
from evernear.settings import DataSettings

CLASSES = 100
SIZE_PX = 28
PAGE_NAMES = 1000
STAGES = ("list", "plan", "combine", "publish")
FUNCTIONS = {
    "list_source": "list",
    "open_draft": "plan",
    "plan": "plan",
    "decode_in_parts": "plan",
    "load_results": "combine",
    "combine": "combine",
    "list_problems": "publish",
    "write_tables": "publish",
}
"""The stage of each function of `evernear.data.ingest`."""


class Took(NamedTuple):
    """How long something took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: "Took") -> "Took":  # type: ignore[override]
        return Took(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=100)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    part_names = -(-arguments.images // arguments.parts)
    if arguments.row:
        store, count = arguments.row
        print(json.dumps(measure(Path(store), int(count), part_names)), flush=True)
        return
    machine_info, rows = machine.describe(), []
    more = arguments.images + arguments.images // 100
    with tempfile.TemporaryDirectory() as scratch:
        for name, count in (("first", arguments.images), ("unchanged", arguments.images), ("+1%", more)):
            command = [sys.executable, "-m", "benchmarks.scale.bookkeeping", "--images", str(arguments.images)]
            command += ["--parts", str(arguments.parts), "--row", scratch, str(count)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"ingest": name, "names": count} | json.loads(done.stdout))
            print(rows[-1], flush=True)
    table = [["ingest", *(f"{stage}, s" for stage in STAGES), "all, s", "CPU seconds", "MB written", "peak memory"]]
    for row in rows:
        table.append(
            [
                f"{row['ingest']}: {row['names']:,} names",
                *(f"{row[stage][0]:.1f}" for stage in STAGES),
                f"{row['all'][0]:.1f}",
                f"{row['all'][1]:.1f}",
                f"{row['written_bytes'] / 1e6:.1f}",
                f"{row['peak_bytes'] / 2**20:.0f} MiB",
            ]
        )
    new_bytes = arguments.images // 100 * (SIZE_PX**2 + 36)
    result = {
        "images": arguments.images,
        "parts": arguments.parts,
        "new_bytes": new_bytes,
        "written_of_new": round(rows[-1]["written_bytes"] / new_bytes, 2),
        "rows": rows,
    }
    title = f"Bookkeeping of an ingest of {arguments.images:,} names in {arguments.parts:,} parts"
    machine.write("scale_bookkeeping", title, machine_info, result, table)


def measure(directory: Path, count: int, part_names: int) -> dict[str, Any]:
    """Ingest ``count`` names, without decoding them."""
    took: defaultdict[str, Took] = defaultdict(Took)

    def timed(owner: Any, name: str, stage: str) -> None:
        setattr(owner, name, _timed(getattr(owner, name), took, stage))

    store = SlowStore(directory)
    decode = _timed(_save_results, took, "decode")
    bucket = serve_listing(count, took)
    ingest.open_source = lambda *_: bucket  # type: ignore[assignment]
    ingest.open_store = lambda _: store  # type: ignore[assignment]
    for name, stage in FUNCTIONS.items():
        timed(ingest, name, stage)
    timed(Snapshots, "publish", "publish")
    parts_stage.PART_NAMES = part_names
    settings = DataSettings(source="s3://listed/names", size_px=SIZE_PX, bit_depth=8)
    before = Took(time.monotonic(), time.process_time())
    ingest.ingest_source(settings, store.uri, run=decode)
    all_stages = Took(time.monotonic() - before.wall_s, time.process_time() - before.cpu_s)
    decoding = took.pop("decode", Took())
    without = Took(-decoding.wall_s, -decoding.cpu_s)
    took["plan"] = took["plan"] + without
    served = Took(0, -took.pop("serve").cpu_s)
    took["list"] = took["list"] + served
    status = Path("/proc/self/status").read_text()
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return {
        **{stage: tuple(took[stage]) for stage in STAGES},
        "all": tuple(all_stages + without + served),
        "written_bytes": store.written_bytes - store.decoded_bytes,
        "decoded_bytes": store.decoded_bytes,
        "peak_bytes": int(peak_kib) * 1024,
    }


def _timed(function: Callable[..., Any], took: dict[str, Took], stage: str) -> Callable[..., Any]:
    @wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            took[stage] += Took(time.monotonic() - wall_s, time.process_time() - cpu_s)

    return timed


def serve_listing(count: int, took: dict[str, Took]) -> Bucket:
    """A bucket with ``count`` names. Its pages take as long as those of a real bucket, and the CPU
    time for making them is recorded under ``serve``."""
    per_class = -(-count // CLASSES)
    counts = {f"class-{label:03}/": min(per_class, count - label * per_class) for label in range(CLASSES)}

    def page(self: S3Connection, bucket: str, prefix: str, token: str = "", delimiter: str = "") -> bytes:
        time.sleep(LATENCY_S)
        cpu_s = time.thread_time()
        if delimiter:
            data = _xml("", 0, 0, "", counts)
        else:
            folder, start = prefix or next(iter(counts)), int(token or 0)
            end = min(start + PAGE_NAMES, counts[folder])
            data = _xml(folder, start, end, str(end) if end < counts[folder] or not prefix else "")
        took["serve"] += Took(0, time.thread_time() - cpu_s)
        return data

    def children(self: S3Store, folder: str) -> Iterator[str]:
        return iter(["0.png"] if folder else counts)

    def read(self: Bucket, name: str) -> bytes:
        """An image of the sample from which the form of the dataset is chosen."""
        buffer = BytesIO()
        Image.new("L", (SIZE_PX, SIZE_PX)).save(buffer, "PNG")
        return buffer.getvalue()

    Bucket.read = read
    S3Connection._page = page  # pyright: ignore[reportPrivateUsage]
    S3Store.children = children
    return Bucket("s3://listed")


def _xml(folder: str, start: int, end: int, next_token: str, folders: Iterable[str] = ()) -> bytes:
    """A page of a listing, as MinIO writes it."""
    objects = (
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&#34;{hashlib.md5(name.encode()).hexdigest()}&#34;</ETag><Size>900</Size>"  # noqa: S324
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for name in (f"{folder}{position:08}.png" for position in range(start, end))
    )
    token = f"<NextContinuationToken>{next_token}</NextContinuationToken>" if next_token else ""
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>listed</Name><EncodingType>url</EncodingType><IsTruncated>{'true' if token else 'false'}</IsTruncated>"
        f"{token}{''.join(objects)}"
        f"{''.join(f'<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>' for name in folders)}"
        "</ListBucketResult>"
    )
    return text.encode()


class SlowStore(FileStore):
    """A directory whose requests take as long as those of a bucket."""

    written_bytes = 0
    decoded_bytes = 0
    """Bytes of the parts' results, which other nodes write."""

    def find(self, key: str) -> tuple[bytes, str] | None:
        time.sleep(LATENCY_S)
        return super().find(key)

    def fetch(self, key: str, path: Path, sha256: str | None = None) -> Path:
        time.sleep(LATENCY_S)
        return super().fetch(key, path, sha256)

    def delete(self, key: str) -> None:
        time.sleep(LATENCY_S)
        super().delete(key)

    def _write(self, key: str, data: bytes | Path, check: Callable[[Path], None]) -> str:
        time.sleep(LATENCY_S)
        self.written_bytes += data.stat().st_size if isinstance(data, Path) else len(data)
        return super()._write(key, data, check)


def _save_results(parts: Parts, _: OpenWorker) -> None:
    """Write the results of all parts."""
    assert isinstance(parts.store, SlowStore)
    before = parts.store.written_bytes
    for number, value in parts.tasks(parts.missing()):
        entries = IngestPart.from_json(value, "").entries
        names = [entry.name for entry in entries]
        digests = [hashlib.sha256(name.encode()).digest() for name in names]
        rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
        pixels = np.tile(rows, (1, SIZE_PX**2 // 32 + 1))[:, : SIZE_PX**2].tobytes()
        sha256 = sha256_bytes(pixels)
        key = f"{parts.folder}/{sha256}.raw"
        parts.store.put(key, pixels)
        files = [
            DecodedFile(entry.name, entry.etag, digest, SIZE_PX, SIZE_PX)
            for entry, digest in zip(entries, digests, strict=True)
        ]
        parts.save_result(number, encode_result(files, key, sha256))
    parts.store.decoded_bytes += parts.store.written_bytes - before


if __name__ == "__main__":
    main()
