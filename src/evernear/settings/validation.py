"""The settings of the ``validation`` section, and the rules that it adjusts."""

import json
import shlex
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from evernear.common.text import unknown_name
from evernear.settings.section import Section

MAX_IMBALANCE = 10
"""Images of the largest class for each of the smallest. ``validation.off`` turns its rule off."""
Severity = Literal["error", "warn", "info", "off"]


class Rule(NamedTuple):
    severity: Severity
    """The default. An error stops the run, a warning reports a problem, info anything else."""
    description: str


RULES = {
    "undecodable": Rule(
        "error",
        "A file is not an image, is damaged or exceeds a limit. It is left out. Only a warning up to "
        "max_left_out_fraction.",
    ),
    "resized": Rule(
        "warn",
        "Images have another aspect ratio, and were cropped, padded or stretched, or are smaller than the dataset's "
        "size and were enlarged.",
    ),
    "duplicate": Rule("warn", "An image occurs more than once. It is used once."),
    "duplicate_across_splits": Rule(
        "warn",
        "An image is in several splits, or the source now names another one than at an earlier ingest. It is in one of "
        "them, and never moves.",
    ),
    "near_duplicate": Rule(
        "warn",
        "More test images than usual are nearly the same as an image of train or gallery. The "
        "gate's rule test_images_unseen fails.",
    ),
    "split_group": Rule("warn", "A group of data.group has images in several splits."),
    "few_groups": Rule(
        "warn",
        "A class has fewer than three groups of data.group, one group has a large share of the images of "
        "several classes, or the test split has too few groups to compare a first release with trivial baselines.",
    ),
    "ungrouped": Rule("warn", "data.group finds no group in the name of an image."),
    "conflicting_labels": Rule(
        "error", "An image has several labels. It is left out. Only a warning up to max_left_out_fraction."
    ),
    "tiny_class": Rule("error", "A class has fewer than min_class_images images."),
    "empty_split": Rule("error", "A split has no image."),
    "missing_in_gallery": Rule(
        "error", "A class has no image in train or the gallery, so the class cannot be recognized."
    ),
    "missing_in_split": Rule("warn", "Another split has no image of a class."),
    "reviewed": Rule(
        "info",
        "Images that came by review were in test or query and are used for training only, or their class has fewer "
        "than min_class_images images and waits.",
    ),
    "vanished_class": Rule("error", "A class of the champion has no image, unless ``classes`` retires or renames it."),
    "unknown_class": Rule("warn", "``classes`` retires or renames a class that the champion does not have."),
    "left_out": Rule(
        "warn",
        "A file or folder was left out: an image without a class or a label, a class folder whose name begins with a "
        "dot, a file that is no image, or what a program left behind. Only information if it is only the last two.",
    ),
    "merged_folders": Rule("info", "Folders or labels are one class, because their names look the same."),
    "duplicate_row": Rule("info", "A row of a table repeats another."),
    "similar_classes": Rule(
        "warn",
        "Names of classes differ only in case, width, zeros (7 and 07 and 7.0) or characters that nobody sees, are "
        "written like missing values (nan, unknown), or join names of others (cat|dog).",
    ),
    "nested_folder": Rule("warn", "A class folder contains folders, which may be classes. See data.layout."),
    "outside_link": Rule("info", "A link leads to a folder outside of the source. Its images are used."),
    "pixels": Rule(
        "warn",
        "All pixels of an image have the same value, a 16-bit or transparent image lost its contrast or its largest "
        "values, or a color image is in a gray dataset.",
    ),
    "imbalance": Rule("warn", f"The largest class has more than {MAX_IMBALANCE} times the images of the smallest."),
    "from_scratch": Rule(
        "info", "Photographs are trained from random weights, although pretrained ones recognize more."
    ),
}
RULE_OF = {
    **dict.fromkeys(("cropped", "letterboxed", "stretched", "upscaled"), "resized"),
    **dict.fromkeys(("hidden_folder", "litter", "no_class", "no_label", "not_an_image"), "left_out"),
    "earlier_split": "duplicate_across_splits",
    **dict.fromkeys(("clipped", "constant_image", "grayed", "low_contrast"), "pixels"),
}
"""The rule of each kind of problem that has another name."""


def _known_rule(name: str) -> str:
    if name in RULE_OF:
        raise ValueError(f"{name} is part of the rule {RULE_OF[name]}; name that one")
    if name not in RULES:
        raise ValueError(f"no rule has this name; {unknown_name(name, RULES)}")
    return name


Rules = tuple[Annotated[str, AfterValidator(_known_rule)], ...]


class ValidationSettings(Section):
    """The severity of validation rules, if it is not the default, and the limits of two rules."""

    error: Rules = Field(default=(), description="Rules that stop the run.")
    warn: Rules = Field(default=(), description="Rules that report a problem without stopping the run.")
    off: Rules = Field(default=(), description="Rules that are not checked.")
    max_left_out_fraction: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Largest share of images that may be undecodable or have conflicting labels without an error.",
    )
    min_class_images: int = Field(
        default=10,
        ge=1,
        description="A class with fewer images is tiny. A class of images from review is left out until it has this "
        "number.",
    )

    @model_validator(mode="after")
    def _without_contradiction(self) -> Self:
        lists = self._lists()
        for rule in RULES:
            if len(named := [severity for severity, rules in lists.items() if rule in rules]) > 1:
                raise ValueError(f"the rule {rule} is in the lists {' and '.join(named)}; keep it in one of them")
        return self

    def severities(self) -> dict[str, Severity]:
        severities: dict[str, Severity] = {name: rule.severity for name, rule in RULES.items()}
        for severity, rules in self._lists().items():
            severities.update((rule, severity) for rule in rules)
        return severities

    def option_for(self, severity: Literal["error", "warn", "off"], rule: str) -> str:
        """The options that move ``rule`` to the list of ``severity``. ``--set`` replaces a list, so
        they repeat its other rules."""
        options: list[str] = []
        for name, rules in self._lists().items():
            changed = [each for each in rules if each != rule] + [rule] * (name == severity)
            if changed != [*rules]:
                options.append(f"--set {shlex.quote(f'validation.{name}={json.dumps(changed)}')}")
        return " ".join(options)

    def names(self, rule: str) -> bool:
        """Whether a list has ``rule``."""
        return any(rule in rules for rules in self._lists().values())

    def _lists(self) -> dict[Severity, tuple[str, ...]]:
        return {"error": self.error, "warn": self.warn, "off": self.off}
