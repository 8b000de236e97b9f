"""A class opens in Chromium: it is renamed, and its images are moved, removed and looked at, with a
mouse and by keyboard."""

import re
from pathlib import Path

import pytest

from tests.integrations.browser.served import COUNT_CLICKS, IN_A_BROWSER, evernear_done, picture
from tests.waiting import until

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect

pytestmark = IN_A_BROWSER


def test_images_of_a_class_are_moved_removed_and_brought_back(page: Page, workdir: Path, artifacts: Path) -> None:
    source = workdir / "digits-without-7"
    page.goto("/data")
    page.get_by_role("link", name="three", exact=True).click()
    expect(page.locator("#naming .tile")).to_have_count(60)
    picture(page, artifacts, "class")
    page.locator("[data-large]").first.click()
    expect(page.locator("dialog img")).to_be_visible()
    page.wait_for_function("document.querySelector('dialog img').naturalWidth > 0")
    page.screenshot(path=artifacts / "large.png")
    page.keyboard.press("Escape")
    before = len(list((source / "three").glob("*.png")))
    page.locator("#naming [name=image]").first.focus()
    page.keyboard.press("Space")
    page.keyboard.press("n")
    page.keyboard.type("eight")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_have_text("1 image named eight.")
    assert len(list((source / "three").glob("*.png"))) == before - 1
    assert len(list((source / "eight").glob("*-review-*.png"))) == 1
    page.locator("#naming [name=image]").first.check()
    page.get_by_role("button", name="Remove").click()
    expect(page.locator(".notice")).to_contain_text("1 image removed")
    assert len(list((source / ".removed/three").glob("*.png"))) == 1
    page.keyboard.press("u")
    expect(page.locator(".notice")).to_contain_text("back")
    assert not (source / ".removed").exists()
    page.locator(".undo").first.click()
    until(lambda: len(list((source / "three").glob("*.png"))) == before)
    expect(page.locator(".undo")).to_have_count(0)
    page.get_by_role("link", name="called unknown").click()
    expect(page.locator("p", has_text=" of ").first).to_be_visible()
    picture(page, artifacts, "class-unknown")


def test_class_is_renamed_in_three_clicks_and_stays_the_same_class(page: Page, workdir: Path, artifacts: Path) -> None:
    source = workdir / "digits-without-7"
    names = {path.name for path in (source / "two").iterdir()}
    page.goto("/data")
    page.add_init_script(COUNT_CLICKS)
    page.evaluate("sessionStorage.clicks = 0")
    page.goto("/data")
    page.get_by_role("link", name="two", exact=True).click()
    page.get_by_label("New name").click()
    page.keyboard.type("deux")
    page.keyboard.press("Enter")
    expect(page.locator("#question-rename")).to_contain_text(f"{len(names)} files move")
    picture(page, artifacts, "rename")
    page.get_by_role("button", name="Yes, rename").click()
    expect(page.locator(".notice")).to_have_text(f"{len(names)} files moved to deux.")
    assert int(str(page.evaluate("sessionStorage.clicks"))) == 3
    assert {path.name for path in (source / "deux").iterdir()} == names
    assert not (source / "two").exists()

    output = evernear_done("reindex", "--workdir", str(workdir / "work"))
    assert re.search(r"promoted: release", output)
    page.goto("/data/class?class=deux&filter=near+the+threshold")
    expect(page.locator("h1")).to_have_text("deux")
    expect(page.locator("main")).not_to_contain_text("No run recorded")
