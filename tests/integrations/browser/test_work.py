"""A working day in Chromium: wrong labels are mended from the list of mistakes, a training is
started and its release tried, and two runs are compared."""

import re
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.integrations.browser.served import COUNT_CLICKS, IN_A_BROWSER, evernear, evernear_done, picture, serve_digits

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

pytestmark = IN_A_BROWSER
WRONG = 5


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    yield from serve_digits(tmp_path_factory.mktemp("work"), 7, in_words=True)


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
            expect(page.locator(".notice")).to_have_text("1 image named three.")
            mended += 1
    (artifacts / "mistakes.txt").write_text(f"{mended} of {WRONG} planted labels mended in {clicks(page)} clicks.\n")
    assert mended >= WRONG - 1
    assert clicks(page) <= 12
    assert len(list((source / "three").glob("planted-*-review-*"))) == mended
    expect(page.locator("#mistakes")).to_contain_text(f"{mended} of them are corrected")

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
    page.screenshot(path=artifacts / "compared.png", full_page=True)
    page.go_back()
    boxes.nth(0).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_visible()


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
