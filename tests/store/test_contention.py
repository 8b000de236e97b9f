"""Several processes that move the champion's pointer at the same time: nobody fails, and no move is lost.

A real server is named by ``TEST_S3_URL``, ``TEST_S3_ACCESS_KEY`` and ``TEST_S3_SECRET_KEY``.
"""

import multiprocessing
import os
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from multiprocessing.synchronize import Event as Stop

import pytest
from faulty import Front
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
def contest(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The URI of an empty store, and how many moves are to be made there."""
    if request.param == "real":
        if "TEST_S3_URL" not in os.environ:
            pytest.skip("no real server is named by TEST_S3_URL")
        return f"s3://{request.getfixturevalue('bucket')}/team", 1000
    front: Front = request.getfixturevalue("altering_front")
    front.refuses_early = True
    return f"s3://{request.getfixturevalue('bucket')}/team", 8


def compete(uri: str, versions: list[str], name: str, rounds: int, start: Barrier | None, enough: Stop) -> Told:
    """Move the pointer; the reasons given for the moves that were made, the number of those lost, and what failed.

    With ``start`` everybody builds on the same champion in each round; without it everybody goes on until ``enough``.
    """
    registry = Registry(open_store(uri))
    won, lost, failed = list[str](), 0, list[str]()
    turn = 0
    while turn < rounds if start else not enough.is_set():
        try:
            if start:
                start.wait(120)  # everybody is done with the round before
            seen = registry.champion()
            if start:
                start.wait(120)
            why = f"{name}, turn {turn}"
            cause = Cause.of_this_process(why)
            if seen is not None and turn % 5 == 4 and seen.previous:
                registry.roll_back(seen, cause)
            else:
                registry.set_champion(versions[turn % 2], seen, "promote", cause)
            won.append(why)
            if not start and registry.champion().pointer.number >= rounds:  # type: ignore[union-attr]
                enough.set()
        except ConflictError:
            lost += 1
        except EvernearError as error:
            failed.append(str(error))
        turn += 1
    return won, lost, failed


@pytest.mark.parametrize("in_step", [True, False], ids=["all at once", "each at its own pace"])
def test_of_contended_moves_none_fails_and_none_is_lost(
    contest: tuple[str, int], releases: list[PackedRelease], in_step: bool
) -> None:
    uri, moves = contest
    registry = Registry(open_store(uri))
    for release in releases:
        registry.publish(release.archive)
    versions = [release.version for release in releases]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(PROCESSES) as pool:
        start = manager.Barrier(PROCESSES) if in_step else None
        enough = manager.Event()
        tasks = [(uri, versions, f"process {n}", moves, start, enough) for n in range(PROCESSES)]
        told = pool.starmap(compete, tasks)
        pool.close()
        pool.join()
    won = [why for each, _, _ in told for why in each]
    lost = sum(each for _, each, _ in told)
    print(f"{len(won)} moves made, {lost} lost to another, {sum(len(each) for *_, each in told)} failed")
    assert [sentence for *_, failed in told for sentence in failed] == []
    assert lost > 0, "nobody met anybody"
    if in_step:
        assert (len(won), lost) == (moves, (PROCESSES - 1) * moves)
    history = list(registry.history())
    assert [move.number for move in history] == list(range(1, len(won) + 1))
    assert sorted(move.why for move in history) == sorted(won)
    for before, after in pairwise(history):
        assert after.previous == before.version or after.how == "rollback"
