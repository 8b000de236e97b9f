"""The result of a step is computed once for the same inputs."""

from pathlib import Path

import pytest

from evernear.common import step_results
from evernear.common.step_results import REUSED, Computed, compute_once, result_key
from evernear.common.store import FileStore, Store


class Counting:
    """Writes two files, and counts the calls."""

    def __init__(self, directory: Path, reusable: bool = True) -> None:
        self.calls = 0
        self._directory, self._reusable = directory, reusable

    def __call__(self) -> Computed:
        self.calls += 1
        self._directory.mkdir(exist_ok=True)
        for name in ("weights", "description"):
            (self._directory / name).write_text(f"{name} {self.calls}")
        return Computed("made", {"images": 3}, self._reusable)


def compute(store: Store, counting: Counting, directory: Path, key: str = "k") -> Computed:
    return compute_once(store, key, directory, counting)


def test_a_second_run_gets_the_files_the_output_and_says_so(store: FileStore, tmp_path: Path) -> None:
    counting, again = Counting(tmp_path / "first"), tmp_path / "second"
    assert compute(store, counting, tmp_path / "first") == Computed("made", {"images": 3})
    assert compute(store, counting, again) == Computed(f"made; {REUSED}", {"images": 3})
    assert {path.name: path.read_text() for path in again.iterdir()} == {
        "weights": "weights 1",
        "description": "description 1",
    }
    compute(store, counting, tmp_path / "first", key="other")
    assert counting.calls == 2


def test_a_result_without_files(store: FileStore) -> None:
    calls: list[int] = []

    def count() -> Computed:
        calls.append(1)
        return Computed("made", {"auroc": 0.9})

    assert [compute_once(store, "k", None, count).output for _ in range(2)] == [{"auroc": 0.9}] * 2
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["weights", "description", "result.json"])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_damaged_or_incomplete_result_is_computed_again(
    store: FileStore, tmp_path: Path, damage: str, is_deleted: bool
) -> None:
    counting, directory = Counting(tmp_path / "made"), tmp_path / "made"
    compute(store, counting, directory)
    if is_deleted:
        store.delete(f"checkpoints/k/{damage}")
    else:
        store.put(f"checkpoints/k/{damage}", b"{")
    assert compute(store, counting, directory).summary == "made"
    assert (directory / "weights").read_text() == "weights 2"
    assert compute(store, counting, directory).summary == f"made; {REUSED}"


def test_a_result_that_the_time_cut_short_is_not_stored(store: FileStore, tmp_path: Path) -> None:
    counting = Counting(tmp_path / "made", reusable=False)
    for _ in range(2):
        compute(store, counting, tmp_path / "made")
    assert counting.calls == 2
    assert not list(store.list("checkpoints/"))


def test_the_key_covers_inputs_module_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ("common/step_results.py",)
    keys = {
        result_key("a head", code, ("numpy",), dataset="a", train={"seed": 0}),
        result_key("a head", code, ("numpy",), dataset="b", train={"seed": 0}),
        result_key("a head", code, ("numpy",), dataset="a", train={"seed": 1}),
        result_key("a head", code, ("numpy", "torch"), dataset="a", train={"seed": 0}),
        result_key("a head", ("common/frozen.py",), ("numpy",), dataset="a", train={"seed": 0}),
    }
    monkeypatch.setattr(step_results, "code_digest", lambda *_: "changed code")
    keys.add(result_key("a head", code, ("numpy",), dataset="a", train={"seed": 0}))
    assert len(keys) == 6
