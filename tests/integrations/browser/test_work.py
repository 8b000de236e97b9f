"""A working day in Chromium: wrong labels are mended from the list of mistakes, a training is
started and its release tried, and two runs are compared."""

import base64
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.review.live_labels import import_labels
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.integrations.browser.served import COUNT_CLICKS, IN_A_BROWSER, evernear, evernear_done, picture

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

pytestmark = IN_A_BROWSER
WRONG = 5
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true })"


def clicks(page: Page) -> int:
    return int(str(page.evaluate("sessionStorage.clicks ?? 0")))


def plant(page: Page, source: Path) -> list[Path]:
    """Give five test images the label of another class, and reindex."""
    page.goto("/data/class?class=three")
    names = page.locator("#naming .captioned > div", has=page.locator("small", has_text="test"))
    wrong = [name.strip() for name in names.locator("bdi").all_inner_texts()[:WRONG]]
    for name in wrong:
        shutil.move(source / "three" / name, source / "nine" / f"planted-{name}")
    return [source / "nine" / f"planted-{name}" for name in wrong]


def test_wrong_labels_are_mended_from_the_list_of_mistakes(page: Page, workdir: Path, artifacts: Path) -> None:
    work, source = str(workdir / "work"), workdir / "digits-without-7"
    planted = plant(page, source)
    subprocess.run(evernear("reindex", "--workdir", work), check=False)  # the gate may hold the release
    promote = evernear("registry", "promote", newest(work), "--force", "--why", "a test", "--workdir", work)
    subprocess.run(promote, check=False)  # it may be live already
    page.add_init_script(COUNT_CLICKS)
    page.goto("/releases")
    page.evaluate("sessionStorage.clicks = 0")
    page.get_by_label("Pages").get_by_role("link", name="Mistakes").click()
    picture(page, artifacts, "mistakes")
    mended = 0
    for path in planted:
        form = page.locator(".mistakes form", has_text=path.name)
        if form.count() and form.locator("[name=label]").input_value() == "three":
            form.get_by_role("button", name="Relabel").click()
            expect(form).to_have_count(0)  # the notice may still be that of the image before
            expect(page.locator(".notice")).to_have_text("1 image named three.")
            mended += 1
    (artifacts / "mistakes.txt").write_text(f"{mended} of {WRONG} planted labels mended in {clicks(page)} clicks.\n")
    assert mended >= WRONG - 1
    assert clicks(page) <= 12
    expect(page.locator("#mistakes")).to_contain_text(f"{mended} of them are corrected")
    assert len(list((source / "three").glob("planted-*-review-*"))) == mended

    # By keyboard: keep the label of the first image that is left.
    keep = page.locator(".mistakes form").first.get_by_role("button", name="Keep")
    keep.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_have_text("1 image kept.")


def test_training_is_started_and_its_release_tried_in_four_clicks(page: Page, workdir: Path, artifacts: Path) -> None:
    page.add_init_script(COUNT_CLICKS)
    page.goto("/releases")
    before = page.locator("tr.current code").inner_text()
    page.evaluate("sessionStorage.clicks = 0")
    page.get_by_label("Pages").get_by_role("link", name="Review").click()
    expect(page.locator("#train")).to_be_visible()
    picture(page, artifacts, "train")
    page.locator("#train").click()
    expect(page.locator("#run")).to_contain_text("in progress")
    expect(page.locator("#run")).not_to_contain_text("in progress", timeout=400_000)
    expect(page.locator("#run")).to_contain_text("The last run")
    page.get_by_label("Pages").get_by_role("link", name="Try").click()
    with page.expect_file_chooser() as chooser:
        page.locator("#drop").click()
    chooser.value.set_files([str(next((workdir / "digits-7").glob("*.png")))])
    expect(page.locator(".answer")).to_have_count(1, timeout=60_000)
    assert clicks(page) == 4
    page.goto("/runs")
    expect(page.locator("tbody tr").first).to_contain_text("train")
    page.goto("/releases")
    assert before in page.locator("main").inner_text()


def test_two_runs_are_compared_in_three_clicks(page: Page, workdir: Path, artifacts: Path) -> None:
    subprocess.run(evernear("reindex", "--workdir", str(workdir / "work")), check=False)  # may change nothing
    page.add_init_script(COUNT_CLICKS)
    page.goto("/runs")
    picture(page, artifacts, "runs")
    page.evaluate("sessionStorage.clicks = 0")
    boxes = page.locator("[name=run]")
    chosen = sorted(str(boxes.nth(number).get_attribute("value")) for number in (0, 1))
    boxes.nth(0).click()
    boxes.nth(1).click()
    assert clicks(page) == 2
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("h1")).to_have_text(f"Run {chosen[0]} and run {chosen[1]}")
    picture(page, artifacts, "compared")
    page.go_back()
    boxes.nth(0).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_visible()


def label_live_query(work: Path, image: Path) -> None:
    """The live release called the query unknown."""
    store, now = open_store((work / "store").as_uri()), datetime.now(UTC)
    version = Registry(store).require_champion().version
    file = base64.b64encode(image.read_bytes()).decode()
    query = LoggedQuery(at=now, pred="nine", dist=1.5, unknown=True, id="query-1", file=file, neighbors=(0, 1))
    period = Period(version=version, since=now, until=now, queries=1, unknown=1)
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, query))
    store.put(f"queries/{now:%Y%m%d}/{now:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())
    import_labels(store, {"query-1": "three"}, now)


def test_every_page_is_accessible(page: Page, workdir: Path, artifacts: Path) -> None:
    """Also at 390 px, and in both color schemes."""
    source, image = workdir / "digits-without-7", next((workdir / "digits-7").glob("*.png"))
    label_live_query(workdir / "work", image)
    for path in (
        "/review",
        "/mistakes",
        "/data",
        f"/data/class?class={next(each.name for each in source.iterdir())}",
        "/data/class?class=three&filter=called+unknown",
        "/runs",
        "/releases",
        "/data/class?class=nothing",
    ):
        page.goto(path)
        expect(page.locator("h1")).to_be_visible()
        page.evaluate(OPEN_ALL)
        picture(page, artifacts, f"page{re.sub(r'[^a-z]+', '-', path)}")
    page.goto("/data/class?class=three")
    page.locator("[data-large]").first.click()
    expect(page.locator("#large")).to_be_visible()
    picture(page, artifacts, "large")
    page.goto("/runs")
    page.locator("tbody a").last.click()
    expect(page.locator("h1")).to_be_visible()
    page.evaluate(OPEN_ALL)
    picture(page, artifacts, "run")


def test_burst_of_images_is_named_at_once(page: Page, workdir: Path, artifacts: Path) -> None:
    images = sorted((workdir / "digits-7").glob("*.png"))[:3]
    page.goto("/try")
    page.set_input_files("#files", [str(path) for path in images])
    expect(page.locator(".answer")).to_have_count(len(images), timeout=60_000)
    page.get_by_role("button", name="Unknown first").click()
    page.get_by_label("These are all").fill("seven")
    page.keyboard.press("Enter")
    expect(page.locator("#name-all .done")).to_contain_text("3 images named seven.", timeout=60_000)
    picture(page, artifacts, "burst")
    assert len(list((workdir / "digits-without-7/seven").glob("review-*.png"))) == len(images)


def newest(work: str) -> str:
    return max(re.findall(r"\d{8}\.\d{6}\.[0-9a-f]{8}", evernear_done("registry", "list", "--workdir", work)))
