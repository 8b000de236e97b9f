"""One of several processes that move a champion's pointer; it does not import torch, to start
fast."""

from multiprocessing.synchronize import Barrier
from multiprocessing.synchronize import Event as Stop

from evernear.common.store import open_store
from evernear.errors import ConflictError, EvernearError
from evernear.release.promotions import Cause
from evernear.release.registry import Registry

Results = tuple[list[str], int, list[str]]


def compete(
    uri: str, versions: list[str], name: str, rounds: int, start: Barrier, in_lockstep: bool, done: Stop
) -> Results:
    """Promote repeatedly; return the reasons of successful promotions, the number of conflicts, and
    the failures.

    All processes build on the same champion in the first round, and if ``in_lockstep`` in every
    round. If not, they continue until ``done``.
    """
    registry = Registry(open_store(uri))
    succeeded, conflicts, failed = list[str](), 0, list[str]()
    round_number = 0
    while round_number < rounds if in_lockstep else not done.is_set():
        together = in_lockstep or round_number == 0
        try:
            if together:
                start.wait(120)  # all processes have finished the previous round
            champion = registry.champion()
            if together:
                start.wait(120)
            reason = f"{name}, turn {round_number}"
            cause = Cause.of_this_process(reason)
            if champion is not None and round_number % 5 == 4 and champion.previous:
                registry.roll_back(champion, cause)
            else:
                registry.set_champion(versions[round_number % 2], champion, "promote", cause)
            succeeded.append(reason)
            if not in_lockstep and registry.champion().pointer.number >= rounds:  # type: ignore[union-attr]
                done.set()
        except ConflictError:
            conflicts += 1
        except EvernearError as error:
            failed.append(str(error))
        round_number += 1
    return succeeded, conflicts, failed
