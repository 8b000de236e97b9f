"""The documentation site: links that must exist, and the settings reference."""

import base64
import re
from pathlib import Path

import nbformat
import pytest

from docs import build
from docs.settings_reference import settings, settings_page
from evernear.errors import DataError


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page in the docs of an empty repository."""
    for name in ("docs/images/a.svg", "docs/other.md", "docs/decisions/README.md", "src/steps.py", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(build, "PAGES", {tmp_path / "README.md": "index.md"})
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/evernear")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_SHA", "0123abc")
    return tmp_path / "docs" / "page.md"


def rewritten(page: Path, text: str) -> str:
    page.touch()
    return build.rewrite_links(page, text, build.all_pages()).strip()


@pytest.mark.parametrize(
    ("link", "rewritten_link"),
    [
        ("other.md#part", "other.md#part"),
        ("../README.md", "index.md"),
        ("decisions/", "decisions/index.md"),
        ("images/a.svg", "images/a.svg"),
        ("../src/steps.py", "https://github.com/owner/evernear/blob/0123abc/src/steps.py"),
        ("https://example.org/page", "https://example.org/page"),
        ("#here", "#here"),
    ],
)
def test_links_fit_the_site(page: Path, link: str, rewritten_link: str) -> None:
    assert rewritten(page, f"[text]({link})") == f"[text]({rewritten_link})"


def test_links_of_the_readme_lead_to_pages(page: Path) -> None:
    readme = page.parent.parent / "README.md"
    text = build.rewrite_links(readme, "[other](docs/other.md) ![picture](docs/images/a.svg)", build.all_pages())
    assert text == "[other](other.md) ![picture](images/a.svg)\n"


def test_missing_link_target_is_an_error_with_file_and_line(page: Path) -> None:
    with pytest.raises(DataError, match=r"^docs/page\.md:3 links to gone\.md, which does not exist"):
        rewritten(page, "# Title\n\n[text](gone.md)")


def test_code_blocks_are_left_alone(page: Path) -> None:
    text = "```python\nhandlers[name](gone)\n```"
    assert rewritten(page, text) == text


def test_resources_of_other_hosts_are_reported_and_links_are_not(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org/"></a><script src="https://cdn.example/a.js"></script>'
        '<link rel="stylesheet" href="//fonts.example/a.css"><img src="images/a.svg">'
    )
    assert build.foreign_resources(tmp_path) == {"https://cdn.example/a.js", "//fonts.example/a.css"}


def test_list_that_the_generator_reads_as_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text("<p>Two - or three.</p><ul><li>- one</li></ul>")
    (tmp_path / "bad.html").write_text("<p>Steps:\n1. Install\n2. Run</p>")
    assert build.unrendered_lists(tmp_path) == {"bad.html"}


def test_notebook_becomes_a_page_with_its_pictures(page: Path) -> None:
    picture = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(b"PNG").decode()})
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("plot()", outputs=[picture])]
    notebook = page.with_name("notebook.ipynb")
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    text, pictures = build.page_text(notebook)
    ((name, data),) = pictures.items()
    assert data == b"PNG"
    assert text.startswith("# Title")
    assert "plot()" in text
    assert f'src="{name}"' in build.rewrite_links(notebook, text, build.all_pages())


def test_every_setting_is_described_in_the_reference() -> None:
    undescribed = [name for name, field in settings() if not field.description]
    assert not undescribed
    page = settings_page()
    assert all(f"| `{name}` |" in page for name, _ in settings())


def test_navigation_lists_every_page_of_docs_and_every_notebook() -> None:
    navigation = (build.ROOT / "zensical.toml").read_text()
    pages = [str(path.relative_to(build.DOCS)) for path in build.DOCS.glob("*.md")]
    pages += [f"notebooks/{path.stem}.md" for path in (build.ROOT / "notebooks").iterdir()]
    assert not [page for page in pages if f'"{page}"' not in navigation]


def test_make_help_describes_every_target() -> None:
    makefile = (build.ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    described = re.findall(r"^([a-z-]+):.*## \w", makefile, re.MULTILINE)
    assert sorted(described) == sorted(targets.split())
