"""Build the documentation as a site in ``site/``; ``--check`` builds and checks it without
writing.

    python -m docs.build [--check]

The pages are the Markdown files of `PAGES`, which also read well on GitHub, the notebooks with
their committed outputs, and a reference of the settings. Links between pages stay relative. Links
to other files of the repository lead to GitHub where the environment names the repository
(``GITHUB_REPOSITORY``, as in a workflow), and are text otherwise. Every link of a built page leads
to the web or into the site, and it loads nothing from another host. ``--check`` also searches the
pages and the comments of the code for `docs.wrapping.damage`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import click

from docs.settings_reference import settings_page
from docs.wrapping import damage
from evernear.common.output import print_line
from evernear.errors import DataError
from evernear.reporting.glossary import glossary_page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (
    {
        ROOT / "README.md": "index.md",
        ROOT / "CONTRIBUTING.md": "contributing.md",
        ROOT / "CHANGELOG.md": "changelog.md",
        ROOT / "SECURITY.md": "reporting.md",
        ROOT / "deploy/README.md": "deploy.md",
        ROOT / "benchmarks/README.md": "benchmarks/index.md",
    }
    | {path: f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks/results").glob("*.md"))}
    | {path: f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
)
"""Pages outside of ``docs/`` and their paths in the site."""
LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```$|`[^`]+`)"
    r"|\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)
"""A link, or code, which may resemble one."""
PICTURE = re.compile(r"!\[(?:png|jpeg)\]\((\S+)\)")
DECISION_WORDS = 300
SEARCHED_FOLDERS = (".github", "benchmarks", "components", "deploy", "docs", "notebooks", "pipelines", "src", "tests")
SEARCHED_NAMES = re.compile(r"Makefile|Dockerfile.*|.*\.(?:md|py|pyi|sh|toml|ya?ml)(?<!_pb2\.py)")
"""Files whose text `check_wrapping` searches, without generated ones."""


def main(arguments: list[str] | None = None) -> int:
    """Build or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="build in a temporary directory, and discard the result")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        try:
            if options.check:
                check_wrapping()
            stage(work / "docs")
            build(work)
        except DataError as error:
            print_line(str(error), sys.stderr)
            return 1
        if not options.check:
            shutil.rmtree(ROOT / "site", ignore_errors=True)
            shutil.move(work / "site", ROOT / "site")
            serve = f"{Path(sys.executable).name} -m http.server --bind 127.0.0.1 --directory {ROOT / 'site'}"
            print_line(f"Open {ROOT / 'site' / 'index.html'}.")
            print_line(f"Search needs a server: run `{serve}`, and open http://127.0.0.1:8000.")
    return 0


def check_wrapping() -> None:
    """Search all pages and comments for blocks and commands that became part of a paragraph.

    Raises:
        DataError: some did. The message names each place.
    """
    paths = [*ROOT.iterdir(), *(path for folder in SEARCHED_FOLDERS for path in (ROOT / folder).rglob("*"))]
    searched = sorted(path for path in paths if path.is_file() and SEARCHED_NAMES.fullmatch(path.name))
    if found := [f"{path.relative_to(ROOT)}: {reason}" for path in searched for reason in damage(path)]:
        raise DataError("\n".join([*found, "Give each block, directive and command its own line or lines."]))


def stage(directory: Path) -> None:
    """Write every page of the site as Markdown into ``directory``, with links that fit the site.

    Raises:
        DataError: a link leads to a file that does not exist,
            or a decision is too long, misnumbered or not in the index.
    """
    pages = all_pages()
    for assets in ("images", "stylesheets"):
        shutil.copytree(DOCS / assets, directory / assets)
    for source, page in pages.items():
        path = directory / page
        path.parent.mkdir(parents=True, exist_ok=True)
        text, pictures = page_text(source)
        path.write_text(rewrite_links(source, text, pages))
        for name, picture in pictures.items():
            path.with_name(name).write_bytes(picture)
    check_decisions(DOCS / "decisions")
    (directory / "settings.md").write_text(settings_page())
    (directory / "glossary.md").write_text(glossary_page())


def all_pages() -> dict[Path, str]:
    """Path in the site of every Markdown file that becomes a page."""
    inside = {path: str(path.relative_to(DOCS)).replace("README.md", "index.md") for path in sorted(DOCS.rglob("*.md"))}
    return PAGES | inside


def page_text(source: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a page, and its pictures by file name:
    the outputs of a notebook."""
    if source.suffix != ".ipynb":
        return source.read_text(), {}
    from nbconvert import MarkdownExporter  # takes a second to import
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    exporter = MarkdownExporter()
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    text, resources = exporter.from_filename(str(source), {"unique_key": source.stem})
    # As HTML, because the pictures are not files of the repository, as the target of a link must
    # be.
    return PICTURE.sub(r'<img alt="output of the cell above" src="\1">', text), resources["outputs"]


def rewrite_links(source: Path, text: str, pages: dict[Path, str]) -> str:
    """``text``, the Markdown of a page, with relative links that are valid in the site.

    Raises:
        DataError: a link leads to a file that does not exist.
    """

    def rewritten(link: re.Match[str]) -> str:
        if link["code"]:
            return link[0]
        line = text.count("\n", 0, link.start("target")) + 1
        target = _target(source, link["target"], pages, f"{source.relative_to(ROOT)}:{line}")
        return f"[{link['text']}]({target}{link['anchor'] or ''})" if target else link["text"]

    return LINK.sub(rewritten, text)


def _target(source: Path, target: str, pages: dict[Path, str], location: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return target
    path = (source.parent / target).resolve()
    if not path.exists():
        raise DataError(f"{location} links to {target}, which does not exist; correct the link.")
    here = Path(pages[source]).parent
    if page := pages.get(path / "README.md" if path.is_dir() else path):
        return os.path.relpath(page, here)
    if path.is_relative_to(DOCS / "images"):
        return os.path.relpath(path.relative_to(DOCS), here)
    relative = path.relative_to(ROOT).as_posix()
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{repository}/blob/{os.environ.get('GITHUB_SHA', 'main')}/{relative}"
    return None


def check_decisions(folder: Path) -> None:
    """Check that the records in ``folder`` are short, consecutive, and in its index,
    ``README.md``.

    Raises:
        DataError: a record is not.
    """
    index = (folder / "README.md").read_text()
    for expected, record in enumerate(sorted(folder.glob("[0-9]*.md")), 1):
        text = record.read_text()
        number, _, title = text.splitlines()[0].removeprefix("# ").partition(". ")
        if not number == str(expected) == record.name.partition("-")[0].lstrip("0"):
            raise DataError(f"{record.name} is record {expected}; number its file and its title so.")
        if (words := len(text.split())) > DECISION_WORDS:
            raise DataError(f"{record.name} has {words} words; shorten it to {DECISION_WORDS}.")
        row = f"| {number} | [{title}]({record.name}) |"
        if row not in index:
            raise DataError(f"docs/decisions/README.md does not list {record.name}; add the row: {row}")


def build(work: Path) -> None:
    """Build ``work/site`` from ``work/docs``.

    Raises:
        DataError: the site generator warns, a page loads something from another host,
            a link leads nowhere, or a list is not rendered.
    """
    shutil.copy(ROOT / "zensical.toml", work)
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(click.unstyle(done.stderr.partition("Traceback")[0]))
        raise DataError("The site generator reports problems, see above; correct the pages that it names.")
    if foreign := sorted(foreign_resources(work / "site")):
        raise DataError(f"Pages must not load anything from another host: {', '.join(foreign)}.")
    if dead := sorted(dead_links(work / "site")):
        raise DataError(f"Links must lead to the web or to a file of the site: {', '.join(dead)}.")
    if unrendered := sorted(unrendered_lists(work / "site")):
        raise DataError(f"Lists need an empty line before them, and nested text four spaces: {', '.join(unrendered)}.")


def unrendered_lists(site: Path) -> set[str]:
    """Pages with a paragraph that has a list in it, where GitHub and the site generator disagree
    about Markdown."""
    paragraphs = re.compile(r"<p>((?:(?!</p>).)*)</p>", re.DOTALL)
    item = re.compile(r"^\s*(?:[-*]|\d+\.) ", re.MULTILINE)
    pages = {page: paragraphs.findall(page.read_text()) for page in site.rglob("*.html")}
    return {page.name for page, texts in pages.items() if any(item.search(text) for text in texts)}


def foreign_resources(site: Path) -> set[str]:
    """Addresses on other hosts that the pages of a built site load, as opposed to link to."""
    pages = [_addresses(page) for page in site.rglob("*.html")]
    return {url for page in pages for url in page.loaded if re.match(r"(https?:)?//", url)}


def dead_links(site: Path) -> set[str]:
    """Links of a built site that lead neither to the web nor into the site."""
    pages = {page: _addresses(page) for page in site.rglob("*.html")}

    def is_dead(page: Path, url: str) -> bool:
        file, anchor = _file(site, page, url), unquote(url.partition("#")[2])
        return not file.is_file() or (bool(anchor) and file in pages and anchor not in pages[file].anchors)

    return {
        f"{page.relative_to(site)} -> {url}"
        for page, addresses in pages.items()
        for url in addresses.links
        if not re.match(r"(?:https?|mailto):", url) and is_dead(page, url)
    }


def _file(site: Path, page: Path, url: str) -> Path:
    path = unquote(url.partition("#")[0])
    return site / path[1:] if path.startswith("/") else Path(os.path.normpath(page.parent / path)) if path else page


def _addresses(page: Path) -> "_Addresses":
    parser = _Addresses()
    parser.feed(page.read_text())
    return parser


class _Addresses(HTMLParser):
    """Collects what a browser fetches without a click, and from where to where a click leads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the address of a link, a script, a style, an image or a frame."""
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if tag in ("script", "img", "iframe", "source", "video"):
            self.loaded.append(values.get("src") or "")
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get("href") or "")


if __name__ == "__main__":
    sys.exit(main())
