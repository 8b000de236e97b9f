"""Random live queries on the page Review."""

import base64
import re
import shutil
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from evernear.common.store import Store, open_store
from evernear.evaluation.headline import AnswerCounts
from evernear.evaluation.live_accuracy import accuracy_by_week
from evernear.release.registry import Registry
from evernear.review.live_labels import LIVE_LABELS, import_labels, labeled_queries
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.real.console.test_console import PROXY, open_console, signed_in, with_csrf
from tests.releases import MakeRelease, System
from tests.review_queue import png

NOW = datetime.now(UTC)


@pytest.fixture
def live_store(system: System, make_release: MakeRelease, tmp_path: Path) -> Store:
    """A store with a champion, which answered 20 queries of the uniform sample this week."""
    shutil.copytree(Path(unquote(urlsplit(system.dataset.store.uri).path)), tmp_path / "copy")
    store = open_store((tmp_path / "copy").as_uri())
    registry = Registry(store)
    version = registry.publish(make_release().archive).manifest.version
    registry.set_champion(version, None)
    rows = [
        LoggedQuery(
            at=NOW, pred="7", dist=0.1, unknown=False, id=f"q/{number}", file=base64.b64encode(png(number)).decode()
        )
        for number in range(20)
    ]
    period = Period(version=version, since=NOW, until=NOW, queries=100, unknown=0)
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    store.put(f"queries/{NOW:%Y%m%d}/{NOW:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())
    return store


def test_twelve_random_queries_are_labeled_without_their_answers(live_store: Store, source: Path) -> None:
    client = signed_in(live_store, source)
    assert 'hx-get="/review/live"' in client.get("/review").text
    page = client.get("/review/live").text
    assert "0 of 12 labeled this week" in page
    shown = re.findall(r'name="query" value="([^"]+)"', page)
    images = re.findall(r'src="(/review/live/image[^"]+)"', page)
    assert len(shown) == len(images) == 12
    assert client.get(images[0]).content.startswith(b"\x89PNG")
    assert "0.1" not in page, "the answer would suggest a label"

    answered = client.post("/review/live", data={"query": shown[0], "label": " 7 "}).text
    assert "Labeled 7." in answered
    assert "no class of this name" not in answered
    assert "1 of 12 labeled this week" in answered
    assert "no class of this name" in client.post("/review/live", data={"query": shown[0], "label": "seven"}).text
    (query,) = labeled_queries(live_store).queries
    assert (query.id, query.label, query.label_right) == (shown[0], "seven", False)
    assert [path for path in source.rglob("*") if "review" in path.name] == [], "it never enters the dataset"
    for form in ({"query": shown[1], "label": " "}, {"query": "other", "label": "7"}):
        assert client.post("/review/live", data=form).status_code == 400
    assert client.get("/review/live/image?id=other", headers={"HX-Request": "true"}).status_code == 400


@pytest.fixture
def mistaken(live_store: Store) -> Store:
    """Its release named one labeled query wrong and called three unknown, of which one was logged
    without its image, and of which another's log file was deleted."""
    (log,) = [info.key for info in live_store.list("queries/")]
    period = Period(version=log.split("-")[1], since=NOW, until=NOW, queries=4, unknown=3)
    file = base64.b64encode(png(7)).decode()
    logged = [
        LoggedQuery(at=NOW, pred="7", dist=0.9, unknown=True, id="far", image=file, neighbors=(3, 1)),
        LoggedQuery(at=NOW, pred="7", dist=0.2, unknown=False, id="near", file=file, neighbors=(2, 0, -1)),
        LoggedQuery(at=NOW, pred="7", dist=0.9, unknown=True, id="bare"),
        LoggedQuery(at=NOW, pred="7", dist=0.9, unknown=True, id="gone", file=file),
    ]
    for number, rows in enumerate((logged[:3], logged[3:])):
        lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
        live_store.put(f"{log.removesuffix('.jsonl')}{number}.jsonl", lines.encode())
    import_labels(live_store, {"far": "3", "near": "3", "bare": "3", "gone": "3", "q/1": "7"}, NOW)
    live_store.delete(f"{log.removesuffix('.jsonl')}1.jsonl")
    return live_store


def test_labeled_queries_are_among_the_mistakes_worst_first(mistaken: Store, source: Path) -> None:
    client = signed_in(mistaken, source)
    page = client.get("/mistakes").text
    assert "2 are named wrong or called unknown, and 2 more have no image in the query log" in page
    assert re.findall(r'name="query" value="([^"]+)"', page) == ["near", "far"], "the right answer is none"
    assert re.findall(r"/try/neighbor/[^/]+/(-?[0-9]+)", page) == ["2", "0", "3", "1"]
    for address in re.findall(r'src="(/mistakes/live/image[^"]+)"', page):
        assert client.get(unescape(address)).content.startswith(b"\x89PNG")

    kept = client.post("/mistakes/live", data={"query": "far", "action": "keep"}).text
    assert "The label 3 of a live query is kept." in kept
    corrected = client.post("/mistakes/live", data={"query": "near", "action": "label", "label": " 7 "}).text
    assert "1 live query is now labeled 7." in corrected
    assert 'name="query"' not in corrected
    stored = {query.id: (query.label, query.first_label) for query in labeled_queries(mistaken).queries}
    assert (stored["near"], stored["far"]) == (("7", "3"), ("3", "3"))
    (week,) = accuracy_by_week(labeled_queries(mistaken).queries)
    assert week.corrected == AnswerCounts(named_right=1, named_wrong=0, called_unknown=0)


def test_mistakes_refuse_what_is_none(mistaken: Store, source: Path) -> None:
    client = signed_in(mistaken, source)
    (log,) = {query.log for query in labeled_queries(mistaken).queries if query.id == "near"}
    for query, label in (("q/1", "3"), ("bare", "7"), ("near", " "), ("near", "3")):
        form = {"query": query, "action": "label", "label": label}
        assert client.post("/mistakes/live", data=form).status_code == 400
    for query in (f"log={log}&query=other", "log=champion.json&query=near", f"log={log}"):
        assert client.get(f"/mistakes/live/image?{query}").status_code == 400
    stranger = open_console(mistaken, f"folder:{source}", *PROXY, address="10.1.2.3", **{"X-Forwarded-Email": "bob@x"})
    assert "Relabel" not in stranger.get("/mistakes").text
    with_csrf(stranger)
    assert stranger.post("/mistakes/live", data={"query": "near", "action": "keep"}).status_code == 403
    assert not any(query.first_label for query in labeled_queries(mistaken).queries)


def test_labels_need_the_right_and_this_site(live_store: Store, source: Path) -> None:
    stranger = open_console(
        live_store, f"folder:{source}", *PROXY, address="10.1.2.3", **{"X-Forwarded-Email": "bob@x"}
    )
    page = stranger.get("/review/live").text
    assert "live query 12" in page
    assert ">Label<" not in page
    with_csrf(stranger)
    form = {"query": "q/1", "label": "7"}
    refused = stranger.post("/review/live", data=form)
    assert (refused.status_code, "permissions.label" in refused.text) == (403, True)
    client = signed_in(live_store, source)
    assert client.post("/review/live", data=form, headers={"Origin": "http://evil"}).status_code == 403
    assert list(live_store.list(LIVE_LABELS)) == []


def test_without_a_release_nothing_is_asked(tmp_path: Path, source: Path) -> None:
    assert signed_in(open_store((tmp_path / "empty").as_uri()), source).get("/review/live").text == ""
