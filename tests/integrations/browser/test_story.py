"""The whole story in Chromium: an unknown digit, eleven more, one name, a reindex, recognized, and
a rollback."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from evernear.common.store import open_store
from evernear.review.queue import Submissions
from tests.integrations.browser.served import (
    COUNT_CLICKS,
    IN_A_BROWSER,
    evernear,
    picture,
    unknown_images,
)

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

pytestmark = IN_A_BROWSER
IN_WORDS = False
NEW = "7"
"""The digit that the source lacks."""
IMAGES = 12
CLICKS = 10
"""Fewer have to lead from unknown to recognized."""


@pytest.fixture(scope="module")
def new(workdir: Path) -> list[Path]:
    return unknown_images(workdir, NEW)


def test_every_page_from_unknown_to_recognized_and_back(
    page: Page, workdir: Path, new: list[Path], artifacts: Path
) -> None:
    page.goto("/releases")
    before = page.locator("tr.current code").inner_text()

    page.goto("/try")
    expect(page.locator("#send-all")).to_be_hidden()
    no_image = workdir / "notes.txt"
    no_image.write_text("no image")
    page.set_input_files("#files", [str(no_image)])
    expect(page.locator("article", has_text="notes.txt").locator(".fault")).to_contain_text("image")
    page.reload()
    page.set_input_files("#files", [str(new[0])])
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator("article .file")).to_have_text(new[0].name)
    lines: Any = page.evaluate("""[...document.querySelectorAll('.neighbors b')].map((name) => {
        const before = name.textContent;
        name.textContent = 'wheelbarrow';
        const lines = name.getClientRects().length;
        name.textContent = before;
        return lines;
    })""")
    assert set(lines) == {1}, "no name breaks inside the word"
    neighbors = page.locator(".neighbors img")
    expect(neighbors.first).to_be_visible()
    assert all("/try/neighbor/" in str(image.get_attribute("src")) for image in neighbors.all())
    page.wait_for_function("[...document.querySelectorAll('.neighbors img')].every(image => image.naturalWidth > 0)")
    page.set_input_files("#files", [str(path) for path in new[1:IMAGES]])
    expect(page.locator(".answer")).to_have_count(IMAGES)
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    expect(page.locator(".answer.unknown")).to_have_count(IMAGES)
    picture(page, artifacts, "try")
    page.click("#send-all")
    expect(page.locator(".sent")).to_have_count(IMAGES)
    expect(page.locator("#send-all")).to_be_hidden()
    sent = Submissions(open_store((workdir / "work/store").as_uri())).pending((), IMAGES)
    assert all(item.embedding is not None for item in sent), "they are grouped as the recognizer sees them"

    page.goto("/review")
    picture(page, artifacts, "review")
    for box in page.locator("[data-all]").all():
        box.check()
    page.fill("#naming [name=label]", str(NEW))
    page.click("#naming button.main")
    expect(page.locator(".notice")).to_contain_text(f"{IMAGES} images named {NEW}.")
    page.click("#reindex")
    expect(page.locator("#again p").first).to_contain_text("now recognized", timeout=300_000)
    recognized = int(page.locator("#again p").first.inner_text().split(": ")[1].split()[0])
    assert recognized >= 0.5 * IMAGES, "without themselves"
    picture(page, artifacts, "named")

    page.goto("/try")
    page.set_input_files("#files", [str(new[0])])
    expect(page.locator(".answer .big")).to_have_text(NEW)

    page.goto("/data")
    expect(page.locator(".classes li")).to_have_count(10)
    expect(page.locator(".classes img").first).to_be_visible()
    picture(page, artifacts, "data")

    page.goto("/releases")
    picture(page, artifacts, "releases")
    row = page.locator("tr.current")
    row.get_by_text("Roll back").first.click()
    row.locator("[name=why]").fill("the story ends")
    row.locator("button.main").click()
    expect(page.locator(".notice")).to_contain_text(before, timeout=120_000)
    expect(page.locator("tr.current code")).to_have_text(before)
    page.goto("/try")
    page.set_input_files("#files", [str(new[0])])
    expect(page.locator(".answer.unknown")).to_have_count(1)


def test_from_unknown_to_recognized_in_a_few_clicks(
    page: Page, workdir: Path, new: list[Path], artifacts: Path
) -> None:
    """Other images of the digit, without a stop for pictures. Seconds are an artifact: they depend
    on the machine. Like the whole story, it ends with a rollback, so that either may be first."""
    page.add_init_script(COUNT_CLICKS)
    page.get_by_role("link", name="Try", exact=True).click()
    started_s = time.monotonic()
    with page.expect_file_chooser() as chooser:
        page.locator("#drop").click()
    chooser.value.set_files([str(path) for path in new[IMAGES : 2 * IMAGES]])
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    expect(page.locator(".answer")).to_have_count(IMAGES)
    expect(page.locator(".answer.unknown")).to_have_count(IMAGES)
    page.locator("#send-all").click()
    expect(page.locator(".sent")).to_have_count(IMAGES)
    page.get_by_role("link", name="Review", exact=True).click()
    boxes = page.locator("[data-all]")
    boxes.first.click()
    if boxes.count() > 1:
        boxes.last.click(modifiers=["Shift"])
    page.keyboard.press("n")
    page.keyboard.type(NEW)
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_contain_text(f"{IMAGES} images named {NEW}.")
    page.locator("#reindex").click()
    expect(page.locator("#again p").first).to_contain_text("now recognized", timeout=300_000)
    seconds = time.monotonic() - started_s
    recognized, named = map(int, re.findall(r": (\d+) of (\d+)", page.locator("#again p").first.inner_text())[0])
    clicks = int(str(page.evaluate("sessionStorage.clicks")))
    figures = {
        "images": IMAGES,
        "named": named,
        "recognized": recognized,
        "clicks": clicks,
        "seconds": seconds,
    }
    (artifacts / "story.json").write_text(json.dumps(figures))
    assert recognized >= 0.5 * named, "without themselves"
    assert clicks < CLICKS
    subprocess.run(evernear("registry", "rollback", "--workdir", str(workdir / "work")), check=True)
