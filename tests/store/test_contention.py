"""Several processes promote at the same time: no promotion fails or gets lost.

``TEST_S3_URL``, ``TEST_S3_ACCESS_KEY`` and ``TEST_S3_SECRET_KEY`` select a real server.
"""

import multiprocessing
import os
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from multiprocessing.synchronize import Event as Stop

import pytest
from faulty import FaultyServer
from releases import MakeRelease, PackedRelease

from evernear.errors import ConflictError, EvernearError
from evernear.release.registry import Cause, Registry
from evernear.store import open_store

PROCESSES = 4
Told = tuple[list[str], int, list[str]]


@pytest.fixture(scope="module")
def releases(make_release: MakeRelease) -> list[PackedRelease]:
    return [make_release(), make_release()]


@pytest.fixture(params=["refuses early", pytest.param("real", marks=pytest.mark.slow)])
def contended_store(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The URI of an empty store and the number of promotions."""
    if request.param == "real":
        if "TEST_S3_URL" not in os.environ:
            pytest.skip("TEST_S3_URL is not set")
        return f"s3://{request.getfixturevalue('bucket')}/team", 1000
    front: FaultyServer = request.getfixturevalue("altering_front")
    front.refuses_early = True
    return f"s3://{request.getfixturevalue('bucket')}/team", 8


def compete(uri: str, versions: list[str], name: str, rounds: int, start: Barrier | None, enough: Stop) -> Told:
    """Promote repeatedly; return the reasons of successful promotions, the number of conflicts, and the failures.

    With ``start``, all processes build on the same champion in each round; otherwise, they continue until ``enough``.
    """
    registry = Registry(open_store(uri))
    promoted, lost, failed = list[str](), 0, list[str]()
    turn = 0
    while turn < rounds if start else not enough.is_set():
        try:
            if start:
                start.wait(120)  # all processes have finished the previous round
            champion = registry.champion()
            if start:
                start.wait(120)
            reason = f"{name}, turn {turn}"
            cause = Cause.of_this_process(reason)
            if champion is not None and turn % 5 == 4 and champion.previous:
                registry.roll_back(champion, cause)
            else:
                registry.set_champion(versions[turn % 2], champion, "promote", cause)
            promoted.append(reason)
            if not start and registry.champion().pointer.number >= rounds:  # type: ignore[union-attr]
                enough.set()
        except ConflictError:
            lost += 1
        except EvernearError as error:
            failed.append(str(error))
        turn += 1
    return promoted, lost, failed


@pytest.mark.parametrize("in_step", [True, False], ids=["all at once", "each at its own pace"])
def test_contended_promotions_neither_fail_nor_get_lost(
    contended_store: tuple[str, int], releases: list[PackedRelease], in_step: bool
) -> None:
    uri, moves = contended_store
    registry = Registry(open_store(uri))
    for release in releases:
        registry.publish(release.archive)
    versions = [release.version for release in releases]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(PROCESSES) as pool:
        start = manager.Barrier(PROCESSES) if in_step else None
        enough = manager.Event()
        tasks = [(uri, versions, f"process {n}", moves, start, enough) for n in range(PROCESSES)]
        results = pool.starmap(compete, tasks)
        pool.close()
        pool.join()
    promoted = [reason for each, _, _ in results for reason in each]
    lost = sum(each for _, each, _ in results)
    print(f"{len(promoted)} promotions, {lost} conflicts, {sum(len(each) for *_, each in results)} failed")
    assert [sentence for *_, failed in results for sentence in failed] == []
    assert lost > 0, "nobody met anybody"
    if in_step:
        assert (len(promoted), lost) == (moves, (PROCESSES - 1) * moves)
    history = list(registry.history())
    assert [move.number for move in history] == list(range(1, len(promoted) + 1))
    assert sorted(move.why for move in history) == sorted(promoted)
    for before, after in pairwise(history):
        assert after.previous == before.version or after.how == "rollback"
