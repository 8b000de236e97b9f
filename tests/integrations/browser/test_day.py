"""A day in Chromium: a mistyped name, a question, a class that waits, a reindex that it does not
stop, a rollback, another reindex, and fresh images."""

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

from tests.integrations.browser.served import IN_A_BROWSER, picture

pytestmark = IN_A_BROWSER
IMAGES = 14
"""Enough for a class, and one to mistype."""
FRESH = 30


def ask(page: Page, images: list[Path]) -> int:
    """Drop images on Try, and return how many are recognized as seven."""
    page.goto("/try")
    page.set_input_files("#files", [str(path) for path in images])
    expect(page.locator(".answer")).to_have_count(len(images))
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    return page.locator(".answer:not(.unknown) .big").get_by_text("seven", exact=True).count()


def select(page: Page, images: int) -> None:
    boxes = page.locator("#naming [name=image]")
    for number in range(images):
        boxes.nth(number).check()


def name(page: Page, label: str) -> None:
    page.fill("#naming [name=label]", label)
    page.keyboard.press("Enter")


def reindex(page: Page) -> dict[str, tuple[int, int]]:
    """For each named class, how many of its images are recognized, and how many were asked."""
    page.click("#reindex")
    expect(page.locator("#again p").first).to_contain_text("now recognized", timeout=300_000)
    expect(page.locator("#again")).to_contain_text("left out of its own neighbors")
    found = re.findall(r"(\w+): (\d+) of (\d+) are now recognized", page.locator("#again").inner_text())
    return {label: (int(recognized), int(asked)) for label, recognized, asked in found}


def test_a_day(page: Page, workdir: Path, artifacts: Path) -> None:
    images = sorted((workdir / "digits-7").glob("*.png"))
    source = workdir / "digits-without-7"
    assert ask(page, images[:IMAGES]) == 0
    for number in range(IMAGES):
        page.locator(".send").first.click()
        expect(page.locator(".sent")).to_have_count(number + 1)

    page.goto("/review")
    select(page, IMAGES - 1)
    name(page, "seven")
    expect(page.locator(".notice")).to_have_text(f"{IMAGES - 1} images named seven. seven is a new class.")
    select(page, 1)
    name(page, "sevn")
    expect(page.locator("#question")).to_contain_text("sevn is a new class. Did you mean")
    expect(page.locator("#question button").first).to_be_focused()
    expect(page.locator("#naming [name=image]")).to_be_checked()
    assert not (source / "sevn").exists(), "nothing is recorded before the answer"
    picture(page, artifacts, "question")
    page.get_by_role("button", name="Make the new class sevn").click()
    expect(page.locator(".notice")).to_contain_text("It waits until it has 10 images: 1 of 10.")
    expect(page.locator(".named")).to_contain_text("sevn new: 1 image 1 of 10")
    picture(page, artifacts, "waiting")
    page.goto("/data")
    expect(page.locator("main")).to_contain_text("sevn (1 of 10)")
    picture(page, artifacts, "data-waiting")

    page.goto("/review")
    recognized = reindex(page)
    assert recognized["seven"][1] == IMAGES - 1
    expect(page.locator("#again")).to_contain_text("sevn is left out until it has 10 images: 1 of 10")
    expect(page.locator(".named li")).to_have_count(1)
    expect(page.locator(".named")).to_contain_text("sevn new: 1 image 1 of 10")
    picture(page, artifacts, "reindexed")

    page.locator(".answered", has_text="sevn").locator(".undo").click()
    expect(page.locator(".notice")).to_have_text("1 image back in review.")
    expect(page.locator(".named")).to_have_count(0)
    select(page, 1)
    name(page, "sevn")
    expect(page.locator("#question button").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_have_text("1 image named seven.")
    expect(page.locator(".named")).to_contain_text("seven: 1 image for the next reindex")

    page.goto("/releases")
    row = page.locator("tr.current")
    row.get_by_text("Roll back").first.click()
    row.locator("[name=why]").fill("a story")
    row.locator("button.main").click()
    expect(page.locator(".notice")).to_be_visible(timeout=120_000)
    page.goto("/review")
    expect(page.locator(".named")).to_contain_text(f"seven new: {IMAGES} images for the next reindex")
    picture(page, artifacts, "rolled-back")

    recognized = reindex(page)
    assert list(recognized) == ["seven"]
    expect(page.locator(".named")).to_have_count(0)
    right, asked = recognized["seven"]
    fresh = ask(page, images[-FRESH:])
    (artifacts / "day.txt").write_text(f"{right} of {asked} named, {fresh} of {FRESH} fresh images are recognized.\n")
    assert asked == IMAGES
    assert right / asked >= 0.5
    assert fresh / FRESH >= 0.5
