"""The smoke test: what it compares, and that rounding does not fail it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evernear.deployment.target import smoke
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import load_network
from evernear.errors import ServingError
from evernear.index.build import build_index
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.index.search import Gallery
from evernear.release import archive as archiving
from evernear.release.archive import SMOKE_QUERIES, Candidate, Release, make_archive
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.serving import HANDLER
from evernear.serving.core import Predictor
from evernear.serving.responses import Prediction
from evernear.settings import IndexSettings, ServingSettings
from tests.releases import MakeRelease, System, decided


@dataclass
class Server:
    """A server whose rounding differs: distances change by ``error``, and with them the unknown
    flag."""

    parts: ReleaseParts
    error: float = 0.0
    pred: str | None = None
    unknown: bool | None = None

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        (answer,) = Predictor.open(self.parts).predict([image])
        assert isinstance(answer, Prediction)
        dist = answer.dist + self.error
        unknown = dist > self.parts.manifest.threshold if self.unknown is None else self.unknown
        return answer.model_copy(update={"dist": dist, "pred": self.pred or answer.pred, "unknown": unknown})


def released(system: System, directory: Path, threshold: float) -> Release:
    """The system as a release with that threshold."""
    build_index(
        Embeddings.open(system.index_dir.parent / "embeddings"),
        system.dataset.labels,
        IndexSettings(),
        directory / "index",
        threshold=threshold,
    )
    changed = System(system.dataset, system.network_dir, directory / "index")
    (directory / "verdict.json").write_text(decided(changed, None, True).model_dump_json())
    candidate = Candidate(
        system.dataset, system.network_dir, directory / "index", directory / "verdict.json", metrics={}, parent=None
    )
    return make_archive(candidate, ServingSettings(), HANDLER, directory / "release")


@pytest.fixture(scope="module")
def parts(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> ReleaseParts:
    return open_release(make_release().archive, tmp_path_factory.mktemp("smoke") / "opened")


def test_rounding_does_not_fail_the_smoke_test_of_a_release_with_a_query_at_the_threshold(
    system: System, tmp_path: Path
) -> None:
    images = np.concatenate([block.images for block in system.dataset.blocks("query")])
    gallery = Gallery.open(system.index_dir, archiving.describe_network(system.network_dir).sha256)
    # The nearest one, which is otherwise the first smoke query.
    threshold = min(answer.dist for answer in gallery.recognize(embed_images(load_network(system.network_dir), images)))
    packed = released(system, tmp_path, threshold)
    parts = open_release(packed.archive, tmp_path / "opened")
    assert packed.smoke_settled
    for _, query in parts.smoke_queries():
        assert abs(query.dist - threshold) > DISTANCE_TOLERANCE
    for error in (0.9 * DISTANCE_TOLERANCE, -0.9 * DISTANCE_TOLERANCE):
        assert smoke(Server(parts, error), parts) == SMOKE_QUERIES


@pytest.mark.parametrize("change", [{"error": 0.01}, {"error": -0.01}, {"pred": "other"}, {"unknown": True}])
def test_other_prediction_fails_the_smoke_test_and_everything_compared_is_shown(
    parts: ReleaseParts, change: dict[str, float]
) -> None:
    _, query = parts.smoke_queries()[0]
    assert not query.unknown
    server = Server(parts, **change)
    shown = f"{change.get('pred', query.pred)} ({'unknown' if change.get('unknown') else 'known'}) at "
    shown += f"{query.dist + change.get('error', 0.0):.4f} by {parts.manifest.version}"
    with pytest.raises(ServingError) as failed:
        smoke(server, parts)
    assert f"smoke-00.png is {shown}, and was {query.pred} (known) at {query.dist:.4f} when" in str(failed.value)
    assert f"The threshold is {parts.manifest.threshold:.4f}, and distances may differ by 0.002." in str(failed.value)


def test_without_a_settled_query_distances_are_still_compared(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiving, "DISTANCE_TOLERANCE", 1.0)  # as if each image were near a decision
    packed = released(system, tmp_path, threshold=0.5)
    assert not packed.smoke_settled
    parts = open_release(packed.archive, tmp_path / "opened")
    assert smoke(Server(parts, pred="other", unknown=True), parts) == SMOKE_QUERIES
    with pytest.raises(ServingError, match="fails its smoke test"):
        smoke(Server(parts, error=0.01), parts)
