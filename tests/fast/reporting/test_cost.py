"""The estimated cost of a step, and of a run on its page."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evernear.common.parts import PartsRecord
from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import open_store
from evernear.reporting.notify import finalize
from evernear.reporting.page import compare_page, run_page
from evernear.reporting.run_report import RunReport, cost
from evernear.settings import CostSettings, RunSettings, TrainSettings

STARTED = datetime(2026, 1, 2, tzinfo=UTC)
GIB = 2**30
PRICES = CostSettings(currency="EUR", cpu_hour=0.1, memory_gib_hour=0.01)
CPU_AND_GPU = CostSettings(currency="EUR", cpu_hour=0.1, memory_gib_hour=0.01, gpu_hour=3.0)


def step_of(name: str = "embed", hours: float = 2.0, **values: Any) -> StepRecord:
    """A step that took ``hours``, one of which on the CPU, and 3 GiB."""
    usage = {
        "cpu_s": 3600.0,
        "peak_memory_bytes": 3 * GIB,
        "state": "finished",
        "ended": STARTED + timedelta(hours=hours),
    }
    return StepRecord(step=name, started=STARTED, **usage | values)


@pytest.mark.parametrize(
    ("step", "prices", "expected"),
    [
        pytest.param(step_of(), PRICES, 1 * 0.1 + 2 * 3 * 0.01, id="without limits: CPU time and peak memory"),
        pytest.param(
            step_of(cpu_limit=4, memory_limit_bytes=8 * GIB),
            PRICES,
            2 * (4 * 0.1 + 8 * 0.01),
            id="limits of the container",
        ),
        pytest.param(step_of(gpus=2), CPU_AND_GPU, 0.1 + 2 * (3 * 0.01 + 2 * 3.0), id="GPUs"),
        pytest.param(step_of(gpus=1), PRICES, None, id="a GPU without a price"),
        pytest.param(step_of(state="running", ended=None, cpu_s=0.0), PRICES, None, id="running"),
        pytest.param(step_of(cpu_s=0.0), PRICES, None, id="killed, so that its CPU time is unknown"),
    ],
)
def test_cost_of_a_step(step: StepRecord, prices: CostSettings, expected: float | None) -> None:
    assert cost(step, prices) == pytest.approx(expected)


def record(directory: Path, run: str, *steps: StepRecord, **settings: Any) -> RunRecord:
    """A run that failed after ``steps``."""
    saved = RunRecord(open_store((directory / "store").as_uri()), run)
    for step in steps:
        saved.save_step(step)
    saved.save(settings=RunSettings(**settings).model_dump(mode="json"))
    finalize(saved, "continuous-training", "FAILED", "")
    return saved


def test_pages_show_the_cost_of_each_step_and_of_the_run(tmp_path: Path) -> None:
    first = record(tmp_path, "r1", step_of("embed"), step_of("index", cpu_limit=4), cost=PRICES)
    second = record(tmp_path, "r2", step_of("embed"), cost=PRICES)
    page, compared = run_page(first), compare_page(first, second)
    for html in (page, compared):
        assert "cost, EUR" in html
        for value in ("0.1600", "0.8600", "1.0200"):  # embed, index, both
            assert f'<td class="n">{value}</td>' in html
    assert "about 1.0200 EUR" in page
    assert compared.index("about 1.0200 EUR") < compared.index("about 0.1600 EUR") < compared.index("Metrics")


def test_unknown_cost_is_not_part_of_a_sum(tmp_path: Path) -> None:
    html = run_page(record(tmp_path, "r1", step_of("index"), step_of("train", gpus=1), cost=PRICES))
    table = html[html.index('id="steps"') :]
    assert re.findall(r'<td class="n">(-|\d\.\d{4})</td>', table) == ["0.1600", "-", "-"]
    assert "about" not in html[: html.index("<nav>")]


def test_nodes_of_a_train_job_have_an_unknown_cost(tmp_path: Path) -> None:
    steps = step_of("ingest"), step_of("train")
    several = record(tmp_path, "r1", *steps, train=TrainSettings(nodes=2))
    assert [each is None for each in RunReport.load(several).costs] == [False, True]


def test_page_shows_nodes_retries_and_cost_beside_the_saved_time(tmp_path: Path) -> None:
    saved = record(tmp_path, "r1", step_of("embed"), cost=PRICES)
    ran = PartsRecord(nodes=4, parts=12, retries=2, cpus=2, memory_bytes=2**30, parts_s=7200, elapsed_s=2400)
    saved.save(parts_embed=ran.model_dump(mode="json"))
    html = run_page(saved)
    table = html[html.index("on several nodes") :]
    cells = re.findall(r'<td class="n">([^<]*)</td>', table[: table.index("</table>")])
    expected = 2 * (2 * PRICES.cpu_hour + PRICES.memory_gib_hour)
    assert cells == ["4", "12", "2", "40 min 0 s", "2 h 0 min", "1 h 20 min", f"{expected:.4f}"]
    assert RunReport.load(saved).costs == [pytest.approx(0.16 + expected)]
    without_limits = ran.model_copy(update={"cpus": None})
    saved.save(parts_embed=without_limits.model_dump(mode="json"))
    assert RunReport.load(saved).costs == [None]
    assert "on several nodes" not in run_page(record(tmp_path, "r2", step_of("embed")))


def test_no_cost_without_prices(tmp_path: Path) -> None:
    free = CostSettings(cpu_hour=0, memory_gib_hour=0)
    assert "cost, " not in run_page(record(tmp_path, "r1", step_of(), cost=free))
