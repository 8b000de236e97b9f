"""From a query over HTTP to a proposal: TorchServe logs it, and the watcher uploads the log and
detects drift."""

import shutil
import time
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.serving import configuration
from evernear.serving.configuration import logged_queries
from evernear.serving.query_log_files import parse_file
from evernear.settings import Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch import observe
from evernear.triggers.watch.watcher import Watcher
from tests.releases import MakeRelease, System
from tests.served import serving


def noise(number: int) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.mark.slow
def test_drifting_queries_of_a_server_become_a_proposal(
    system: System, make_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(urlsplit(system.dataset.manifest.store_uri).path, tmp_path / "store")
    store = open_store((tmp_path / "store").as_uri())
    release = make_release()
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    sent = 60
    monkeypatch.setattr(configuration, "QUERY_LOG_PERIOD_S", 0.5)
    with serving(release, tmp_path / "work") as served:
        for number in range(sent):
            served.client().predict(noise(number))
        directory, deadline_s = logged_queries(served.home), time.monotonic() + 30

        def logged() -> int:
            return sum(parse_file(path.read_bytes(), str(path))[0].queries for path in directory.glob("*.jsonl"))

        while logged() < sent:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        settings = Settings.model_validate(
            {
                "workdir": served.settings.workdir,
                "store": store.uri,
                "data": {"source": "digits", "gallery_fraction": 0.2, "query_fraction": 0.1},
            }
        )
        monkeypatch.setattr(observe, "MIN_QUERIES", 50)
        report = Watcher(settings, store, None, tmp_path).check()
    assert report.faults == ()
    assert report.figures["queries"] == sent
    assert report.figures["new_files"] == 0
    assert report.action == "retrain"
    assert report.figures["drift_found"] >= 1
    assert [proposal.id for proposal in RequestStore(store).list()] == [report.proposal]
    assert list(directory.glob("*.jsonl")) == []
