"""Several processes promote at the same time: no promotion fails or gets lost.

``TEST_S3_URL``, ``TEST_S3_ACCESS_KEY`` and ``TEST_S3_SECRET_KEY`` select a real server.
"""

import os
from itertools import pairwise

import pytest

from evernear.common.store import open_store
from evernear.release.registry import Registry
from tests.forks import CONTEXT
from tests.real.common.store.conftest import altering_proxy, faulty_proxy
from tests.real.common.store.faulty import FaultyProxy
from tests.releases import PackedRelease
from tests.slow.common.store.contender import compete

__all__ = ["altering_proxy", "faulty_proxy"]
PROCESSES = 4
pytestmark = pytest.mark.slow


@pytest.fixture(params=["refuses early", "real"])
def contended_store(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The URI of an empty store and the number of promotions."""
    if request.param == "real":
        if "TEST_S3_URL" not in os.environ:
            pytest.skip("TEST_S3_URL is not set")
        return f"s3://{request.getfixturevalue('bucket')}/team", 1000
    proxy: FaultyProxy = request.getfixturevalue("altering_proxy")
    proxy.refuses_early = True
    return f"s3://{request.getfixturevalue('bucket')}/team", 8


@pytest.mark.parametrize("in_lockstep", [True, False], ids=["all at once", "each at its own pace"])
def test_contended_promotions_neither_fail_nor_get_lost(
    contended_store: tuple[str, int], releases: tuple[PackedRelease, ...], in_lockstep: bool
) -> None:
    uri, promotions = contended_store
    registry = Registry(open_store(uri))
    for release in releases:
        registry.publish(release.archive)
    versions = [release.version for release in releases]
    with CONTEXT.Manager() as manager, CONTEXT.Pool(PROCESSES) as pool:
        start, done = manager.Barrier(PROCESSES), manager.Event()
        tasks = [(uri, versions, f"process {n}", promotions, start, in_lockstep, done) for n in range(PROCESSES)]
        results = pool.starmap(compete, tasks)
        pool.close()
        pool.join()
    succeeded = [reason for reasons, _, _ in results for reason in reasons]
    conflicts = sum(reasons for _, reasons, _ in results)
    print(f"{len(succeeded)} promotions, {conflicts} conflicts, {sum(len(reasons) for *_, reasons in results)} failed")
    assert [sentence for *_, failed in results for sentence in failed] == []
    assert conflicts > 0, "no promotions conflicted"
    if in_lockstep:
        assert (len(succeeded), conflicts) == (promotions, (PROCESSES - 1) * promotions)
    history = list(registry.history())
    assert [promotion.number for promotion in history] == list(range(1, len(succeeded) + 1))
    assert sorted(promotion.why for promotion in history) == sorted(succeeded)
    for before, after in pairwise(history):
        assert after.previous == before.version or after.how == "rollback"
