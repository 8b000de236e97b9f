"""Plan training within a time limit.

From the speed of this machine, the plan chooses the layers to train, the number of epochs and the
image size. The retries of a run and its open-set probe follow its plan even if the speed changes.
The plan is also stored beside the checkpoints: a resumed run, or a second run on the same images,
follows it unless the machine has become clearly faster. A schedule that ends at the time limit
beats one that is cut off (Li et al. 2020, "Budgeted Training", arXiv:1905.04753), so if the machine
becomes slower, `Deadline` shortens each epoch.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding.artifact import Epoch
from evernear.embedding.checkpoint import checkpoint_key
from evernear.embedding.recipe import Recipe, size_factor, steps_per_epoch, with_defaults
from evernear.errors import SettingsError
from evernear.settings import TrainSettings
from evernear.settings.train import Layers

USED_SHARE = 0.9
"""Share of the time limit that is planned. The rest is a margin, because the speed varies."""
START_S = 15.0
"""Time for starting the training and probe processes and writing the results."""
HEAD_STEP_S = 0.01
FASTER = 1.5
"""How much faster the machine must have become to replace a stored plan."""
MOST_EPOCHS = 30
"""More epochs do not help."""
FEWEST_EPOCHS = 4
FEWEST_STEPS = 200
"""Fewest steps of fine-tuning."""
MOST_REPETITIONS = 4
"""Maximum steps on a small dataset, as a multiple of ``train.min_steps``."""
PROBE_DRAWS = 5
"""Draws of the probe if the backbone is frozen. Each holds out another fifth of the classes."""
PROBE_SHARE = 0.25
"""Ratio of probe epochs to training epochs."""
PROBE_SHARE_WITH_MUON = 0.6
"""The same with Muon, whose training is short. After three of ten epochs on CIFAR-10, unseen
classes are not yet as well separated as after all ten."""


class Plan(Frozen):
    """Saved in the record of the run, and as ``checkpoints/<key>/plan.json`` in the store."""

    train: Recipe
    probe: Recipe
    sentence: str
    """The plan and its estimated time, for people."""
    probe_s: float | None = None
    """Time after which the probe starts no further draw. None: it has one, limited by its steps."""
    image_s: float = 0.0
    """Seconds per image when first measured, which `find_plan` compares with now."""


@dataclass(frozen=True)
class FineTuning:
    """A way to train a pretrained network, chosen if ``fewest_epochs`` fit in the time limit."""

    layers: Layers
    size_factor: float
    fewest_epochs: int


LADDER = (
    FineTuning("all", 6 / 7, 24),
    FineTuning("last", 6 / 7, FEWEST_EPOCHS),
    FineTuning("last", 4 / 7, FEWEST_EPOCHS),
)
"""Best first. If none fits in the time limit, only a head is trained."""


class Speed(NamedTuple):
    """Seconds per image."""

    train_s: float
    """For a training step at the network's input size."""
    validate_s: float
    """For validation on the training device."""
    embed_s: float
    """For embedding on the CPU, as in steps other than training."""

    @property
    def image_s(self) -> float:
        """Seconds per image of training, validation and embedding."""
        return self.train_s + self.validate_s + self.embed_s


Measure = Callable[[Recipe], Speed]


def find_plan(dataset: Dataset, settings: TrainSettings, store: Store | None, measure: Measure) -> Plan:
    """The plan for ``settings.minutes``.

    A stored plan of an earlier run with the same images, settings and code is followed, so that
    interrupted training continues and finished training is not repeated. If the machine is now
    `FASTER` times as fast, a new one is made: a plan made while the machine was busy would
    otherwise last forever.
    """
    started_s = time.monotonic()
    speed = measure(first_measured(dataset, settings))
    name = f"checkpoints/{checkpoint_key(dataset.digest, settings, frozenset())}/plan.json"
    if store and (stored := store.find(name)):
        plan = Plan.model_validate_json(stored[0])
        if plan.image_s <= FASTER * speed.image_s:
            return plan
    plan = make_plan(dataset, settings, speed, measure, started_s).model_copy(update={"image_s": speed.image_s})
    if store:
        store.put(name, plan.model_dump_json().encode())
    return plan


def make_plan(dataset: Dataset, settings: TrainSettings, speed: Speed, measure: Measure, started_s: float) -> Plan:
    """Plan training that fits in ``settings.minutes`` since ``started_s`` of the monotonic clock.
    ``speed`` was measured with `first_measured`, and ``measure`` measures other recipes."""
    end_s = started_s + (settings.minutes or 0) * 60 * USED_SHARE - START_S
    if settings.weights:
        return _plan_pretrained(dataset, settings, end_s, speed.embed_s, measure)
    work = _Work.of(dataset, settings, settings, speed, 0.0)
    time_s = end_s - time.monotonic()
    return work.plan(time_s) or _refuse(settings, work.shortest_s, time_s)


def expected_probe_s(recipe: Recipe, probe_epochs: int, dataset: Dataset) -> Callable[[float], float]:
    """Estimates the probe's time from the training's. With a frozen backbone, training has computed
    the features, and only heads remain."""
    images = dataset.count("train")

    def steps(epochs: int) -> int:
        changed = recipe.model_copy(update={"epochs": epochs})
        return epochs * steps_per_epoch(changed, images, min(recipe.batch_size, images))

    if recipe.keeps_backbone:
        heads_s = 0.0 if recipe.frozen else steps(recipe.epochs) * HEAD_STEP_S
        return lambda _: (1 + PROBE_DRAWS) * heads_s
    share = PROBE_SHARE_WITH_MUON if recipe.muon else PROBE_SHARE
    epochs = probe_epochs or math.ceil(recipe.epochs * share)
    return lambda train_s: train_s * steps(epochs) / steps(recipe.epochs)


def first_measured(dataset: Dataset, settings: TrainSettings) -> Recipe:
    """For a pretrained network, a head."""
    first = settings.model_copy(update={"layers": "head"}) if settings.weights else settings
    return with_defaults(first, dataset)


def _plan_pretrained(dataset: Dataset, settings: TrainSettings, end_s: float, embed_s: float, measure: Measure) -> Plan:
    """The first way in `LADDER` that fits and that ``train.layers`` allows, otherwise a head."""
    of_head = settings.model_copy(update={"layers": "head"})
    recipe, images = first_measured(dataset, settings), dataset.count("train")
    steps = recipe.epochs * steps_per_epoch(recipe, images, min(recipe.batch_size, images))
    head_s = steps * HEAD_STEP_S
    start_s = (images + dataset.count("gallery")) * embed_s + 2 * head_s
    speeds: dict[Layers, Speed] = {}
    shortest_s = math.inf
    for way in LADDER:
        is_demanded = settings.layers == way.layers
        if not is_demanded and settings.layers:
            continue
        tuned = settings.model_copy(update={"layers": way.layers})
        # A training step takes at least twice as long as an embedding, which excludes a way without
        # measuring one.
        least = Speed(2 * embed_s, embed_s, embed_s)
        shortest_s = _Work.of(dataset, settings, tuned, least, start_s, way.size_factor).shortest_s
        if shortest_s > end_s - time.monotonic() and not is_demanded:
            continue
        if way.layers not in speeds:
            speeds[way.layers] = measure(with_defaults(tuned, dataset, size_factor=way.size_factor))
        work = _Work.of(dataset, settings, tuned, speeds[way.layers], start_s, way.size_factor)
        if plan := work.plan(end_s - time.monotonic(), 0 if is_demanded else way.fewest_epochs):
            return plan
        shortest_s = work.shortest_s
    if settings.layers in (None, "head"):
        return _plan_head(dataset, settings, of_head, end_s - time.monotonic(), embed_s, (1 + PROBE_DRAWS) * head_s)
    return _refuse(settings, shortest_s, end_s - time.monotonic())


def _plan_head(
    dataset: Dataset, settings: TrainSettings, of_head: TrainSettings, time_s: float, embed_s: float, heads_s: float
) -> Plan:
    """A head with as many views as fit in ``time_s``, or whitened features if none does."""
    features_s = sum(dataset.count(split) for split in SPLITS) * embed_s
    if features_s > time_s:
        return _refuse(settings, features_s, time_s)
    fixed_s, view_s = features_s + heads_s, dataset.count("train") * embed_s
    most_views = with_defaults(of_head, dataset).views
    views = min(most_views, int((time_s - fixed_s) / view_s))
    if views < min(1, most_views):
        whitened = with_defaults(of_head.model_copy(update={"frozen": True, "minutes": None}), dataset)
        what = "whitened features without training, because a head takes longer"
        sentence = _sentence(settings, what, START_S + features_s, is_enough=False)
        return Plan(train=whitened, probe=whitened, sentence=sentence, probe_s=time_s - features_s)
    # In training, `minutes` limits the time for the train split; the probe only reads the features.
    # Both share the spare time, because either may take longer than expected.
    spare_s = max(0.0, time_s - fixed_s - views * view_s)
    limit_s = ((1 + views) * view_s + spare_s / 2) / USED_SHARE
    chosen = with_defaults(of_head, dataset, views=views, minutes=limit_s / 60)
    what = f"a head on the features of the images and of {quantity(views, 'augmented view')} of each"
    expected_s = START_S + fixed_s + views * view_s
    sentence = _sentence(settings, what, expected_s, views == most_views)
    probe_s = heads_s * PROBE_DRAWS / (1 + PROBE_DRAWS) + spare_s / 2
    return Plan(train=chosen, probe=chosen, sentence=sentence, probe_s=probe_s)


@dataclass(frozen=True)
class _Work:
    """The work of a training run and its probe, and its duration."""

    dataset: Dataset
    settings: TrainSettings
    """The user's settings."""
    chosen: TrainSettings
    """The user's settings with the layers under consideration."""
    recipe: Recipe
    """``chosen`` with the defaults, and the image size under consideration."""
    fixed_s: float
    step_s: float
    validation_s: float
    pass_steps: int
    """Steps in one pass over the images."""

    @property
    def probe_share(self) -> float:
        return PROBE_SHARE_WITH_MUON if self.recipe.muon else PROBE_SHARE

    @property
    def fewest_steps(self) -> int:
        """With fewer, a pretrained network forgets more than it learns, so a head is better."""
        return FEWEST_STEPS if self.recipe.weights else FEWEST_EPOCHS

    @property
    def shortest_s(self) -> float:
        """The duration of the shortest worthwhile training."""
        loop_s = FEWEST_EPOCHS * self.validation_s + self.fewest_steps * self.step_s
        return self.fixed_s + (1 + self.probe_share) * loop_s

    def plan(self, time_s: float, fewest_epochs: int = 0) -> Plan | None:
        """The plan for ``time_s``, shorter if more would not help, or None if it is too short."""
        usable_s = (time_s - self.fixed_s) / (1 + self.probe_share)
        epochs = int(usable_s / (self.pass_steps * self.step_s + self.validation_s))
        if time_s < self.shortest_s or epochs < fewest_epochs:
            return None
        epochs = max(FEWEST_EPOCHS, min(MOST_EPOCHS, epochs))
        fitting = int((usable_s - epochs * self.validation_s) / self.step_s)
        most_steps = max(MOST_EPOCHS * self.pass_steps, MOST_REPETITIONS * self.recipe.min_steps)
        steps = max(epochs, min(fitting, most_steps))
        probe_epochs = max(1, round(epochs * self.probe_share))
        train, probe = self._of(epochs, steps), self._of(probe_epochs, max(1, steps * probe_epochs // epochs))
        layers = {"all": "all layers", "last": "the last stages"}[self.recipe.trained_layers]
        size = f" at up to {self.recipe.size_factor:.0%} of the size" if self.recipe.weights else ""
        what = f"{layers}, {quantity(epochs, 'epoch')} of {quantity(steps // epochs, 'step')}{size}"
        loops_s = ((train.minutes or 0) + (probe.minutes or 0)) * 60 * USED_SHARE
        expected_s = START_S + self.fixed_s + loops_s
        sentence = _sentence(self.settings, what, expected_s, is_enough=fitting > most_steps)
        return Plan(train=train, probe=probe, sentence=sentence)

    def _of(self, epochs: int, steps: int) -> Recipe:
        """``minutes`` limits the loop over epochs."""
        loop_s = steps * self.step_s + epochs * self.validation_s
        return with_defaults(
            self.chosen,
            self.dataset,
            epochs=epochs,
            min_steps=steps,
            max_steps=steps,
            minutes=loop_s / USED_SHARE / 60,
            size_factor=self.recipe.size_factor,
        )

    @staticmethod
    def of(
        dataset: Dataset,
        settings: TrainSettings,
        chosen: TrainSettings,
        speed: Speed,
        start_s: float,
        largest_size: float = 1.0,
    ) -> "_Work":
        """Of a run whose first epoch begins after ``start_s`` seconds, and whose last epochs have
        images of ``largest_size``, relative to the network's input."""
        recipe = with_defaults(chosen, dataset, size_factor=largest_size)
        images, gallery = dataset.count("train"), dataset.count("gallery")
        batch_size = min(recipe.batch_size, images)
        sizes = [size_factor(recipe.model_copy(update={"epochs": 10}), epoch) for epoch in range(10)]
        # The probe embeds all splits except train, plain and mirrored. Training and probe each
        # measure flips once.
        others = 2 * sum(dataset.count(split) for split in SPLITS[1:]) + 4 * gallery
        return _Work(
            dataset=dataset,
            settings=settings,
            chosen=chosen,
            recipe=recipe,
            fixed_s=start_s + others * speed.embed_s,
            step_s=batch_size * speed.train_s * sum(size**2 for size in sizes) / len(sizes),
            validation_s=gallery * speed.validate_s,
            pass_steps=max(1, images // batch_size),
        )


def _sentence(settings: TrainSettings, what: str, expected_s: float, is_enough: bool) -> str:
    shorter = f" of the {settings.minutes or 0:g}, because more would not help" if is_enough else ""
    return f"{what}; about {expected_s / 60:.1f} minutes with the probe{shorter}"


def _refuse(settings: TrainSettings, shortest_s: float, time_s: float) -> Plan:
    minutes = settings.minutes or 0
    needed = math.ceil(minutes * 10 + (shortest_s * 1.2 - time_s) / USED_SHARE / 6) / 10
    raise SettingsError(
        f"train.minutes is {minutes:g}, but training on these images and the probe take at least about "
        f"{needed:g} minutes on this machine; set train.minutes={needed:g} or more."
    )


class Deadline:
    """The time limit of the next epoch, which leaves later epochs their share."""

    def __init__(self, recipe: Recipe, history: Sequence[Epoch]) -> None:
        self._end_s = math.inf
        if recipe.minutes:
            costs = [size_factor(recipe, epoch) ** 2 for epoch in range(len(history), recipe.epochs)]
            left_s = recipe.minutes * 60 - sum(epoch.duration_s for epoch in history)
            self._end_s = time.monotonic() + max(0.0, left_s) * costs[0] / sum(costs)

    def is_over(self) -> bool:
        return time.monotonic() > self._end_s
