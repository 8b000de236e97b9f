"""One real TorchServe for all tests of this directory."""

from collections.abc import Iterator

import pytest

from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.serving import configuration
from tests.releases import MakeRelease
from tests.served import Served, serving


@pytest.fixture(scope="session")
def parts(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> ReleaseParts:
    """A release, unpacked."""
    return open_release(make_release().archive, tmp_path_factory.mktemp("opened") / "release")


@pytest.fixture(scope="session")
def served(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A release on TorchServe, in a non-ASCII path that is too long for a Unix socket."""
    directory = tmp_path_factory.mktemp("wörk dir, 1") / ("d" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "QUERY_LOG_PERIOD_S", 1.0)
        with serving(make_release(), directory) as served:
            patch.undo()  # of interest only when the server starts
            yield served
