"""Lower bound: the core in a loop, without a server.
``in_process.py PARTS SECONDS BATCH... < IMAGES``.

Reads a JSON list of base64 images. Prints JSON: the prediction for each image alone, and the batch
latencies for each batch size.
"""

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

from evernear.release.archive_reader import open_parts
from evernear.serving.core import Predictor


def main() -> None:
    parts, seconds, *sizes = sys.argv[1:]
    images = [base64.b64decode(image) for image in json.load(sys.stdin)]
    core = Predictor.open(open_parts(Path(parts)))
    answers = [json.loads(core.predict([image])[0].model_dump_json()) for image in images]
    cells = {size: time_batches(core, images, int(size), float(seconds)) for size in sizes}
    print(json.dumps({"answers": answers, "cells": cells}))


def time_batches(core: Predictor, images: list[bytes], size: int, seconds: float) -> dict[str, Any]:
    batches = [images[start : start + size] for start in range(0, len(images) - size + 1, size)]
    latencies_s: list[float] = []
    started_s = now_s = time.perf_counter()
    cpu_s = time.process_time()
    while now_s - started_s < seconds:
        answers = core.predict(batches[len(latencies_s) % len(batches)])
        _ = [answer.model_dump_json().encode() for answer in answers]
        latencies_s.append(time.perf_counter() - now_s)
        now_s += latencies_s[-1]
    return {"duration_s": now_s - started_s, "cpu_s": time.process_time() - cpu_s, "latencies_s": latencies_s}


if __name__ == "__main__":
    main()
