"""The whole story in Chromium: an unknown digit, eleven more, one name,
a reindex, recognized, and a rollback.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from evernear.common.store import open_store
from evernear.data.sources.digits import lay_out_digits
from evernear.review.submissions import Submissions
from tests.releases import settings_on_free_ports

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="No Chromium on the PATH; Debian's package is called chromium."),
    pytest.mark.timeout(600),
    # playwright leaves its pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
NEW = "7"
"""The digit that the source lacks."""
IMAGES = 12
CLICKS = 10
"""Fewer have to lead from unknown to recognized."""
AXE = Path(__file__).parents[4] / ".venv/axe/package/axe.min.js"
"""`make test-integrations` installs it with npm."""
COUNT_CLICKS = """addEventListener("pointerdown", () => {
    sessionStorage.clicks = Number(sessionStorage.clicks ?? 0) + 1
}, true)"""
WIDTHS_PX = {"desktop": 1200, "phone": 390}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pictures of the pages are kept: ``EVERNEAR_TEST_ARTIFACTS``,
    or a temporary directory.
    """
    directory = os.environ.get("EVERNEAR_TEST_ARTIFACTS")
    folder = Path(directory) if directory else tmp_path_factory.mktemp("pages")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def evernear(*words: str) -> list[str]:
    return [sys.executable, "-m", "evernear", *words]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A working directory whose server recognizes all digits but one;
    images of that one are in ``digits-7``.
    """
    root = tmp_path_factory.mktemp("story")
    folders = lay_out_digits(root, NEW)
    ports = settings_on_free_ports()
    changed = {name: value for name, value in ports.model_dump(mode="json").items() if name.endswith("_port")}
    options = [word for name, value in changed.items() for word in ("--set", f"serving.{name}={value}")]
    gate = ["--set", "gate.beat_baseline=false"]
    words = ["run", "--preset", "quick", "--source", f"folder:{folders.known}", "--workdir", str(root / "work")]
    subprocess.run(evernear(*words, *options, *gate), check=True)
    yield root
    subprocess.run(evernear("stop", "--workdir", str(root / "work")), check=True)


@pytest.fixture
def url(workdir: Path) -> Generator[str]:
    words = evernear("console", "--port", "0", "--workdir", str(workdir / "work"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("Open ").strip()
        process.terminate()


@pytest.fixture
def page(url: str) -> Generator[Page]:
    """A page that is signed in. An error of a script,
    or a violation of the security policy, fails the test.
    """
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(base_url=url.partition("?")[0], viewport={"width": WIDTHS_PX["desktop"], "height": 800})
        page.on("pageerror", lambda error: errors.append(str(error)))
        refused = "status of 400"  # the page shows why
        page.on(
            "console",
            lambda message: (
                errors.append(message.text) if message.type == "error" and refused not in message.text else None
            ),
        )
        page.goto(url)
        yield page
        browser.close()
    assert errors == []


def barriers(page: Page) -> list[str]:
    """Serious and critical violations that axe finds on the page;
    none if npm has not installed axe.
    """
    if not AXE.exists():
        return []
    page.evaluate(AXE.read_text())
    result: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert result["passes"], "axe has checked something"
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def picture(page: Page, folder: Path, name: str) -> None:
    """Pictures of the page in both themes and widths.
    Nothing is wider than the window or hard to access.
    """
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for device, width_px in WIDTHS_PX.items():
            page.set_viewport_size({"width": width_px, "height": 800})
            page.screenshot(path=folder / f"{name}-{device}-{theme}.png", full_page=True)
            widths: Any = page.locator("html").evaluate("page => [page.scrollWidth, page.clientWidth]")
            assert widths[0] <= widths[1], f"{name} scrolls sideways on a {device}"
            assert barriers(page) == [], f"{name} on a {device}, {theme}"
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": WIDTHS_PX["desktop"], "height": 800})


def test_every_page_from_unknown_to_recognized_and_back(page: Page, workdir: Path, artifacts: Path) -> None:
    new = sorted((workdir / f"digits-{NEW}").glob("*.png"))
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
    page.set_input_files("#files", [str(path) for path in new[1:12]])
    expect(page.locator(".answer")).to_have_count(12)
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    unknown = page.locator(".answer.unknown").count()
    assert unknown >= 8, "most images of a class that the gallery lacks are unknown"
    picture(page, artifacts, "try")
    page.click("#send-all")
    expect(page.locator(".sent")).to_have_count(unknown)
    expect(page.locator("#send-all")).to_be_hidden()
    sent = Submissions(open_store((workdir / "work/store").as_uri())).pending((), unknown)
    assert all(item.embedding is not None for item in sent), "they are grouped as the recognizer sees them"

    page.goto("/review")
    picture(page, artifacts, "review")
    for box in page.locator("[data-all]").all():
        box.check()
    page.fill("#naming [name=label]", str(NEW))
    page.click("#naming button.main")
    expect(page.locator(".notice")).to_have_text(f"{unknown} images named {NEW}.")
    page.click("#reindex")
    expect(page.locator("#again p")).to_contain_text("now recognized", timeout=300_000)
    recognized = int(page.locator("#again p").inner_text().split(": ")[1].split()[0])
    assert recognized >= 0.8 * unknown
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


def test_from_unknown_to_recognized_in_a_few_clicks(page: Page, workdir: Path, artifacts: Path) -> None:
    """Other images of the digit, without a stop for pictures.
    Seconds are an artifact: they depend on the machine.
    """
    new = sorted((workdir / f"digits-{NEW}").glob("*.png"))[IMAGES : 2 * IMAGES]
    page.add_init_script(COUNT_CLICKS)
    page.get_by_role("link", name="Try", exact=True).click()
    started_s = time.monotonic()
    with page.expect_file_chooser() as chooser:
        page.locator("#drop").click()
    chooser.value.set_files([str(path) for path in new])
    expect(page.locator("article[aria-busy]")).to_have_count(0)
    expect(page.locator(".answer")).to_have_count(IMAGES)
    unknown = page.locator(".answer.unknown").count()
    assert unknown >= 8, "most images of a class that the gallery lacks are unknown"
    page.locator("#send-all").click()
    expect(page.locator(".sent")).to_have_count(unknown)
    page.get_by_role("link", name="Review", exact=True).click()
    boxes = page.locator("[data-all]")
    boxes.first.click()
    if boxes.count() > 1:
        boxes.last.click(modifiers=["Shift"])
    page.keyboard.press("n")
    page.keyboard.type(NEW)
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_have_text(f"{unknown} images named {NEW}.")
    page.locator("#reindex").click()
    expect(page.locator("#again p")).to_contain_text("now recognized", timeout=300_000)
    seconds = time.monotonic() - started_s
    recognized, named = map(int, re.findall(r": (\d+) of (\d+)", page.locator("#again p").inner_text())[0])
    clicks = int(str(page.evaluate("sessionStorage.clicks")))
    figures = {
        "images": IMAGES,
        "unknown": unknown,
        "named": named,
        "recognized": recognized,
        "clicks": clicks,
        "seconds": seconds,
    }
    (artifacts / "story.json").write_text(json.dumps(figures))
    assert recognized >= 0.8 * named
    assert clicks < CLICKS
