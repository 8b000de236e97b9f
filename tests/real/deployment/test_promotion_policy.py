import json
import subprocess
import sys
from pathlib import Path

import pytest

from evernear.common.store import Store, open_store
from evernear.deployment import Deployment, deploy_release, promote_release, roll_back
from evernear.errors import ConflictError, IntegrityError, SettingsError, StoreError
from evernear.evaluation.verdict import AnchorChoice, Verdict
from evernear.release.registry import Registry
from evernear.settings import Settings
from tests.releases import MakeRelease, PackedRelease, System, decided


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


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


@pytest.mark.parametrize("verdict", ['{"promote": "true"}', '{"promote": 1}', "{}", '{"promote": null}', "[]"])
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
