"""The documentation site: links that must exist, and the settings reference."""

import base64
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.core import TyperGroup
from typer.main import get_command

from benchmarks.machine import without_paths
from docs import build
from docs.settings_reference import settings, settings_page
from docs.wrapping import damage
from evernear.cli.app import app
from evernear.common.extras import NEEDED_BY
from evernear.errors import DataError


@pytest.fixture
def docs_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_links_fit_the_site(docs_page: Path, link: str, rewritten_link: str) -> None:
    assert rewritten(docs_page, f"[text]({link})") == f"[text]({rewritten_link})"


def test_decisions_are_short_consecutive_and_in_the_index(docs_page: Path) -> None:
    folder = docs_page.parent / "decisions"
    (folder / "0001-gate.md").write_text("# 1. The gate\n")
    with pytest.raises(DataError, match=r"add the row: \| 1 \| \[The gate\]\(0001-gate.md\) \|"):
        build.check_decisions(folder)
    (folder / "README.md").write_text("| 1 | [The gate](0001-gate.md) |\n| 3 | [Pixels](0003-pixels.md) |\n")
    build.check_decisions(folder)
    (folder / "0003-pixels.md").write_text("# 3. Pixels\n")
    with pytest.raises(DataError, match=r"0003-pixels\.md is record 2"):
        build.check_decisions(folder)
    (folder / "0003-pixels.md").unlink()
    (folder / "0001-gate.md").write_text("# 1. The gate\n" + "word " * 297)
    with pytest.raises(DataError, match=r"0001-gate\.md has 301 words"):
        build.check_decisions(folder)


def test_links_of_the_readme_lead_to_pages(docs_page: Path) -> None:
    readme = docs_page.parent.parent / "README.md"
    text = build.rewrite_links(readme, "[other](docs/other.md) ![picture](docs/images/a.svg)", build.all_pages())
    assert text == "[other](other.md) ![picture](images/a.svg)"


@pytest.mark.parametrize("text", ["[the `steps`](../src/steps.py) and", "[the\nsteps](../src/steps.py#here) and"])
def test_link_to_code_is_text_where_the_repository_is_unknown(
    docs_page: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert rewritten(docs_page, f"See {text} [a page](other.md).") == (
        f"See {text[1 : text.index(']')]} and [a page](other.md)."
    )


def test_link_to_a_file_of_the_machine_or_to_a_missing_page_is_reported(tmp_path: Path) -> None:
    (tmp_path / "there is.html").write_text('<h2 id="part"></h2>')
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org/"></a><a href="there%20is.html#part"></a><a href="#here" id="here"></a>'
        '<a>none</a><a href="mailto:a@example.org"></a><a href="/page.html"></a>'
        '<a href="file:///src/steps.py"></a><a href="../outside.html"></a><a href="there%20is.html#gone"></a>'
    )
    dead = {"file:///src/steps.py", "../outside.html", "there%20is.html#gone"}
    assert build.dead_links(tmp_path) == {f"page.html -> {url}" for url in dead}


def test_missing_link_target_is_an_error_with_file_and_line(docs_page: Path) -> None:
    with pytest.raises(DataError, match=r"^docs/page\.md:3 links to gone\.md, which does not exist"):
        rewritten(docs_page, "# Title\n\n[text](gone.md)")


@pytest.mark.parametrize("text", ["```python\nhandlers[name](gone)\n```", "`handlers[name](gone)`"])
def test_code_is_left_alone(docs_page: Path, text: str) -> None:
    assert rewritten(docs_page, text) == text


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


def test_notebook_becomes_a_page_with_its_pictures(docs_page: Path) -> None:
    picture = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(b"PNG").decode()})
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("plot()", outputs=[picture])]
    notebook = docs_page.with_name("notebook.ipynb")
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


GUIDES = [build.ROOT / "README.md", *sorted(build.DOCS.glob("*.md"))]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_settings_that_a_page_names_exist(guide: Path) -> None:
    known = {name for name, _ in settings()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = re.findall(r"(?:`|--set )(([a-z_]+)\.(?!yml)[a-z_]+)\b", guide.read_text())
    assert not {name for name, section in named if section in sections and name not in known}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_commands_that_a_page_names_exist(guide: Path) -> None:
    """The guide to extending evernear adds the command `runs`."""
    named = re.findall(r"(?:`|\$ )evernear ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?(?=[ `|\n])", guide.read_text())
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    for name, subcommand in named:
        command = commands.commands.get(name)
        assert command or name == "runs", name
        if subcommand and isinstance(command, TyperGroup):
            assert subcommand in command.commands, (name, subcommand)


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


def test_readme_shows_both_commands_near_its_start() -> None:
    beginning = (build.ROOT / "README.md").read_text().splitlines()[:30]
    commands = [line.split("#")[0].strip() for line in beginning if line.startswith("$ ")]
    assert commands[:2] == ["$ make demo", "$ make test"]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_commands_of_the_readme_create_their_environment_in_an_empty_clone(tmp_path: Path, target: str) -> None:
    shutil.copytree(build.ROOT / "requirements", tmp_path / "requirements")
    for path in [build.ROOT / "Makefile", build.ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    for path in (build.ROOT / "tests").glob("*/*/requirements-*.lock"):
        (tmp_path / path.relative_to(build.ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(build.ROOT))
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", target], cwd=tmp_path, capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    lock = "--constraints requirements/main.lock" if target == "demo" else "--requirements requirements/main.lock"
    steps = ["-m venv .venv/tools", "uv venv", lock, "--editable ."]
    positions = [planned.stdout.index(step) for step in steps]
    assert positions == sorted(positions)
    last = planned.stdout.splitlines()[-1]
    assert last.startswith(".venv/bin/evernear demo" if target == "demo" else ".venv/bin/pytest")


def test_demo_installs_what_the_commands_of_the_readme_need_and_not_the_rest() -> None:
    command = ["make", "--no-print-directory", "-n", "-B", ".venv/.demo"]
    planned = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, check=True)
    extras = frozenset(re.findall(r"--extra (\S+)", planned.stdout))
    needed = {extra for names in NEEDED_BY.values() for extra in names} - {"model"}  # a part of train and of serve
    assert needed | {"pretrained"} <= extras, "evernear console, --preset photos and doctor slack included"
    packages = installed_with("evernear", extras)
    assert not {"pytest", "pymilvus", "mlflow-skinny", "optuna"} & packages
    assert len(packages) <= 160


def installed_with(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The package ``name`` with ``extras`` and all that they require on this platform."""
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [(name, extras)]
    while pending:
        package, wanted = pending.pop()
        if (package, wanted) in seen:
            continue
        seen.add((package, wanted))
        for text in importlib.metadata.requires(package) or ():
            required = Requirement(text)
            if any(required.marker is None or required.marker.evaluate({"extra": e}) for e in ("", *wanted)):
                pending.append((canonicalize_name(required.name), frozenset(required.extras)))
    return {package for package, _ in seen}


WHOLE = {
    "page.md": """Text with `evernear run` and a price of $5.

1. Run it:

    ```console
    $ export A=xoxb-...    # a comment
    $ evernear run
    ```

| `a` | b |
|---|---|
| a    | b |
""",
    "Dockerfile.serve": """# syntax=docker/dockerfile:1
# The serving images.
#   docker build -f Dockerfile.serve .        TorchServe
#   docker build --build-arg EXTRA=prep .     the preprocessing server
FROM python
# hadolint ignore=DL3006
FROM build
""",
    "Makefile": "# Targets:\n#   make demo KEEP=1    leave it running\ndemo: ## Run\n\techo $$(A) `b\n",
    "code.py": """'''A table, see ``evernear run``:

nearest          the nearest neighbor
agreeing one  of the class
'''
a = "`not a comment"  # `neither
""".replace("'''", '"""'),
}
"""Files without damage."""

DAMAGED = [
    (
        "page.md",
        "    ```console $ export A=xoxb-...\n    $ evernear run\n    ```\n",
        "line 1: a fence and the text after",
    ),
    ("page.md", "Run it: ```console\n$ evernear run\n", "line 1: a fence stands inside a line"),
    ("page.md", "```console\n$ evernear run\n\nText.\n", "line 1: the fence is not closed"),
    ("page.md", "```console\n$ cd a $\nevernear run\n```\n", "line 2: a prompt stands inside a line"),
    ("page.md", "Run it:\n$ evernear run\n", "line 2: a prompt stands inside a paragraph"),
    ("page.md", "Text.\n\nUse `evernear\nrun` for\n", "line 3: `evernear run` is broken over lines"),
    ("page.md", "Text. ## Heading\n", "line 1: a directive stands inside a paragraph"),
    ("Dockerfile.serve", "# Text. hadolint ignore=DL3006\n", "line 1: a directive stands inside a paragraph"),
    ("Dockerfile.serve", "# Images. docker\n# build -f A .      all\n", "line 2: an example stands inside a paragraph"),
    ("code.py", "def f():\n    # Text `a\n    # b`\n    pass\n", "line 2: `a b` is broken over lines"),
    ("code.py", 'def f():\n    """Text.\n\n    See ``a\n    b``."""\n', "line 4: `a b` is broken over lines"),
]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_and_commands_are_no_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(WHOLE[name])
    assert damage(tmp_path / name) == []


@pytest.mark.parametrize(("name", "text", "finding"), DAMAGED)
def test_block_or_command_that_became_part_of_a_paragraph_is_damage(
    tmp_path: Path, name: str, text: str, finding: str
) -> None:
    (tmp_path / name).write_text(text)
    assert [found for found in damage(tmp_path / name) if found.startswith(finding)]


def test_check_names_the_damaged_file_and_line(docs_page: Path) -> None:
    docs_page.write_text("Use `evernear\nrun`.\n")
    with pytest.raises(DataError, match=r"^docs/page\.md: line 1: `evernear run` is broken over lines"):
        build.check_wrapping()


def test_result_tables_name_no_path_of_a_machine() -> None:
    for table in (build.ROOT / "benchmarks/results").glob("*.md"):
        command = table.read_text().partition("```sh\n")[2].partition("\n```")[0]
        assert without_paths(command) == command, table.name
    assert without_paths("python -m b folder:/a/b s3://c/d e/f.py") == "python -m b folder:DIRECTORY s3://c/d e/f.py"
