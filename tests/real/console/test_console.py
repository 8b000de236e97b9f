"""The console without a browser: who may do what, other sites, naming, suspect labels, pages, and
what it imports."""

import hashlib
import re
import subprocess
import sys
from importlib import resources
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.testclient import TestClient

from evernear.common.store import Store, open_store
from evernear.console.access import SignIn
from evernear.console.pages import DataPage, _queries
from evernear.console.runs import LocalRuns
from evernear.console.server import require_private
from evernear.data.sources import open_source
from evernear.errors import SettingsError
from evernear.release.records import MANIFESTS, record_key
from evernear.release.registry import Registry
from evernear.review.answers import ANSWERS, PENDING, Answer
from evernear.review.queue import Submissions
from evernear.review.suspects import SUSPECTS, Suspect, Suspects
from evernear.serving.query_log_files import encode_embedding
from evernear.serving.responses import Prediction
from evernear.settings import load
from tests.consoles import TOKEN, console_client, with_csrf
from tests.dataset_images import saved
from tests.ports import free_ports
from tests.releases import MakeRelease, System, copy_store
from tests.review_queue import NOW, log_queries, png


def open_console(store: Store, source: str, *overrides: str, address: str = "127.0.0.1", **headers: str) -> TestClient:
    options = [f"store={store.uri}", f"workdir={store.uri.removeprefix('file://')}-work", f"data.source={source}"]
    settings = load(overrides=[*options, *overrides], environment={})
    return console_client(settings, store, LocalRuns(settings, ()), address=address, **headers)


def signed_in(store: Store, source: Path | str) -> TestClient:
    client = open_console(store, f"folder:{source}" if isinstance(source, Path) else source)
    page = client.get(f"/?token={TOKEN}")
    assert page.url.query == b"", "the token leaves the address bar"
    return with_csrf(client)


def test_token_is_required_and_opens_a_session(store: Store, source: Path) -> None:
    client = open_console(store, f"folder:{source}")
    for response in (client.get("/"), client.get("/?token=other"), client.post("/review?token=secret")):
        assert (response.status_code, "evernear console" in response.text) == (403, True)
    assert client.get("/health").status_code == 200
    client.cookies.clear()
    page = client.get("/review?token=secret")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    cookies = [value for name, value in page.history[0].headers.multi_items() if name == "set-cookie"]
    assert len(cookies) == 2
    assert all("HttpOnly" in cookie and "SameSite=strict" in cookie for cookie in cookies)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Evernear-CSRF": "other"},
        {"X-Evernear-CSRF": ""},
        {"Origin": "http://evil"},
        {"Origin": "http://console:8443"},
        {"Origin": "null"},
        {"Origin": "http://[", "Host": "["},
        {"Origin": "http://evil", "X-Forwarded-Host": "evil"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_site_changes_nothing(store: Store, source: Path, headers: dict[str, str]) -> None:
    log_queries(store, png(1))
    client = signed_in(store, source)
    image = re.findall(r'name="image" value="(\w+)"', client.get("/review").text)[0]
    form = {"image": image, "action": "skip"}
    assert client.post("/review", data=form, headers=headers).status_code == 403
    assert store.find(ANSWERS) is None
    assert client.post("/review", data=form).status_code == 200


PROXY = (
    "console.identity_header=X-Forwarded-Email",
    'console.trusted_proxies=["10.0.0.0/8"]',
    'permissions.label=["ann@x"]',
)
ANN = {"X-Forwarded-Email": "ann@x"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://team.example", "Host": "team.example"},
        {"Origin": "https://team.example", "Host": "Team.Example:443"},
        {"Origin": "https://team.example", "X-Forwarded-Host": "team.example"},
        {"Origin": "https://team.example", "X-Forwarded-Host": "team.example, console", "X-Forwarded-Port": "80"},
        {"Origin": "http://team.example:8443", "X-Forwarded-Host": "team.example:8443"},
        {"Origin": "http://team.example:8443", "X-Forwarded-Host": "team.example", "X-Forwarded-Port": "8443"},
        {"Origin": "https://team.example", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_proxy_may_rewrite_the_host(store: Store, source: Path, headers: dict[str, str]) -> None:
    log_queries(store, png(1))
    client = open_console(store, f"folder:{source}", *PROXY, address="10.1.2.3", **ANN)
    image = re.findall(r'name="image" value="(\w+)"', client.get("/review").text)[0]
    response = with_csrf(client).post("/review", data={"image": image, "action": "skip"}, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("origin", "host"), [("https://team.example", "console"), ("http://console:8443", "console")])
def test_rewritten_host_is_named_with_the_header_to_set(store: Store, source: Path, origin: str, host: str) -> None:
    forwarded = {"X-Forwarded-Host": "team.example", "X-Forwarded-Port": "8443"}  # by any other address
    response = signed_in(store, source).post("/review", headers={"Origin": origin, **forwarded})
    assert response.status_code == 403
    assert f"The browser shows {origin}, but the console was called as {host}." in response.text
    assert "proxy_set_header Host $http_host;" in response.text


def test_identity_comes_from_the_trusted_proxy_alone(store: Store, source: Path) -> None:
    assert open_console(store, f"folder:{source}", *PROXY, address="10.1.2.3", **ANN).get("/").status_code == 200
    assert open_console(store, f"folder:{source}", *PROXY, address="192.168.1.1", **ANN).get("/").status_code == 403
    anonymous = open_console(store, f"folder:{source}", *PROXY, address="10.1.2.3")
    assert anonymous.get("/").status_code == 403
    assert anonymous.get("/?token=secret").status_code == 403, "the token is no identity behind a proxy"
    twice = [(b"x-forwarded-email", b"ann@x"), (b"x-forwarded-email", b"eve@x")]
    access = SignIn(load(overrides=PROXY, environment={}), TOKEN, "owner")
    scope = {"type": "http", "client": ("10.1.2.3", 1), "headers": twice}
    assert access.identify(Request(scope)) is None
    assert access.identify(Request(scope | {"headers": twice[:1]})) is not None


@pytest.mark.parametrize(("entry", "may"), [("*", True), ("U0123456789", False), ("C0123456789", False)])
def test_name_of_a_slack_id_gets_no_right_of_its_entry(entry: str, may: bool) -> None:
    """Who may choose their own name would otherwise choose the ID of a channel."""
    overrides = (*PROXY[:2], f'permissions.promote=["{entry}"]')
    access = SignIn(load(overrides=overrides, environment={}), TOKEN, "owner")
    name = entry if entry != "*" else "ann@x"
    scope = {"type": "http", "client": ("10.1.2.3", 1), "headers": [(b"x-forwarded-email", name.encode())]}
    person = access.identify(Request(scope))
    assert person is not None
    assert person.may == (frozenset({"promote"}) if may else frozenset())


@pytest.mark.parametrize(("person", "status"), [("ann@x", 200), ("bob@x", 403)])
def test_people_without_a_right_only_read(store: Store, source: Path, person: str, status: int) -> None:
    log_queries(store, png(1))
    client = open_console(store, f"folder:{source}", *PROXY, address="10.1.2.3", **{"X-Forwarded-Email": person})
    page = client.get("/review").text
    with_csrf(client)
    assert ("Not valid, skip" in page) == (status == 200)
    image = re.findall(r'name="image" value="(\w+)"', page)[0]
    response = client.post("/review", data={"image": image, "action": "skip"})
    assert response.status_code == status
    for url, form in {"/review/reindex": {}, "/releases/rollback": {"version": "v", "why": "w"}}.items():
        refused = client.post(url, data=form)
        assert (refused.status_code, "permissions." in refused.text) == (403, True)
    if status == 200:
        assert Answer.model_validate_json(store.get(ANSWERS)).who == person


def test_a_group_is_named_with_one_answer_and_undone(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2), candidates=("dog", "<b>x</b>"))
    client = signed_in(store, source)
    page = client.get("/review").text
    assert "<b>x</b>" not in page
    assert '<option value="dog">' in page
    images = re.findall(r'name="image" value="(\w+)"', page)
    named = client.post("/review", data={"image": images, "action": "label", "label": "bird"})
    assert "2 images named bird." in named.text
    paths = [source / "bird" / f"review-{image[:16]}.png" for image in images]
    assert all(path.exists() for path in paths)
    again = client.post("/review", data={"image": images[0], "action": "label", "label": "cat"})
    assert (again.status_code, "was answered in the meantime" in again.text) == (409, True)
    client.post("/review", data={"image": images[0], "action": "undo"})
    assert [path.exists() for path in paths] == [False, True]
    client.post("/review", data={"image": images[0], "action": "skip"})
    page = client.get("/review").text
    assert "skipped" in page
    assert "ann" in page


def test_mistyped_name_is_asked_about_before_anything_is_recorded(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2), png(3))
    client = signed_in(store, source)
    images = re.findall(r'name="image" value="(\w+)"', client.get("/review").text)
    form = {"image": images[:1], "action": "label", "label": "Catt\u200b"}
    asked = client.post("/review", data=form)
    assert asked.headers["HX-Retarget"] == "#question"
    assert "<b><bdi>Catt</bdi></b> is a new class" in asked.text
    assert '<button name="class" value="cat"' in asked.text
    assert store.find(ANSWERS) is None
    meant = client.post("/review", data={"image": images[:1], "label": "Catt", "class": "cat"})
    assert "1 image named cat." in meant.text
    assert "new class" not in meant.text
    new = client.post("/review", data={"image": images[1:2], "label": "Catt", "class": "Catt"})
    assert "1 image named Catt. Catt is a new class. It waits until it has 10 images: 1 of 10." in new.text
    again = client.post("/review", data={"image": images[2:], "action": "label", "label": "Catt"})
    assert "2 images named" not in again.text
    assert "1 image named Catt. It waits until it has 10 images: 2 of 10." in again.text
    client.post("/review", data={"image": images[1:], "action": "undo"})
    assert "HX-Retarget" in client.post("/review", data=form | {"image": images[1:]}).headers


def test_mistyped_correction_of_a_suspect_is_asked_about_in_its_form(store: Store, source: Path) -> None:
    suspect = Suspect(image="ab" * 32, files=("cat/a.png",), label="cat", suggested="dog", margin=-1.0)
    checked = Suspects(
        source=f"folder:{source}", dataset_digest="", created=NOW, found=1, images=2, suspects=(suspect,)
    )
    store.put(SUSPECTS, checked.to_json())
    client = signed_in(store, source)
    place = f"question-{suspect.image[:16]}"
    assert f'id="{place}"' in client.get("/review").text
    asked = client.post(
        "/review", data={"image": suspect.image, "card": suspect.image[:16], "action": "label", "label": "dgo"}
    )
    assert asked.headers["HX-Retarget"] == f"#{place}"
    assert (source / "cat" / "a.png").exists()
    client.post("/review", data={"image": suspect.image, "label": "dgo", "class": "dog"})
    assert not (source / "cat" / "a.png").exists()


def test_several_groups_get_one_name_and_one_undo(store: Store, source: Path) -> None:
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 0, 2]]
    for number, vector in enumerate(vectors):
        answer = Prediction(
            pred="cat", dist=0.9, unknown=True, neighbors=(), version="v", embedding=encode_embedding(vector)
        )
        Submissions(store).add(png(number), answer, "ann", NOW)
    client = signed_in(store, source)
    groups = client.get("/review").text.split("<legend>")[1:]
    images = [re.findall(r'name="image" value="(\w+)"', group) for group in groups]
    assert list(map(len, images)) == [2, 1, 1]
    page = client.post("/review", data={"image": [*images[0], *images[1]], "action": "label", "label": "bird"}).text
    assert "3 images named bird." in page
    (form,) = page.split('<form class="answered"')[1:]
    assert "3 images named <b><bdi>bird</bdi></b>" in " ".join(form.split())
    assert set(re.findall(r'name="image" value="(\w+)"', form)) == {*images[0], *images[1]}
    undone = client.post("/review", data={"image": images[0], "action": "undo"}).text
    assert "2 images back in review." in undone
    assert len(list((source / "bird").iterdir())) == 1


def test_of_a_group_the_rest_is_named_if_one_was_answered(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2))
    client = signed_in(store, source)
    images = re.findall(r'name="image" value="(\w+)"', client.get("/review").text)
    client.post("/review", data={"image": images[0], "action": "label", "label": "cat"})
    page = client.post("/review", data={"image": images, "action": "label", "label": "dog"}).text
    assert "1 image named dog." in page
    assert "answered in the meantime" in page


def test_page_shows_what_was_set_aside_and_takes_other_answers(store: Store, source: Path) -> None:
    log_queries(store, png(1))
    stuck = Answer(image="a" * 64, action="label", label="dog", files=("gone/a.png",), who="ann", at=NOW)
    store.put(ANSWERS, stuck.model_dump_json().encode() + b"\n")
    store.put(PENDING + stuck.image, b"")
    client = signed_in(store, source)
    image = re.findall(r'name="image" value="(\w+)"', client.get("/review").text)[0]
    page = client.post("/review", data={"image": image, "action": "label", "label": "dog"}).text
    assert "1 image named dog." in page
    assert "no longer in the source" in page


def test_suspect_labels_are_corrected_and_kept(store: Store, source: Path) -> None:
    suspect = Suspect(
        image="ab" * 32, files=("cat/a.png",), label="cat", suggested="dog", margin=-1.0, duplicate="dog/a.png"
    )
    gone = suspect.model_copy(update={"image": "cd" * 32, "files": ("cat/gone.png",)})
    checked = Suspects(
        source=f"folder:{source}", dataset_digest="", created=NOW, found=2, images=2, suspects=(suspect, gone)
    )
    store.put(SUSPECTS, checked.to_json())
    client = signed_in(store, source)
    page = client.get("/review").text
    assert page.count('class="pair"') == 1, "a file that is gone is not shown"
    assert "nearly the same image is labeled <b><bdi>dog</bdi></b>" in page
    assert client.get(f"/review/suspect/{suspect.image}").headers["content-type"] == "image/png"

    def post(action: str, label: str = "") -> str:
        return client.post("/review", data={"image": suspect.image, "action": action, "label": label}).text

    assert "already has the label cat" in post("label", "cat")
    assert "kept its label" in post("keep")
    assert 'class="pair"' in post("undo")
    assert "relabeled <b><bdi>dog</bdi></b>" in post("label", "dog")
    assert [entry.label for entry in open_source(f"folder:{source}").entries()] == ["dog", "dog"]
    assert 'class="pair"' in post("undo")
    assert (source / "cat" / "a.png").exists()


def test_original_keeps_its_format(store: Store, source: Path) -> None:
    photograph = saved(Image.effect_noise((64, 48), 90), "JPEG")
    prediction = Prediction(pred="cat", dist=0.9, unknown=True, neighbors=(), version="v")
    image = Submissions(store).add(photograph, prediction, "ann", NOW)
    client = signed_in(store, source)
    client.post("/review", data={"image": image, "action": "label", "label": "bird"})
    path = source / "bird" / f"review-{image[:16]}.jpg"
    assert path.read_bytes() == photograph
    assert b'"suffix":".jpg"' in store.get(ANSWERS)
    client.post("/review", data={"image": image, "action": "undo"})
    assert not path.exists()
    assert image in client.get("/review").text


def test_large_bodies_and_images_that_are_none_get_one_sentence(store: Store, source: Path) -> None:
    client = signed_in(store, source)
    assert client.post("/review", content=b"x" * (300 * 1024)).status_code == 413
    assert client.get("/review/image/" + "0" * 64, headers={"HX-Request": "true"}).status_code == 400
    nothing = client.post("/review", data={"action": "label", "label": "cat"})
    assert (nothing.status_code, nothing.text) == (400, "No image is selected.")


def test_a_source_that_cannot_be_written_says_so(store: Store) -> None:
    client = signed_in(store, "digits")
    assert "review needs folder" in client.get("/review").text
    assert client.post("/review", data={"image": "a" * 64, "action": "skip"}).status_code == 400


def test_every_page_opens_in_an_empty_store(store: Store, source: Path) -> None:
    client = signed_in(store, source)
    for path in ("/", "/try", "/review", "/review/reindex", "/data", "/releases", "/static/console.js"):
        assert client.get(path).status_code == 200, path
    assert client.get("/").url.path == "/try"
    assert [info.key for info in store.list("")] == [], "a page writes nothing"


@pytest.fixture
def released_store(system: System, make_release: MakeRelease, tmp_path: Path) -> tuple[Store, str]:
    """A copy of a store with a snapshot and a release of it, and the release's version."""
    copied = copy_store(system, tmp_path / "copy").dataset.store
    return copied, Registry(copied).publish(make_release().archive).manifest.version


def test_neighbor_is_shown_until_it_is_forgotten(
    released_store: tuple[Store, str], source: Path, system: System
) -> None:
    store, version = released_store
    client = signed_in(store, source)
    shown = client.get(f"/try/neighbor/{version}/0")
    assert (shown.status_code, shown.headers["content-type"]) == (200, "image/png")
    assert shown.headers["cache-control"] == "no-store"
    first = next(system.dataset.blocks("gallery")).images[0]
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(shown.content))), first[:, :, 0])
    for info in list(store.list("datasets/digits/shards/")):
        store.delete(info.key)
    gone = client.get(f"/try/neighbor/{version}/0")
    assert (gone.status_code, gone.headers["content-type"]) == (404, "image/svg+xml")
    assert ">forgotten<" in gone.text


def test_releases_say_how_many_classes_were_tested(released_store: tuple[Store, str]) -> None:
    store, version = released_store
    assert "classes tested" not in signed_in(store, "digits").get("/releases").text
    record = Registry(store).get(version)
    metrics = record.manifest.metrics | {"classes": 10.0, "tested_classes": 8.0}
    partly = record.model_copy(update={"manifest": record.manifest.model_copy(update={"metrics": metrics})})
    store.put(record_key(MANIFESTS, version), partly.to_json())
    assert "8 of 10 classes tested" in signed_in(store, "digits").get("/releases").text


def test_data_counts_the_images_of_all_splits(released_store: tuple[Store, str], system: System) -> None:
    page = signed_in(released_store[0], "digits").get("/data").text
    assert f"{len(system.dataset.manifest.labels)} classes" in page
    assert f"{sum(shard.count for shard in system.dataset.manifest.shards):,} images of" in page


def test_data_shows_queries_that_run_for_any_store(system: System, tmp_path: Path, bucket: str) -> None:
    manifest = system.dataset.manifest
    store = open_store((tmp_path / "it's my store").as_uri())
    folder = f"{tmp_path}/it's my store/datasets/{manifest.name}"
    assert _queries(store, manifest).items() >= {"folder": folder, "copy": ""}.items()
    shown = _queries(open_store(f"s3://{bucket}/my store"), manifest)
    source = f"'s3://{bucket}/my store/datasets/{manifest.name}'"
    assert shown["copy"] == f"aws s3 sync --exclude 'shards/*' {source} {manifest.name}"
    assert str(shown["duckdb"]).startswith(f"SET VARIABLE dataset = '{manifest.name}/';")


def test_data_shows_the_classes_that_were_removed_since_the_live_release(
    released_store: tuple[Store, str], system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, version = released_store
    Registry(store).set_champion(version, None)
    counts = dict.fromkeys(system.dataset.manifest.labels, 10) | {"removed-class": 12}
    monkeypatch.setattr(DataPage, "_count", lambda *_: counts)
    page = signed_in(store, "digits").get("/data").text
    assert f"images of {len(counts) - 1} classes" in page
    assert "1 class of the live release has no image anymore." in page
    (item,) = [item for item in page.split("<li") if "removed-class" in item]
    assert "removed</b>, 12 images in the live release" in item
    assert "<img" not in item


@pytest.mark.parametrize("path", ["20200101.000000.00000000/0", "x/0"])
def test_neighbor_of_an_unknown_release_is_forgotten(store: Store, source: Path, path: str) -> None:
    assert signed_in(store, source).get(f"/try/neighbor/{path}").status_code == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "console.example"])  # noqa: S104
def test_a_token_never_crosses_a_network_in_the_clear(host: str) -> None:
    with pytest.raises(SettingsError, match="needs TLS"):
        require_private(load(overrides=[f"console.host={host}"], environment={}).console)
    for local in ("127.0.0.1", "::1", "localhost"):
        require_private(load(overrides=[f"console.host={local}"], environment={}).console)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for override in ("console.identity_header=X-Email", "console.certificate=a.pem", 'console.trusted_proxies=["x"]'):
        with pytest.raises(SettingsError):
            load(overrides=[override], environment={})


def test_htmx_is_the_file_of_the_npm_package() -> None:
    static = resources.files("evernear.console") / "static"
    digest = hashlib.sha256((static / "htmx.min.js").read_bytes()).hexdigest()
    assert digest in (static / "README.md").read_text()


def test_printed_urls_open_their_pages(store: Store, source: Path, tmp_path: Path) -> None:
    """The output of a program is masked, but the token of this URL is for the person who reads it.
    The console needs none of the absent libraries."""
    log_queries(store, png(1), png(2))
    absent = ["torch", "faiss", "kfp", "sklearn"]
    start = f"import sys; sys.modules |= dict.fromkeys({absent}); from evernear.cli.app import main; main()"
    words = ["console", "--port", "0", "--source", f"folder:{source}", "--set", f"store={store.uri}"]
    program = [sys.executable, "-c", start, *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            for path in ("/", "/review"):
                url = process.stdout.readline().split()[-1]
                assert httpx.URL(url).path == path
                with httpx.Client(trust_env=False, timeout=30, follow_redirects=True) as client:
                    assert client.get(url).status_code == 200
        finally:
            process.terminate()


@pytest.mark.slow
def test_second_start_shows_the_link_of_the_running_console(store: Store, source: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = ["--port", str(port), "--source", f"folder:{source}", "--set", f"store={store.uri}"]
    words = [sys.executable, "-m", "evernear", "console", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            opened = process.stdout.readline()
            again = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
            assert again.stdout.startswith("The console of evernear-work is running already.\n" + opened)
            assert (tmp_path / "evernear-work/console.json").stat().st_mode & 0o777 == 0o600
        finally:
            process.terminate()
