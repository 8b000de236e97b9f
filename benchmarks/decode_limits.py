"""Cost of the most expensive valid file of each kind:
``python benchmarks/decode_limits.py``.

Each file has ``max_pixels`` pixels and as many scans, chunks and metadata as the limits
allow. It is decoded in a separate process, as on a server, to 28 x 28 and to 1024 x
1024, the maximum of ``data.size_px``. Time is CPU time, which other processes hardly
affect. Memory is the increase of the process's high-water mark (VmHWM) minus the file
itself, which decoding copies once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from evernear.data.preprocess import DECODE_BYTES_PER_PIXEL
from evernear.settings import ServingSettings
from tests import hostile

SIDES_PX = (28, 1024)
DECODE = """
import json, sys, time
from io import BytesIO
from pathlib import Path
from evernear.data.preprocess import decode, to_array
from PIL import Image

def status(name):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith(name))

Image.preinit()
data, max_pixels, side_px = Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), int(sys.argv[3])
before_bytes, before_s = status("VmRSS"), time.process_time()
to_array(decode(data, max_pixels), side_px, side_px, 3)
print(json.dumps({"cpu_s": time.process_time() - before_s, "peak_bytes": status("VmHWM") - before_bytes}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-pixels", type=int, default=ServingSettings().max_pixels)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    machine_info, rows = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in hostile.largest_valid_files(arguments.max_pixels).items():
            file = Path(scratch) / "image"
            file.write_bytes(make())
            row = {"file": name, "size_bytes": file.stat().st_size}
            row["to"] = {side: measure(file, arguments, side) for side in SIDES_PX}
            rows.append(row)
            print(row, flush=True)
    heading = ["file", "size", *(f"to {side} x {side}: time, memory, bytes per pixel" for side in SIDES_PX)]
    table = [heading] + [
        [row["file"], f"{row['size_bytes'] / 1e6:.2f} MB", *(cell(row["to"][side]) for side in SIDES_PX)]
        for row in rows
    ]
    machine.write(
        "decode_limits",
        "CPU time and memory of the most expensive valid file of each kind",
        machine_info,
        {"max_pixels": arguments.max_pixels, "rows": rows},
        table,
    )
    if any(cost["bytes_per_pixel"] > DECODE_BYTES_PER_PIXEL for row in rows for cost in row["to"].values()):
        sys.exit(f"A file takes more than {DECODE_BYTES_PER_PIXEL} bytes of memory per pixel.")


def measure(file: Path, arguments: argparse.Namespace, side_px: int) -> dict[str, float]:
    command = [sys.executable, "-c", DECODE, str(file), str(arguments.max_pixels), str(side_px)]
    rounds = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(arguments.rounds)
    ]
    peak_bytes = max(cost["peak_bytes"] for cost in rounds) - file.stat().st_size
    return {
        "cpu_s": round(min(cost["cpu_s"] for cost in rounds), 3),
        "peak_bytes": peak_bytes,
        "bytes_per_pixel": round(peak_bytes / arguments.max_pixels, 1),
    }


def cell(cost: dict[str, float]) -> str:
    return f"{cost['cpu_s']:.2f} s, {cost['peak_bytes'] / 2**20:.0f} MiB, {cost['bytes_per_pixel']:.1f}"


if __name__ == "__main__":
    main()
