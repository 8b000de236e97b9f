"""The progress of a training, and the time, which ``train.minutes`` limits."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from evernear.errors import SettingsError


class Steps(NamedTuple):
    """Counted over all epochs. ``done`` includes steps that are skipped for lack of time. Early
    stopping may end training before ``total``."""

    done: int
    total: int
    per_epoch: int


OnStep = Callable[[Steps], None]


class Clock:
    """Measures which share of the time is used. Without a limit, it is always 0."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.passes_after = 1.0
        """Duration of the work after the training, in passes over its images (see `reserve`)."""
        self._now, self._started_s = now, now()
        self._given_s, self._reserved_s = math.inf, 0.0

    def limit(self, minutes: float | None) -> None:
        self._given_s = minutes * 60 if minutes else math.inf

    @property
    def used_s(self) -> float:
        """Includes earlier attempts of a resumed training."""
        return self._now() - self._started_s

    @property
    def share(self) -> float:
        """Share of the training's time that is used, from 0 to 1."""
        left_s = self._given_s - self._reserved_s
        return min(1.0, self.used_s / left_s) if left_s > 0 else 1.0

    def resume(self, used_s: float) -> None:
        self._started_s -= used_s

    def reserve(self, pass_s: float) -> None:
        """Leave time for the work after the training, given the duration of one pass."""
        self._reserved_s = self.passes_after * pass_s

    def required(self, images: int, on_images: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """Returns ``on_images``, which raises `SettingsError` if the time ends before it has
        counted ``images``."""
        done = 0

        def count(completed: int) -> None:
            nonlocal done
            done += completed
            if on_images is not None:
                on_images(completed)
            if done < images and self.share >= 1:
                raise SettingsError(
                    f"The time (train.minutes) ended when the backbone had processed {done:,} of {images:,} images; "
                    f"set train.minutes to {math.ceil(1.5 * images / done)} times as much, or leave it out."
                )

        return count
