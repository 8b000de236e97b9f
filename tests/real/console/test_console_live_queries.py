"""Random live queries on the page Review."""

import base64
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from evernear.common.store import Store, open_store
from evernear.release.registry import Registry
from evernear.review.live_labels import LIVE_LABELS, labeled_queries
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.real.console.test_console import PROXY, open_console, signed_in, with_csrf
from tests.releases import MakeRelease, System
from tests.review_queue import png


@pytest.fixture
def live_store(system: System, make_release: MakeRelease, tmp_path: Path) -> Store:
    """A store with a champion, which answered 20 queries of the uniform sample this week."""
    shutil.copytree(Path(unquote(urlsplit(system.dataset.store.uri).path)), tmp_path / "copy")
    store = open_store((tmp_path / "copy").as_uri())
    registry = Registry(store)
    version = registry.publish(make_release().archive).manifest.version
    registry.set_champion(version, None)
    now = datetime.now(UTC)
    rows = [
        LoggedQuery(
            at=now, pred="7", dist=0.1, unknown=False, id=f"q/{number}", file=base64.b64encode(png(number)).decode()
        )
        for number in range(20)
    ]
    period = Period(version=version, since=now, until=now, queries=100, unknown=0)
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    store.put(f"queries/{now:%Y%m%d}/{now:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())
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
