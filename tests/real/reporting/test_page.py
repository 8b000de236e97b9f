"""The run page: self-contained, safe for any label, verdict first, bounded in size."""

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from evernear.common.run_record import RunRecord, StepRecord
from evernear.data.validate import validate_dataset
from evernear.embedding.candidate import Candidate, CandidateName
from evernear.evaluation.assess import assess
from evernear.evaluation.evaluate import Evaluation, ReleasedSystem, evaluate_systems
from evernear.evaluation.example_collector import ExampleCollector
from evernear.evaluation.examples import BINS, TILE_PX, Examples, LiveDistances, Sample, Tiles
from evernear.evaluation.gate import decide
from evernear.evaluation.headline import AnswerCounts
from evernear.evaluation.live_accuracy import LiveAccuracy
from evernear.evaluation.measure import CALLED_UNKNOWN
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import proportion
from evernear.evaluation.verdict import Verdict
from evernear.reporting.notify import finalize
from evernear.reporting.page import compare_page, page, run_page
from evernear.reporting.run_report import find_run
from evernear.settings import GateSettings, IndexSettings, RunSettings, ValidationSettings
from tests.open_sets import draw_of
from tests.releases import System

NEAR_AND_FAR = np.linspace(0, 1, 50, dtype=np.float32), np.linspace(0.5, 1.5, 50, dtype=np.float32)
ALIKE = NEAR_AND_FAR[0], NEAR_AND_FAR[0]
REASON = "Flat was chosen because exact search of "
CHAMPION = "20260101.000000.00000000"
CANDIDATE = "20260102.000000.00000000"
HOSTILE = "<script>alert(1)</script> \x1b[31m \u202egod"
EPOCHS = [
    {"epoch": n, "train_loss": 1 / n, "gallery_loss": 2 / n, "gallery_accuracy": 1 - 1 / n, "learning_rate": 0.1}
    for n in (1, 2, 3)
]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class WellFormed(HTMLParser):
    """Fails at an element that is not closed in order, and collects what a page must not contain,
    or only once."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open, tag
        assert self.open.pop() == tag


def check(html: str) -> WellFormed:
    """Assert that ``html`` is well-formed and has no script and no external reference."""
    parser = WellFormed()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert parser.tags.isdisjoint({"script", "iframe", "object", "embed", "link", "img", "base", "form"})
    for name, value in parser.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href", "action"):
            assert value.startswith("#"), value
    assert set(re.findall(r"url\(\"?([a-z]+:|#|//)", html)) <= {"data:", "#"}
    assert "@import" not in html
    assert all(line.isprintable() for line in html.splitlines())
    return parser


@pytest.fixture(scope="module", autouse=True)
def charts_of_equal_figures_are_drawn_once() -> Iterator[None]:
    """Drawing takes most of the time of a page, and most pages have the same charts."""
    drawn: dict[bytes, Markup] = {}

    def once(draw: Callable[..., Markup]) -> Callable[..., Markup]:
        def cached(*figures: object) -> Markup:
            key = pickle.dumps((draw.__name__, figures))
            if key not in drawn:
                drawn[key] = draw(*figures)
            return drawn[key]

        return cached

    from evernear.reporting import plots  # matplotlib takes a second to import

    with pytest.MonkeyPatch.context() as patch:
        for draw in (plots.training_curves, plots.distances, plots.probe_distances, plots.trade_off):
            patch.setattr(plots, draw.__name__, once(draw))
        yield


@dataclass
class Run:
    """A run in which the small network is evaluated against itself as champion."""

    record: RunRecord
    system: System
    evaluation: Evaluation
    examples: Examples

    def save(
        self,
        floor: float = 0.5,
        evaluation: Mapping[str, Any] = {},
        examples: Mapping[str, Any] = {},
        **documents: Any,
    ) -> None:
        """Record the run up to its outcome, with other fields of its evaluation and examples, or
        other documents."""
        changed = self.evaluation.model_copy(update=dict(evaluation))
        verdict = decide(changed, GateSettings(accuracy_floor=floor, beat_baseline=False))
        self.record.save_step(
            StepRecord(
                step="evaluate",
                state="finished",
                message="accuracy 90%",
                started=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
                ended=datetime(2026, 1, 2, 3, 5, 30, tzinfo=UTC),
                peak_memory_bytes=512_000_000,
                cpu_s=3600.0,
            )
        )
        recorded: dict[str, Any] = {
            "evaluation": changed,
            "examples": self.examples.model_copy(update=dict(examples)),
            "verdict": verdict,
            "validation": validate_dataset(self.system.dataset, ValidationSettings()),
            "training": {"epochs": EPOCHS, "best_epoch": 2},
            "settings": RunSettings(target="registry").model_dump(mode="json"),
            "archived": {"version": CANDIDATE},
            "metrics": changed.metrics(),
            "deployment": {"version": CANDIDATE, "url": None} if verdict.promote else {},
        }
        self.record.save(**recorded | documents)
        finalize(self.record, "continuous-training", "SUCCEEDED", "", ("run", "--workdir", "my work"))

    def page(self, *arguments: Any, **documents: Any) -> str:
        """Save the run, and return its page."""
        self.save(*arguments, **documents)
        html = run_page(self.record)
        check(html)
        return html


@pytest.fixture(scope="module")
def measured(system: System) -> tuple[Evaluation, Examples]:
    recognizer = Recognizer.open(system.network_dir, system.index_dir, CHAMPION)
    open_set = assess([draw_of(*NEAR_AND_FAR)], IndexSettings())
    return measure(system, recognizer, ReleasedSystem(recognizer, system.dataset), open_set)


@pytest.fixture(scope="module")
def measured_alone(system: System) -> tuple[Evaluation, Examples]:
    """The evaluation of the small network without a champion."""
    recognizer = Recognizer.open(system.network_dir, system.index_dir, CHAMPION)
    return measure(system, recognizer, None, OpenSet(held_out=()))


def measure(
    system: System, candidate: Recognizer, champion: ReleasedSystem | None, open_set: OpenSet
) -> tuple[Evaluation, Examples]:
    collector = ExampleCollector(candidate, system.dataset)
    evaluation = evaluate_systems(candidate, champion, system.dataset, open_set, observers=[collector.add])
    return evaluation, collector.finish(champion.dataset if champion else None)


@pytest.fixture
def run(record: RunRecord, system: System, measured: tuple[Evaluation, Examples]) -> Run:
    return Run(record, system, *measured)


def top_of(html: str) -> str:
    return html[html.index("<h1>") : html.index("<nav>")]


def words_of(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def test_page_has_every_section_and_begins_with_verdict_and_next_command(run: Run) -> None:
    html = run.page()
    sections = {"metrics", "classes", "mistakes", "map", "distances", "training", "data", "steps", "lineage"}
    assert sections <= set(check(html).ids)
    words = words_of(top_of(html))
    assert len(" ".join(words.split())) < 1500
    order = [
        words.index(text)
        for text in ("promoted", f"Release {CANDIDATE}", "test images: ", "Label right", "--image IMAGE")
    ]
    assert order == sorted(order)
    assert "evernear registry rollback --why REASON --workdir &#39;my work&#39;" in words
    for text in ("None", "Undefined"):
        assert text not in html.replace(">None<", "")
    for text in ("1 min 30 s", "512 MB", "0.0405", "target", "The champion was trained on the same images.", REASON):
        assert text in html


def test_page_shows_the_networks_of_which_one_was_chosen(run: Run) -> None:
    assert "query images named right" not in run.page()
    names: tuple[CandidateName, ...] = ("pretrained", "head", "fine-tuned")
    tried = [Candidate(name=name, right=9, asked=12, chosen=name == "head").model_dump(mode="json") for name in names]
    run.record.save(training=run.record.load("training") | {"candidates": tried})
    html = run_page(run.record)
    check(html)
    rows = [words_of(row) for row in re.findall(r"<tr><td>(?:the pre|a head|the fine).*?</tr>", html, re.DOTALL)]
    assert [" ".join(row.split()) for row in rows] == [
        "the pretrained network as it is9 (75.0%) 12",
        "a head on it9 (75.0%) 12chosen",
        "the fine-tuned network9 (75.0%) 12",
    ]


def test_held_page_begins_with_the_failed_rules(run: Run) -> None:
    top = top_of(run.page(1.0, {"training_warnings": ("Training collapsed after epoch 1.",)}))
    for text in (
        f"Release {CANDIDATE} is not promoted",
        "below the floor of 100.00%",
        "Training collapsed after epoch",
    ):
        assert text in top
    assert "evernear labels check --workdir &#39;my work&#39;" in words_of(top)
    assert "--force" not in top, "the first steps are those to a better model"


def test_page_says_what_a_promotion_leaves_unknown_and_what_is_not_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.evaluation.gate.MAX_UNDETECTED_LOSS", 0.001)
    html = run.page(0.5, {"reviewed_left_out": {"test": 12, "query": 1}})
    caution = Verdict.model_validate(run.record.load("verdict")).caution
    assert "is detected with 90% probability" in caution
    assert f'<p class="warning">{caution}</p>' in top_of(html)
    assert "12 images of the test split came by review and are not measured." in html
    assert "1 image of the query split came by review and is not measured." in html


@pytest.mark.parametrize(("count", "more"), [(5, "1 more reason"), (6, "2 more reasons")])
def test_many_failed_rules_do_not_push_the_next_command_down(run: Run, count: int, more: str) -> None:
    run.save(1.0)
    run.record.save(outcome=run.record.load("outcome") | {"reasons": [f"Rule {n} failed." for n in range(count)]})
    html = run_page(run.record)
    check(html)
    visible, folded = top_of(html).split("<details>")
    assert re.findall(r"Rule \d", visible) == [f"Rule {n}" for n in range(4)]
    assert re.findall(r"Rule \d", folded) == [f"Rule {n}" for n in range(4, count)]
    assert f"<summary>{more}</summary>" in folded


@pytest.mark.parametrize(
    ("open_set", "explanation"),
    [
        (OpenSet(held_out=()), "was calibrated on gallery impostors"),
        (OpenSet(held_out=(), threshold=0.4), "was reused together with the network"),
        (assess([draw_of(*NEAR_AND_FAR)], IndexSettings()), "Both rates cannot be held"),
        (assess([draw_of(*ALIKE)], IndexSettings()), "Unknown is switched off"),
    ],
)
def test_page_without_a_champion_explains_the_threshold(
    record: RunRecord, system: System, measured_alone: tuple[Evaluation, Examples], open_set: OpenSet, explanation: str
) -> None:
    html = Run(record, system, *measured_alone).page(0.5, {"open_set": open_set})
    assert "no champion yet" in html
    assert explanation in html


def test_page_of_a_failed_run_shows_the_error_and_the_steps_so_far(record: RunRecord) -> None:
    started = datetime(2026, 1, 2, tzinfo=UTC)
    record.save_step(StepRecord(step="ingest", state="failed", message="The disk is full.", started=started))
    finalize(record, "continuous-training", "FAILED", "")
    html = run_page(record)
    check(html)
    places = [
        html.index(text) for text in ("Failed at ingest", "The disk is full.", "<span>evernear</span> <span>pipe")
    ]
    assert places == sorted(places)


def renamed(value: Any, old: str, new: str) -> Any:
    """``value`` with the label ``old`` replaced, also in keys."""
    if isinstance(value, dict):
        return {new if key == old else key: renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, old, new) for each in value]
    return new if value == old else value


def test_labels_and_messages_are_escaped(run: Run) -> None:
    report = validate_dataset(run.system.dataset, ValidationSettings())
    evaluation, examples, validation = (
        renamed(each.model_dump(mode="json"), "8", HOSTILE) for each in (run.evaluation, run.examples, report)
    )
    evaluation |= {"training_warnings": [HOSTILE]}
    examples["mistakes"] = examples["mistakes"] or []
    validation |= {"findings": [{"rule": HOSTILE, "severity": "warn", "message": HOSTILE, "names": [], "count": 1}]}
    settings = RunSettings(target="registry").model_dump(mode="json") | {"store": HOSTILE}
    run.save(validation=validation, settings=settings)
    run.record.save(evaluation=evaluation, examples=examples)
    run.record.save_step(StepRecord(step=HOSTILE, state="failed", message=HOSTILE, started=datetime.now(UTC)))
    for html in (run_page(run.record), compare_page(run.record, run.record)):
        check(html)
        assert html.count("&lt;script&gt;") > 3


def test_information_of_the_validation_is_no_warning(run: Run) -> None:
    report = validate_dataset(run.system.dataset, ValidationSettings()).model_dump(mode="json")
    finding = {"rule": "litter", "severity": "info", "message": "7 files were left out.", "names": [], "count": 7}
    html = run.page(validation=report | {"findings": [finding]})
    assert '<p class="muted"><b>litter</b>: 7 files were left out.</p>' in html


def thousand_classes(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the largest examples, of images of 96 x 96 noise, and of an evaluation of 1,000
    classes."""
    labels = tuple(f"class number {number}" for number in range(1000))
    recall = {label: proportion(number % 20, 20, 0.95) for number, label in enumerate(labels)}
    confusions = tuple((label, labels[(n * 7 + 1) % 1000], 1 + n % 5, n % 2) for n, label in enumerate(labels))
    of_all = proportion(1000, sum(count for _, _, count, _ in confusions), 0.95)
    changed = {"labels": labels, "label_right": of_all, "class_label_right": recall, "confusions": confusions}
    points = run.examples.map
    points = tuple(points[n % len(points)].model_copy(update={"label": labels[n]}) for n in range(500))
    samples = tuple(Sample(label=label, tiles=tuple(range(6))) for label in labels[:20])
    candidate = run.evaluation.candidate.model_copy(update=changed)
    return {"candidate": candidate}, {"map": points, "samples": samples, "new_images": samples}


def test_tables_of_a_thousand_classes_are_bounded(run: Run) -> None:
    html = run.page(0.0, *thousand_classes(run))
    assert re.search(r"9\d\d more classes, with at least", html)
    matrix = html[html.index('class="confusion"') : html.index('id="mistakes"')]
    assert matrix.count("<tr>") == 1 + 31
    assert matrix.count('class="right"') == 30, "the mistakes among other classes are not right"
    assert len(html) < 1_000_000


@pytest.mark.slow
def test_largest_page_is_small_enough_to_send(run: Run) -> None:
    """Photographs compress better than noise, which is the worst case of every image format."""
    from evernear.evaluation import example_collector as module

    rng = np.random.default_rng(0)

    def noise(count: int, limit_px: int) -> Any:
        tiles = Tiles((224, 224, 3), limit_px)
        for _ in range(count):
            smooth = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
            tiles.add(smooth)
        return tiles.sheet()

    mistakes = module.MISTAKES * (1 + module.NEIGHBORS)
    count = mistakes + module.SAMPLE_CLASSES * module.SAMPLES_PER_CLASS + module.NEW_IMAGES
    sheets = {"images": noise(count, TILE_PX), "map_images": noise(module.MAP_POINTS, module.MAP_TILE_PX)}
    evaluation, examples = thousand_classes(run)
    assert 500_000 < len(run.page(0.0, evaluation, examples | sheets).encode()) < 3_000_000


def test_live_queries_are_drawn_with_their_threshold(run: Run) -> None:
    live = LiveDistances(release=CHAMPION, queries=40, unknown=10, threshold=0.7, histogram=(2,) * BINS)
    html = run.page(examples={"live": live})
    assert "Live queries of the champion" in html
    assert "25.0% called unknown" in html


def test_unknown_images_are_counted_wherever_answers_are(run: Run) -> None:
    """Every label is right, and a third of the test images is called unknown."""
    candidate, examples = run.evaluation.candidate, run.examples
    confusions = tuple((label, label, 3, 1) for label in candidate.labels)
    right = dict.fromkeys(candidate.labels, proportion(3, 3, 0.95))
    changed = candidate.model_copy(update={"class_label_right": right, "confusions": confusions})
    mistake = examples.mistakes[0].model_copy(update={"predicted": examples.mistakes[0].label, "unknown": True})
    html = run.page(0.0, {"candidate": changed}, {"mistakes": (mistake,)})
    total, unknown = 3 * len(right), len(right)
    sentence = f"f {total} test images: {total - unknown} named right, 0 named wrong, {unknown} called unknown"
    assert f"O{sentence}" in words_of(top_of(html))
    section = words_of(html[html.index('id="mistakes"') : html.index('id="map"')])
    assert f"O{sentence}" in section
    assert f"{mistake.label}, called unknown, else {mistake.label}" in section
    matrix = html[html.index('class="confusion"') : html.index('id="mistakes"')]
    assert "(called unknown)" in matrix
    rows = matrix[matrix.index("</thead>") :]
    assert re.sub(r"<[^>]*>", " ", rows).split()[:3] == [candidate.labels[0], "2", "1"]
    classes = html[html.index('id="classes"') : html.index("Confusion matrix")]
    assert "recall" not in classes
    empty = run.page(0.0, {"candidate": changed}, {"mistakes": ()})
    assert "predicted wrongly" not in empty


def test_accuracy_in_life_is_shown_by_week(run: Run) -> None:
    assert "No live query has a true label yet." in run.page()
    answers = AnswerCounts(named_right=78, named_wrong=9, called_unknown=13)
    week = LiveAccuracy(version=CHAMPION, week="2026-W47", answers=answers, label_right=proportion(91, 100, 0.95))
    html = run.page(examples={"live_accuracy": (week,)})
    for text in ("2026-W47", "78", "9", "13", "91.0%", "84% to 95%"):
        assert text in html


def test_two_runs_are_compared(run: Run) -> None:
    run.save()
    other = replace(run, record=RunRecord(run.record.store, "r2"))
    settings = RunSettings(target="registry").model_dump(mode="json")
    settings["train"]["epochs"] = 77
    other.save(1.0, settings=settings, archived={"version": CHAMPION}, training={})
    assert find_run(run.record.store, CHAMPION).run == "r2"
    html = compare_page(find_run(run.record.store, "run"), find_run(run.record.store, CHAMPION))
    check(html)
    for text in ("train.epochs", "77", "which is the same for both"):
        assert text in html
    assert "train.margin" not in html


def test_curves_are_a_page_in_the_colors_of_the_theme() -> None:
    from evernear.reporting.plots import training_curves

    html = page("Training <curves>", training_curves(EPOCHS))
    check(html)
    assert html.count("<svg") == 3
    assert "<h1>Training &lt;curves&gt;</h1>" in html
    assert "var(--first)" in html
    assert "#0a0b" not in html


@pytest.mark.parametrize("names", [["short", "x" * 40], [f"{number} {'x' * 90} {number}" for number in range(10)]])
def test_long_class_names_are_shortened(
    measured: tuple[Evaluation, Examples], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Names cut off at the edge of the figure would not identify their classes."""
    from matplotlib.figure import Figure

    from evernear.reporting.plots import confusion_png

    evaluation, _ = measured
    rows = [[int(i == j) for j in range(len(names) + 1)] for i in range(len(names))]
    columns = [*names, CALLED_UNKNOWN]
    monkeypatch.setattr(type(evaluation.candidate), "confusion_matrix", lambda _: (columns, rows))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    confusion_png(evaluation)
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.bbox.width > 0.25 * figure.bbox.width
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        box = label.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert [(text[0], text[-1]) for text in texts] == [(name[0], name[-1]) for name in names]


def test_confusion_png_accepts_any_class_name(
    measured: tuple[Evaluation, Examples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib would parse text between two dollar signs as a formula, and raise if it is
    invalid."""
    from evernear.reporting.plots import confusion_png

    names = ["$1_$2", "a<b&c", "\x1b[31m\x00", "\u202egod\nline"]
    matrix = [*names, CALLED_UNKNOWN], [[3, 1, 0, 0, 0], [0, 4, 0, 0, 2], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    monkeypatch.setattr(type(measured[0].candidate), "confusion_matrix", lambda _: matrix)
    assert confusion_png(measured[0]).startswith(b"\x89PNG")


@pytest.mark.parametrize("floor", [0.5, 1.0])
def test_page_and_comparison_have_a_main_and_tables_that_a_keyboard_scrolls(run: Run, floor: float) -> None:
    for html in (run.page(floor), compare_page(run.record, run.record)):
        check(html)
        assert html.count("<main>") == 1
        divisions = re.findall(r'<div class="scroll"[^>]*>', html)
        assert len(divisions) > 3
        names = [re.findall(r'tabindex="0" role="region" aria-label="([^"]+)"', division) for division in divisions]
        assert all(names)
        assert html.count('class="scroll"') == html.count("<table"), "every table is in one of them"


def test_page_explains_its_terms_and_claims_nothing_about_what_is_live_later(run: Run) -> None:
    html = run.page(deployment={"version": CANDIDATE, "url": "http://h/predictions/m"})
    assert f"Release {CANDIDATE} was promoted" in html
    assert "deployed to http://h/predictions/m" in html
    assert "The probe trains a network without some of the classes" in html
    assert '<a class="term" href="#word-anchor" title="An earlier release with which the gate also compares' in html
    assert '<dt id="word-anchor">anchor</dt>' in html
    assert "The release was live when the run ended." in html
    for page_ in (html, compare_page(run.record, run.record)):
        assert "is live at" not in page_
        assert f"{CANDIDATE} is live" not in page_
        assert "as it ended" in page_
    assert "Held: the gate did not promote the candidate" in run.page(1.0)


def test_page_says_how_many_classes_were_tested(run: Run) -> None:
    assert "classes tested" not in run.page()
    candidate = run.evaluation.candidate
    (untested, _), *others = candidate.class_label_right.items()
    confusions = tuple(pair for pair in candidate.confusions if pair[0] != untested)
    changed = {"class_label_right": dict(others), "confusions": confusions}
    partly = {"candidate": candidate.model_copy(update=changed)}
    html = run.page(0.5, partly)
    known = len(candidate.known_labels)
    tested = f"{known - 1} of {known} classes tested"
    assert tested in top_of(html), "the headline says so"
    assert f'<b class="warn">{tested}</b>' in html
    assert tested in compare_page(run.record, run.record)
    evaluation = run.evaluation.model_copy(update=partly)
    assert tested in evaluation.summary()
    assert (evaluation.metrics()["classes"], evaluation.metrics()["tested_classes"]) == (known, known - 1)
