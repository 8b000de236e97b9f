"""Retries: which exceptions, how often, after which pauses."""

from itertools import islice
from types import SimpleNamespace

import pytest

from evernear.common.retry import backoff_s, doubling, retry


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    pauses_s: list[float] = []
    monkeypatch.setattr("evernear.common.retry.time", SimpleNamespace(sleep=pauses_s.append))
    return pauses_s


class Server:
    """Fails with ``errors``, one a call, before it answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def answer(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_call_is_repeated_until_it_succeeds(slept_s: list[float]) -> None:
    reported: list[tuple[str, float]] = []
    server = Server(OSError("one"), TimeoutError("two"))
    answer = retry(
        server.answer,
        on=OSError,
        pauses_s=[1, 2, 3],
        report=lambda error, pause_s: reported.append((str(error), pause_s)),
    )
    assert answer == "answer"
    assert slept_s == [1, 2]
    assert reported == [("one", 1), ("two", 2)]


def test_exception_after_the_last_pause_is_raised(slept_s: list[float]) -> None:
    server = Server(*(OSError(str(number)) for number in range(5)))
    with pytest.raises(OSError, match="2"):
        retry(server.answer, on=OSError, pauses_s=[0.5, 0])
    assert slept_s == [0.5, 0]
    assert len(server.errors) == 2


def test_other_exceptions_end_the_attempts(slept_s: list[float]) -> None:
    server = Server(OSError(), KeyError("absent"), OSError())
    with pytest.raises(KeyError, match="absent"):
        retry(server.answer, on=OSError, pauses_s=doubling(1, 8))
    assert slept_s == [1]


def test_backoff_doubles_up_to_the_longest_pause() -> None:
    assert list(islice(doubling(1, 5), 5)) == [1, 2, 4, 5, 5]
    assert [backoff_s(failures, 30, 600) for failures in (0, 1, 2, 10_000)] == [0, 30, 60, 600]
