"""Label Studio: exported tasks, and annotations in its JSON format."""

import base64
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.common.store import Store
from evernear.errors import DataError
from evernear.integrations.label_studio.tasks import labeling_config
from evernear.release.registry import Registry
from evernear.review.answers import Answers
from evernear.review.label_target import open_label_target
from evernear.review.live_labels import labeled_queries
from evernear.review.suspects import SUSPECTS, Suspect, Suspects
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.releases import MakeRelease
from tests.review_queue import NOW, log_queries, png


def invoke(store: Store, source: Path, command: str, *arguments: str) -> Any:
    options = ["--source", f"folder:{source}", "--set", f"store={store.uri}"]
    return CliRunner().invoke(app, ["labels", command, *arguments, *options])


def annotated(task: dict[str, Any], *choices: str, cancelled: bool = False, by: object = 7) -> dict[str, Any]:
    """A task as Label Studio exports it, with one annotation for each choice."""
    annotations = [
        {
            "id": number,
            "completed_by": by,
            "result": [
                {
                    "id": "Dx_aB91ISN",
                    "value": {"choices": [choice]},
                    "from_name": "label",
                    "to_name": "image",
                    "type": "choices",
                    "origin": "manual",
                }
            ],
            "was_cancelled": cancelled,
            "ground_truth": False,
            "created_at": "2027-03-09T22:16:08.728353Z",
            "updated_at": "2027-03-09T22:16:08.728378Z",
            "lead_time": 4.288,
        }
        for number, choice in enumerate(choices)
    ]
    return {"id": 1, "project": 83, "annotations": annotations, "drafts": [], "meta": {}} | task


def test_tasks_have_the_image_and_the_suggestion_and_the_config_has_the_classes(store: Store, source: Path) -> None:
    log_queries(store, png(1), candidates=("dog", "cat"))
    suspect = Suspect(image="ab" * 32, files=("cat/a.png",), label="cat", suggested="dog", margin=-1.0)
    missing = suspect.model_copy(update={"image": "cd" * 32, "files": ("cat/gone.png",)})
    save_suspects(store, source, suspect, missing)
    file = source.parent / "tasks.json"
    result = invoke(store, source, "export", str(file))
    assert result.exit_code == 0
    assert "2 tasks" in result.stdout
    query, suspected = json.loads(file.read_text())
    assert query["data"]["image"] == f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    assert [task["predictions"][0]["result"][0]["value"]["choices"] for task in (query, suspected)] == [["dog"]] * 2
    assert suspected["data"]["label"] == "cat"
    config = ElementTree.fromstring(file.with_suffix(".xml").read_text())  # noqa: S314 - our own
    assert [choice.get("value") for choice in config.iter("Choice")] == ["cat", "dog"]
    assert (config.find("Choices").get("toName"), config.find("Image").get("value")) == ("image", "$image")
    assert '"a &quot;b&quot;' not in labeling_config(['a "b" & <c>'])
    ElementTree.fromstring(labeling_config(['a "b" & <c>']))  # noqa: S314 - our own


def save_suspects(store: Store, source: Path, *suspects: Suspect) -> None:
    checked = Suspects(source=f"folder:{source}", dataset_digest="", created=NOW, found=2, images=9, suspects=suspects)
    store.put(SUSPECTS, checked.to_json())


def test_annotations_become_answers_once(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2), png(3), png(4))
    relabeled = Suspect(image="ab" * 32, files=("cat/a.png",), label="cat", suggested="dog", margin=-1.0)
    kept = Suspect(image="cd" * 32, files=("dog/a.png",), label="dog", suggested="cat", margin=-1.0)
    save_suspects(store, source, relabeled, kept)
    file = source.parent / "tasks.json"
    invoke(store, source, "export", str(file))
    one, two, three, four, first, second = json.loads(file.read_text())
    removed = {"data": one["data"] | {"evernear": "ef" * 32}}
    tasks = [
        annotated(one, "cat", "cat", by={"id": 7, "email": "ann@example.com"}),
        annotated(two, "cat", cancelled=True),
        annotated(three, "cat", "dog"),
        annotated(four),
        annotated(first, "dog"),
        annotated(second, "dog"),
        annotated(removed, "dog"),
    ]
    file.write_text(json.dumps(tasks))
    result = invoke(store, source, "import", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.split(": ", 1)[1].strip() == (
        "4 answered, 0 before, 1 open, 1 disagreeing, 1 unknown, 0 refused."
    )
    answers = Answers(store, open_label_target(f"folder:{source}")).latest()
    assert [(each.action, each.label, each.who) for each in answers.values()] == [
        ("label", "cat", "label-studio:ann@example.com"),
        ("skip", "", "label-studio:7"),
        ("label", "dog", "label-studio:7"),
        ("keep", "", "label-studio:7"),
    ]
    assert (source / "cat" / f"review-{one['data']['evernear'][:16]}.png").read_bytes() == png(1)
    assert not (source / "cat" / "a.png").exists()
    again = invoke(store, source, "import", str(file))
    assert "0 answered, 4 before" in again.stdout


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_export_that_an_editor_or_a_shell_converted_is_read(store: Store, source: Path, encoding: str) -> None:
    log_queries(store, png(1))
    file = source.parent / "tasks.json"
    invoke(store, source, "export", str(file))
    (task,) = json.loads(file.read_text())
    file.write_bytes(json.dumps([annotated(task, "dog")]).encode(encoding))
    result = invoke(store, source, "import", str(file))
    assert "1 answered" in result.stdout, result.output


def test_annotation_that_cannot_be_carried_out_is_named_and_the_others_are_recorded(store: Store, source: Path) -> None:
    log_queries(store, png(1), png(2))
    file, name = source.parent / "tasks.json", f"cat/{'x' * 240}.png"
    (source / name).write_bytes(png(3))
    save_suspects(store, source, Suspect(image="ab" * 32, files=(name,), label="cat", suggested="dog", margin=-1.0))
    invoke(store, source, "export", str(file))
    one, two, suspected = json.loads(file.read_text())
    tasks = [annotated(suspected, "dog"), annotated(one, "a/b"), annotated(two, "dog")]
    file.write_text(json.dumps(tasks))
    result = invoke(store, source, "import", str(file))
    assert result.exit_code == DataError.exit_code
    assert result.stdout == "Tasks: 1 answered, 0 before, 0 open, 0 disagreeing, 0 unknown, 2 refused.\n"
    assert "too long a name" in result.stderr
    assert "'a/b' cannot be the name of a class" in result.stderr
    assert (source / name).exists()
    again = invoke(store, source, "import", str(file))
    assert "0 answered, 1 before, 0 open, 0 disagreeing, 0 unknown, 2 refused" in again.stdout


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"data": {"image": "x.png"}, "annotations": []}]', "no json"])
def test_another_file_is_refused(store: Store, source: Path, content: str) -> None:
    file = source.parent / "export.json"
    file.write_text(content)
    result = invoke(store, source, "import", str(file))
    assert isinstance(result.exception, DataError)
    assert "not a JSON export of tasks" in str(result.exception)


def test_random_queries_are_labeled_without_a_suggestion_and_enter_no_dataset(
    store: Store, source: Path, make_release: MakeRelease
) -> None:
    registry = Registry(store)
    version = registry.publish(make_release().archive).manifest.version
    registry.set_champion(version, None)
    file = base64.b64encode(png(1)).decode()
    rows = [LoggedQuery(at=NOW, pred="cat", dist=0.1, unknown=False, id=f"q{n}", file=file) for n in range(4)]
    period = Period(version=version, since=NOW, until=NOW, queries=9, unknown=0)
    lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *rows))
    store.put(f"queries/{NOW:%Y%m%d}/{NOW:%Y%m%dT%H%M%SZ}-{version}-host-1-0.jsonl", lines.encode())
    path = source.parent / "tasks.json"
    invoke(store, source, "export", str(path))
    tasks = {task["data"]["query"]: task for task in json.loads(path.read_text())}
    assert tasks.keys() == {"q0", "q1", "q2", "q3"}
    assert "predictions" not in tasks["q0"], "it would suggest a label"
    removed = {"data": tasks["q0"]["data"] | {"query": "removed"}}
    choices = {"q0": ("cat",), "q1": ("dog", "dog"), "q2": ("cat", "dog"), "q3": ()}
    annotations = [annotated(tasks[query], *chosen) for query, chosen in choices.items()]
    path.write_text(
        json.dumps([*annotations, annotated(tasks["q3"], "cat", cancelled=True), annotated(removed, "cat")])
    )
    result = invoke(store, source, "import", str(path))
    assert "2 answered, 0 before, 2 open, 1 disagreeing, 1 unknown, 0 refused." in result.stdout
    assert {query.id: query.correct for query in labeled_queries(store).queries} == {"q0": True, "q1": False}
    assert list(source.rglob("review-*")) == []
    assert "0 answered, 2 before" in invoke(store, source, "import", str(path)).stdout
