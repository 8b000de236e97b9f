"""A console in Chromium."""

import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integrations.browser.served import CHROMIUM, WIDTHS_PX, evernear, serve_digits

if TYPE_CHECKING:
    from playwright.sync_api import Page


EXPECT_TIMEOUT_MS = 60_000
"""The default of 5 s is too short for the first predictions on a busy machine."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pictures of the pages are kept: ``EVERNEAR_TEST_ARTIFACTS``, or a temporary
    directory."""
    directory = os.environ.get("EVERNEAR_TEST_ARTIFACTS")
    folder = Path(directory) if directory else tmp_path_factory.mktemp("pages")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def workdir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A folder that contains the working directory ``work`` of the console, whose release knows all
    digits but seven: as words, or as digits in a test file with ``IN_WORDS = False``."""
    in_words = getattr(request.module, "IN_WORDS", True)
    yield from serve_digits(tmp_path_factory.mktemp("console"), 7, in_words=in_words)


@pytest.fixture
def url(workdir: Path) -> Generator[str]:
    words = evernear("console", "--port", "0", "--workdir", str(workdir / "work"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("Open ").strip()
        process.terminate()


@pytest.fixture
def page(url: str) -> "Generator[Page]":
    """A page that is signed in. An error of a script, or a violation of the security policy, fails
    the test."""
    from playwright.sync_api import expect, sync_playwright  # the modules skip themselves without it

    expect.set_options(timeout=EXPECT_TIMEOUT_MS)
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
