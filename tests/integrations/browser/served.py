"""A working directory whose server recognizes all digits but one, and pictures of the console's
pages."""

import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evernear.data.sources.digits import lay_out_digits
from tests import ROOT
from tests.releases import settings_on_free_ports

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IN_A_BROWSER = [
    pytest.mark.skipif(CHROMIUM is None, reason="No Chromium on the PATH; Debian's package is called chromium."),
    pytest.mark.timeout(600),
    # playwright leaves its pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
AXE = ROOT / ".venv/axe/package/axe.min.js"
"""`make test-integrations` installs it with npm."""
WIDTHS_PX = {"desktop": 1200, "phone": 390}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


COUNT_CLICKS = """addEventListener("pointerdown", () => {
    sessionStorage.clicks = Number(sessionStorage.clicks ?? 0) + 1
}, true)"""


def evernear(*words: str) -> list[str]:
    return [sys.executable, "-m", "evernear", *words]


def evernear_done(*words: str) -> str:
    """The output of a command that succeeds."""
    return subprocess.run(evernear(*words), check=True, capture_output=True, text=True).stdout


def serve_digits(root: Path, without: int, *, in_words: bool) -> Generator[Path]:
    """Train on all digits but one, and serve the release until the generator is closed. Images of
    the other digit are in ``digits-<digit>``. Classes are digits or words."""
    folders = lay_out_digits(root, str(without))
    if in_words:
        for folder in list(folders.known.iterdir()):
            folder.rename(folder.with_name(WORDS[int(folder.name)]))
    ports = settings_on_free_ports()
    changed = {name: value for name, value in ports.model_dump(mode="json").items() if name.endswith("_port")}
    options = [word for name, value in changed.items() for word in ("--set", f"serving.{name}={value}")]
    gate = ["--set", "gate.beat_baseline=false"]
    words = ["run", "--preset", "quick", "--source", f"folder:{folders.known}", "--workdir", str(root / "work")]
    subprocess.run(evernear(*words, *options, *gate), check=True)
    yield root
    subprocess.run(evernear("stop", "--workdir", str(root / "work")), check=True)


def unknown_images(root: Path, digit: str) -> list[Path]:
    """The images of the digit that the served release calls unknown, as ``evernear predict`` says.
    How many there are depends on the processor's rounding, because two epochs train the network."""
    images = [str(image) for image in sorted((root / f"digits-{digit}").glob("*.png"))]
    words = evernear("predict", *images, "--json", "--workdir", str(root / "work"))
    answers = [json.loads(line) for line in subprocess.check_output(words, text=True).splitlines()]
    return [Path(answer["image"]) for answer in answers if answer["unknown"]]


def barriers(page: "Page") -> list[str]:
    """Violations that axe finds on the page; none if npm has not installed axe."""
    if not AXE.exists():
        return []
    page.evaluate(AXE.read_text())
    result: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert result["passes"], "axe has checked something"
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
        for each in result["violations"]
        for node in each["nodes"]
    ]


def picture(page: "Page", folder: Path, name: str) -> None:
    """Pictures of the page in both themes and widths. Nothing is wider than the window or hard to
    access."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for device, width_px in WIDTHS_PX.items():
            page.set_viewport_size({"width": width_px, "height": 800})
            page.screenshot(path=folder / f"{name}-{device}-{theme}.png", full_page=True)
            widths: Any = page.locator("html").evaluate("page => [page.scrollWidth, page.clientWidth]")
            assert widths[0] <= widths[1], f"{name} scrolls sideways on a {device}"
            assert not (found := barriers(page)), "\n".join([f"{name} on a {device}, {theme}:", *found])
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": WIDTHS_PX["desktop"], "height": 800})
