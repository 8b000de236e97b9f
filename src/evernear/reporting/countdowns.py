"""Callbacks that report the progress of a step and the time left."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from evernear.common.output import quantity
from evernear.common.progress import Countdown, Step, duration
from evernear.common.run_record import StepProgress

if TYPE_CHECKING:
    from evernear.embedding.artifact import Epoch
    from evernear.embedding.clock import Steps
    from evernear.evaluation.measure import Observer


REST_S = 10.0
"""Seconds that a run takes beside training and probe, mostly to start the processes of its steps,
on two idle cores."""
REST_PRETRAINED_S = 25.0
"""The same with a pretrained network, which takes longer to load, export and deploy."""
_BUSIEST = 2.0
"""How much longer the rest takes at most on a machine with other work."""
_PARTS = 100_000
"""In so many equal units is a training of `Trainings` counted."""
Record = Callable[[StepProgress], None]


def whole_run(running: Step, started: datetime, probe_s: Callable[[float], float], rest_s: float) -> Record:
    """A callback for the progress of the training, which says once how long the whole run takes.
    ``probe_s`` estimates the time of the probe from that of the training, and ``rest_s`` is that of
    the other steps on an idle machine."""
    begun, is_said = datetime.now(UTC), False

    def record(progress: StepProgress) -> None:
        nonlocal is_said
        running.progressed(progress)
        if progress.left_s is None or is_said:
            return
        is_said = True
        train_s = (progress.at - begun).total_seconds() + progress.left_s
        left_s = progress.left_s + probe_s(train_s) + rest_s * _busy()
        total_s = (progress.at - started).total_seconds() + left_s
        running.note(f"The run takes about {duration(total_s)} in all; about {duration(left_s)} are left.")

    return record


def _busy() -> float:
    """How much longer work takes beside the other work of the machine: its load for each core."""
    return min(_BUSIEST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def training(running: Step, record: Record | None = None) -> "Callable[[Steps], None]":
    countdown = Countdown(running.report, record or running.progressed)

    def report(steps: "Steps") -> None:
        epochs_before, step_of_epoch = divmod(steps.done - 1, steps.per_epoch)
        epoch = f"epoch {epochs_before + 1}/{steps.total // steps.per_epoch}"
        countdown(steps.done, steps.total, f"{epoch}, step {step_of_epoch + 1:,}/{steps.per_epoch:,}")

    return report


def epochs(running: Step, count: int) -> "Callable[[Epoch], None]":
    def report(epoch: "Epoch") -> None:
        accuracy = f"gallery accuracy {epoch.gallery_accuracy:.2%}"
        running.report(f"epoch {epoch.epoch}/{count}, loss {epoch.train_loss:.3f}, {accuracy}")

    return report


class Trainings:
    """One countdown for several trainings of equal length, such as the draws of the probe.
    ``report`` and ``record`` are as for `Countdown`."""

    def __init__(self, noun: str, report: Callable[[str], None], record: Record = lambda _: None) -> None:
        self._noun = noun
        self._countdown = Countdown(report, record)
        self._done, self._total = 0, 1

    def on_training(self, done: int, total: int) -> None:
        """Call this with the numbers of completed and of all trainings, first with none."""
        self._done, self._total = done, total
        if done and total > 1:  # the countdown begins with the first step, after what precedes the first training
            self._count(float(done), f"{done} of {quantity(total, self._noun)}")

    def on_step(self, steps: "Steps") -> None:
        which = f"{self._noun} {self._done + 1}/{self._total}, " if self._total > 1 else ""
        self._count(self._done + steps.done / steps.total, f"{which}step {steps.done:,}/{steps.total:,}")

    def _count(self, done: float, message: str) -> None:
        self._countdown(round(_PARTS * done), _PARTS * self._total, message)


def images(running: Step, total: int, record: Record | None = None) -> Callable[[int], None]:
    """A callback that receives the number of images that were finished since its last call."""
    countdown, done = Countdown(running.report, record or running.progressed), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        countdown(done, max(done, total), f"{done:,} of {max(done, total):,} images")

    return report


def tests(running: Step, total: int) -> "Observer":
    on_images = images(running, total)

    return lambda answered: on_images(len(answered.block))
