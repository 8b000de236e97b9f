"""Which releases are published and promoted, and the smoke test, which rounding does not fail."""

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from evernear.common.frozen import stamp
from evernear.common.store import Store, open_store
from evernear.deployment import Deployment, deploy_release, promote_release, roll_back
from evernear.deployment.target import smoke
from evernear.embedding.data_loader import embed_images
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import load_network
from evernear.errors import ConflictError, IntegrityError, ServingError, SettingsError, StoreError
from evernear.evaluation.verdict import AnchorChoice, Verdict
from evernear.index.build import build_index
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.index.search import Gallery
from evernear.release import archive as archiving
from evernear.release.archive import SMOKE_QUERIES, Candidate, Release, make_archive
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.bake import Breach, Breaches
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.serving import HANDLER
from evernear.serving.core import Predictor
from evernear.serving.responses import Prediction
from evernear.settings import IndexSettings, ServingSettings, Settings
from tests.releases import MakeRelease, PackedRelease, System, decided


def publish(store: Store, archive: Path, verdict: Path) -> Deployment:
    return deploy_release(archive, verdict, Settings(store=store.uri, target="registry"))


def assert_refused(store: Store, release: PackedRelease, sentence: str, verdict: Path | None = None) -> None:
    """Publishing fails and changes nothing."""
    with pytest.raises(IntegrityError, match=sentence):
        publish(store, release.archive, verdict or release.verdict)
    assert Registry(store).champion() is None
    assert list(Registry(store).list()) == []


def test_promoted_release_becomes_champion_and_may_be_published_again(store: Store, release: PackedRelease) -> None:
    for _ in range(2):
        deployed = publish(store, release.archive, release.verdict)
        assert (deployed.version, deployed.previous, deployed.url) == (release.version, None, None)
    champion = Registry(store).champion()
    assert champion is not None
    assert champion.version == release.version
    assert list(Registry(store).list()) == [release.version]


def test_held_release_is_not_published(store: Store, make_release: MakeRelease) -> None:
    release = make_release(promote=False)
    assert_refused(store, release, rf"release {release.version} is hold: A test says so\.")


def test_release_that_a_bake_rolled_back_is_deployed_again_by_a_person_alone(
    store: Store, release: PackedRelease
) -> None:
    Registry(store).publish(release.archive)
    Breaches(store).add(Breach.of(release.manifest, "Rule unknown: 24.0% of 300.", datetime.now(UTC)))
    with pytest.raises(ConflictError, match=r"rolled back after its rollout: Rule unknown: .* A person can promote it"):
        publish(store, release.archive, release.verdict)
    ada = Cause(by="Ada", why="new cameras")
    promote_release(release.version, Settings(store=store.uri, target="registry"), cause=ada)
    assert publish(store, release.archive, release.verdict).version == release.version


@pytest.mark.parametrize("content", [None, b"", b'{"promote": true}', b'{"promote": true, "reasons": []}'])
def test_missing_or_different_verdict_is_rejected(
    store: Store, release: PackedRelease, tmp_path: Path, content: bytes | None
) -> None:
    verdict = tmp_path / "verdict.json"
    if content is not None:
        verdict.write_bytes(content)
    assert_refused(store, release, r"has no verdict|not the verdict", verdict)


@pytest.mark.parametrize("fault", ["network", "index", "champion"])
def test_verdict_on_another_release_is_rejected(
    store: Store, system: System, make_release: MakeRelease, fault: str
) -> None:
    """The verdict is valid and archived with the release, but concerns another one."""
    measured = decided(system, "20250101.000000.00000000" if fault == "champion" else None, True)
    changes = {"network": {"network_sha256": "0" * 64}, "index": {"index_digest": "0" * 64}, "champion": {}}[fault]
    verdict = Verdict.of(
        measured.rules, measured.candidate.model_copy(update=changes), measured.champion, measured.dataset_digest
    )
    release = make_release(verdict=verdict.model_dump_json())
    assert_refused(store, release, r"is about another network or index|against another champion")


def test_inverted_verdict_is_rejected(store: Store, system: System, make_release: MakeRelease) -> None:
    verdict = decided(system, None, False).model_dump(mode="json")
    release = make_release(verdict=json.dumps(verdict | {"promote": True}))
    assert_refused(store, release, "was changed after the gate")


NOT_TRUE = [json.dumps(stamp() | {"promote": value}) for value in ("true", 1, None)]


@pytest.mark.parametrize("verdict", [*NOT_TRUE, "{}", "[]"])
def test_only_the_json_value_true_promotes(
    store: Store, make_release: MakeRelease, tmp_path: Path, verdict: str
) -> None:
    """The release is archived with this verdict, so that its hash matches."""
    release = make_release(verdict=verdict)
    assert_refused(store, release, "is not a valid verdict")


def test_release_measured_against_another_champion_is_rejected(store: Store, make_release: MakeRelease) -> None:
    first, second = make_release(), make_release()
    publish(store, first.archive, first.verdict)
    with pytest.raises(ConflictError, match=f"was measured against no champion, but {first.version} is"):
        publish(store, second.archive, second.verdict)
    third = make_release(parent=first.version)
    assert publish(store, third.archive, third.verdict).previous == first.version


def test_verdict_against_another_anchor_is_rejected_and_a_moved_anchor_is_recorded(
    store: Store, system: System, make_release: MakeRelease
) -> None:
    def measured_against(parent: str, anchor: AnchorChoice) -> PackedRelease:
        verdict = decided(system, parent, True)
        verdict = Verdict.of(verdict.rules, verdict.candidate, verdict.champion, verdict.dataset_digest, anchor)
        return make_release(parent, verdict=verdict.model_dump_json())

    def anchor() -> str:
        champion = Registry(store).champion()
        assert champion is not None
        return champion.anchor

    first = make_release()
    publish(store, first.archive, first.verdict)
    second = measured_against(first.version, AnchorChoice(version=first.version))
    publish(store, second.archive, second.verdict)
    assert anchor() == first.version
    other = measured_against(second.version, AnchorChoice(version=second.version))
    with pytest.raises(ConflictError, match=f"the anchor {second.version}, but {first.version} is the anchor now"):
        publish(store, other.archive, other.verdict)
    choice = AnchorChoice(version=second.version, former=first.version, why="Another test set.")
    third = measured_against(second.version, choice)
    for _ in range(2):
        publish(store, third.archive, third.verdict)
        assert anchor() == second.version


def test_registry_target_moves_the_pointer_only_to_intact_archives(tmp_path: Path, make_release: MakeRelease) -> None:
    settings = Settings(workdir=tmp_path / "work", target="registry")
    store = open_store(settings.store_uri)
    registry = Registry(store)
    with pytest.raises(StoreError, match="nothing to roll back to"):
        roll_back(settings)
    first = make_release()
    publish(store, first.archive, first.verdict)
    second = make_release(parent=first.version)
    publish(store, second.archive, second.verdict)
    with pytest.raises(StoreError, match=r"Release 20260101\.000000\.00000000 does not exist"):
        promote_release("20260101.000000.00000000", settings)

    back = roll_back(settings)
    assert (back.version, back.previous, back.url) == (first.version, None, None)
    key = registry.get(second.version).archive_key
    archive = store.get(key)
    store.put(key, archive[:-1])
    with pytest.raises(IntegrityError, match="is damaged"):
        promote_release(second.version, settings)
    store.put(key, archive)
    assert promote_release(second.version, settings).version == second.version
    assert [move.version for move in registry.history()][-2:] == [first.version, second.version]


@pytest.mark.parametrize("target", ["local", "registry"])
def test_only_kubernetes_applies_settings_to_the_champion(store: Store, release: PackedRelease, target: str) -> None:
    publish(store, release.archive, release.verdict)
    settings = Settings.model_validate({"store": store.uri, "target": target})
    sentence = f"is already the champion, and target {target} applies no settings to it: only kubernetes"
    with pytest.raises(SettingsError, match=sentence):
        promote_release(release.version, settings)


def test_deploying_serving_and_showing_a_release_import_no_training_or_model_packages() -> None:
    modules = "evernear.deployment, evernear.serving.torchserve, evernear.serving.gallery_images"
    script = f"import sys, {modules}; print({{'scipy', 'sklearn', 'torch', 'faiss'}} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.stdout == "set()\n", completed.stderr


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
