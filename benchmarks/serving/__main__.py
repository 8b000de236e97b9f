"""Comparison of evernear's server with others: ``python -m benchmarks.serving --source mnist``.

All serve one network (of the preset ``fast``, trained briefly: weights do not affect speed) and one
gallery with nearly every image outside the test split, as vectors of 128 dimensions. A closed loop
of 1, 8 and 32 keep-alive clients sends images of the test split to one server at a time, in rounds.
The results are medians over the rounds, and every response is compared with the core's, called in
process, except for the naive handler's, whose gallery has the vectors as the network gives them.

``--photographs`` compares them with the network of the preset ``photos``, EfficientNet-Lite0 at
224 px, and 1 and 8 clients. They send images of the test split, enlarged with noise, as JPEG files
of 12 megapixels, as phones make them, or of 640 px. The naive handler, FastAPI and LitServe decode
all pixels with Pillow and torchvision, as tutorials do, so their distances differ and are not
counted as wrong. Servers use different numbers of cores, so compare the CPU time of a request::

    python -m benchmarks.serving --source folder:DIRECTORY --photographs 12mp

- ``naive``: TorchServe with its defaults around a handler in the style of the source
  document;
- ``evernear``, ``evernear gRPC``: evernear with its defaults,
  as ``evernear serve`` starts it;
- ``prep``: the same with ``evernear prep`` in front
  (bodies in JSON, which it requires);
- ``kserve``: KServe's predictor without a transformer;
- ``kserve transformer``: the same with a transformer in front,
  which calls it over gRPC;
- ``fastapi``: FastAPI and uvicorn around the same core (for photographs, around the same network),
  one image per call;
- ``litserve``: LitServe around what FastAPI calls,
  batching like evernear (bodies in JSON, which it requires);
- ``in-process``: the core alone with batches of 1, 8 and 32, as a lower bound.
  Its latencies are per batch.

``--busy`` adds one spinning process, to simulate a shared machine.
"""

import argparse
import base64
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.serving import servers
from benchmarks.serving.load import Target, measure
from benchmarks.serving.release import APPS, PHOTOGRAPHS, Served, prepare
from evernear.settings import Settings, load

STARTED = (servers.naive, servers.evernear, servers.kserve, servers.fastapi, servers.litserve)
ROWS = (
    "naive",
    "evernear",
    "evernear gRPC",
    "prep",
    "kserve",
    "kserve transformer",
    "fastapi",
    "litserve",
    "in-process",
)
PEERS = ("naive", "fastapi", "litserve")
DISTANCE_TOLERANCE = 5e-3  # the naive handler's vectors are not rounded to fp16; the square root is steep near zero
TARGET_TIMES_RPS, TARGET_P99_SHARE = 15, 0.1


@dataclass(frozen=True)
class Cell:
    """One server at one concurrency in one round."""

    rps: float
    p50_ms: float
    p99_ms: float
    requests: int
    non_2xx: int = 0
    wrong: int = 0
    cores: Mapping[str, float] | None = None
    """CPU seconds per second of the load generator and of the server's processes."""


Cells = dict[tuple[str, int], list[Cell]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each measurement")
    parser.add_argument(
        "--first", type=float, default=8.0, help="warm-up before a server's first measurement, in seconds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photographs", choices=PHOTOGRAPHS, help="compare with photographs of this size")
    parser.add_argument("--busy", action="store_true", help="run next to a spinning process")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the running server

    arguments.concurrencies = (1, 8) if arguments.photographs else (1, 8, 32)
    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        photographs = PHOTOGRAPHS.get(arguments.photographs)
        served = prepare(settings_of(arguments, Path(scratch)), Path(scratch), photographs)
        print(f"{served.gallery_size:,} vectors, {len(served.images)} query images", flush=True)
        with servers.trivial(served, Path(scratch) / "trivial") as running:
            ceiling = measure_server(running.targets["trivial"], running, arguments, arguments.concurrencies[-1]).rps
        cells: Cells = {}
        with busy() if arguments.busy else nullcontext():
            for number in range(arguments.rounds):
                run_round(served, Path(scratch), arguments, cells)
                print(f"round {number + 1} of {arguments.rounds} done", flush=True)
    if unresponsive := [
        f"{name} at {clients}" for (name, clients), rounds in cells.items() if not all(c.rps for c in rounds)
    ]:
        raise SystemExit(f"No response in time from {', '.join(unresponsive)}.")
    result = summarize(cells) | {"gallery": served.gallery_size, "load_ceiling_rps": round(ceiling)}
    name = "_".join(["serving", *filter(None, [arguments.photographs]), *["busy"] * arguments.busy])
    if arguments.set:
        print(*table(result), sep="\n")
        return
    machine.write(
        name,
        "Requests per second and latency of servers with the same network and gallery",
        machine_info,
        result,
        table(result),
    )
    sentences = compared(result) if arguments.photographs else [*notes(result), *compared(result)]
    with (machine.RESULTS / f"{name}.md").open("a") as file:
        file.write("\n" + "\n".join(sentences) + "\n")
    print(*sentences, sep="\n")


def settings_of(arguments: argparse.Namespace, scratch: Path) -> Settings:
    """The preset fast, the default index, and a large gallery, which train images join; or the
    preset photos."""
    values = {"workdir": str(scratch / "work"), "data.source": arguments.source}
    if not arguments.photographs:
        values |= {"data.gallery_fraction": "0.80", "data.query_fraction": "0.05"}
    flags = [*(f"{key}={value}" for key, value in values.items()), *arguments.set]
    settings = load(preset="photos" if arguments.photographs else "fast", environment={}, overrides=flags)
    ports = servers.ports_of(settings.serving)
    return settings.model_copy(update={"serving": settings.serving.model_copy(update=ports)})


def run_round(served: Served, scratch: Path, arguments: argparse.Namespace, cells: Cells) -> None:
    """Run one round: start every server, measure it at every concurrency, and stop it."""
    lower_bound = in_process(served, arguments.seconds, arguments.concurrencies)
    for concurrency in arguments.concurrencies:
        cells.setdefault(("in-process", concurrency), []).append(
            in_process_cell(lower_bound["cells"][str(concurrency)], concurrency)
        )
    for start in STARTED:
        with start(served, scratch / start.__name__) as running:
            for name, target in running.targets.items():
                # Java compiles hot methods, so servers are compared after a warm-up.
                measure(target, arguments.concurrencies[-1], arguments.first, arguments.warm_up, running.processes)
                is_apart = name == "naive" or (arguments.photographs and name in PEERS)
                expected = None if is_apart else lower_bound["answers"]
                for concurrency in arguments.concurrencies:
                    cell = measure_server(target, running, arguments, concurrency, expected)
                    cells.setdefault((name, concurrency), []).append(cell)
                    print(f"{name} at {concurrency}: {cell}", flush=True)


def in_process(served: Served, seconds: float, sizes: tuple[int, ...]) -> dict[str, Any]:
    command = [sys.executable, APPS / "in_process.py", served.parts, str(seconds), *map(str, sizes)]
    images = json.dumps([base64.b64encode(image).decode() for image in served.images])
    completed = subprocess.run(command, input=images, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(completed.stdout)


def in_process_cell(result: dict[str, Any], batch: int) -> Cell:
    latencies_ms = sorted(1e3 * latency_s for latency_s in result["latencies_s"])
    images = len(latencies_ms) * batch
    p99_ms = latencies_ms[math.ceil(0.99 * len(latencies_ms)) - 1]
    cores = {"python": result["cpu_s"] / result["duration_s"]}
    return Cell(images / result["duration_s"], statistics.median(latencies_ms), p99_ms, images, cores=cores)


def measure_server(
    target: Target,
    running: servers.Running,
    arguments: argparse.Namespace,
    concurrency: int,
    expected: list[dict[str, Any]] | None = None,
) -> Cell:
    result = measure(target, concurrency, arguments.seconds, arguments.warm_up, running.processes)
    wrong = sum(
        count
        for (image, body), count in result.answers.items()
        if expected is not None and not agrees(target.prediction_of(body), expected[image])
    )
    return Cell(
        rps=result.rps,
        p50_ms=result.percentile_ms(0.50),
        p99_ms=result.percentile_ms(0.99),
        requests=len(result.latencies_s),
        non_2xx=result.faults.total(),
        wrong=wrong,
        cores=result.cores,
    )


def agrees(response: bytes, expected: dict[str, Any]) -> bool:
    prediction = json.loads(response)
    return (
        prediction.get("pred") == expected["pred"] and abs(prediction["dist"] - expected["dist"]) <= DISTANCE_TOLERANCE
    )


def summarize(cells: Cells) -> dict[str, Any]:
    """Compute medians over the rounds and total the faults."""
    concurrencies = sorted({clients for _, clients in cells})
    rows = {name: {str(c): median_of(cells[name, c]) for c in concurrencies} for name in ROWS}
    naive = rows["naive"]
    ratios = {
        name: {
            c: {
                "rps": round(cell["rps"] / naive[c]["rps"], 2),
                "p50": round(cell["p50_ms"] / naive[c]["p50_ms"], 3),
                "p99": round(cell["p99_ms"] / naive[c]["p99_ms"], 3),
            }
            for c, cell in row.items()
        }
        for name, row in rows.items()
    }
    return {"servers": rows, "ratios_to_naive": ratios}


def median_of(rounds: list[Cell]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 2)

    names = {name for cell in rounds for name in cell.cores or {}}
    return {
        "rps": median([cell.rps for cell in rounds]),
        "p50_ms": median([cell.p50_ms for cell in rounds]),
        "p99_ms": median([cell.p99_ms for cell in rounds]),
        "requests": sum(cell.requests for cell in rounds),
        "non_2xx": sum(cell.non_2xx for cell in rounds),
        "wrong": sum(cell.wrong for cell in rounds),
        "cpu_ms": median([1e3 * server_cores(cell) / cell.rps for cell in rounds]),
        "cores": {name: median([(cell.cores or {}).get(name, 0.0) for cell in rounds]) for name in sorted(names)},
        "rps_of_rounds": [round(cell.rps, 1) for cell in rounds],
    }


def server_cores(cell: Cell) -> float:
    return sum(cores for name, cores in (cell.cores or {}).items() if name != "load")


def table(result: dict[str, Any]) -> list[list[str]]:
    concurrencies = [int(c) for c in result["servers"]["naive"]]
    heading = [f"{c} client{'s' * (c > 1)}: req/s, p50 / p99 ms, times naive, CPU ms" for c in concurrencies]
    lines = [["server", *heading, "non-2xx, wrong"]]
    for name, row in result["servers"].items():
        ratios = result["ratios_to_naive"][name]
        cells = [
            f"**{cell['rps']:,.0f}**, {cell['p50_ms']:.1f} / {cell['p99_ms']:.1f}, {ratios[c]['rps']:.1f}x, "
            f"{cell['cpu_ms']:.1f}"
            for c, cell in row.items()
        ]
        faults = [sum(cell[kind] for cell in row.values()) for kind in ("non_2xx", "wrong")]
        lines.append([name, *cells, ", ".join(map(str, faults))])
    return lines


def notes(result: dict[str, Any]) -> list[str]:
    """Describe whether the targets are met, the latency of a single client, and the bottleneck
    under load."""
    rows, highest = result["servers"], next(reversed(result["servers"]["naive"]))
    row, ratios = rows["evernear"], result["ratios_to_naive"]["evernear"]
    met = ratios[highest]["rps"] >= TARGET_TIMES_RPS and ratios[highest]["p99"] <= TARGET_P99_SHARE
    non_2xx = sum(cell["non_2xx"] for cell in row.values())
    met = met and ratios["1"]["rps"] >= 1 and not non_2xx
    cores = row[highest]["cores"]
    return [
        f"The target is {'met' if met else 'missed'}. With {highest} clients, the throughput is "
        f"{ratios[highest]['rps']:.1f} times the naive handler's throughput (target: at least {TARGET_TIMES_RPS}), "
        f"and the p99 latency is {ratios[highest]['p99']:.3f} times the naive handler's (target: at most "
        f"{TARGET_P99_SHARE}). With one client, the throughput is {ratios['1']['rps']:.1f} times the naive handler's "
        "(target: at least 1). "
        f"{non_2xx} responses were non-2xx (target: 0).",
        f"The p50 latency of a single client is {row['1']['p50_ms']:.1f} ms over REST, "
        f"{rows['evernear gRPC']['1']['p50_ms']:.1f} ms over gRPC and "
        f"{rows['in-process']['1']['p50_ms']:.1f} ms in process.",
        f"With {highest} clients, the Python worker uses {cores['python']:.2f} cores, TorchServe's Java frontend "
        f"{cores['frontend']:.2f} cores and the load generator {cores['load']:.2f} cores of {os.cpu_count()}. The "
        f"in-process core recognizes {rows['in-process'][highest]['rps']:,.0f} images/s in batches of {highest}, so "
        f"{bottleneck(cores)} is the remaining bottleneck. The load generator alone reaches "
        f"{result['load_ceiling_rps']:,} requests/s.",
    ]


def compared(result: dict[str, Any]) -> list[str]:
    """Compare evernear on TorchServe and KServe, alone and behind a server that decodes, with the
    best of the other servers."""
    clients = next(reversed(result["servers"]["naive"]))
    rows = {name: row[clients] for name, row in result["servers"].items()}
    fastest = max(PEERS, key=lambda name: rows[name]["rps"])
    thriftiest = min(PEERS, key=lambda name: rows[name]["cpu_ms"])
    own = ", ".join(f"{name} {rows[name]['cpu_ms']:.1f}" for name in ROWS if name not in PEERS)
    return [
        f"With {clients} clients, evernear answers {rows['evernear']['rps'] / rows[fastest]['rps']:.2f} times as many "
        f"requests as {fastest}, the fastest of the others, and "
        f"{rows['evernear']['rps'] / rows['in-process']['rps']:.2f} times as many as the core in process.",
        f"CPU time of a request with {clients} clients, in ms: {own}. {thriftiest} is the best of the others: "
        f"{rows[thriftiest]['cpu_ms']:.1f}. Per core, evernear answers "
        f"{rows[thriftiest]['cpu_ms'] / rows['evernear']['cpu_ms']:.2f} times as many requests as {thriftiest}, and "
        f"{rows['naive']['cpu_ms'] / rows['evernear']['cpu_ms']:.2f} times as many as the naive handler.",
    ]


def bottleneck(cores: Mapping[str, float]) -> str:
    if cores["python"] > 0.85:
        return "the Python worker, which is one thread,"
    if sum(cores.values()) > 0.9 * (os.cpu_count() or 1):
        return "the processor, which frontend, worker and load generator share,"
    return "waiting (batching and hand-over between the processes)"


@contextmanager
def busy() -> Generator[None]:
    neighbor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbor.kill()
        neighbor.wait()


if __name__ == "__main__":
    main()
