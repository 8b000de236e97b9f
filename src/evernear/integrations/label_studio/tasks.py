"""Write tasks and read annotations in Label Studio's JSON format.

https://labelstud.io/guide/task_format
"""

import base64
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self
from xml.sax.saxutils import quoteattr

from pydantic import AwareDatetime, BaseModel, Field, TypeAdapter, ValidationError, model_validator

from evernear.common.store import Store
from evernear.errors import ConflictError, DataError, SettingsError
from evernear.review.answers import Answer, Answers
from evernear.review.live_labels import import_labels, labeled_queries
from evernear.review.queue import Item, Queue
from evernear.review.random_queries import RandomQuery
from evernear.review.suspects import Suspect

FROM_NAME, TO_NAME = "label", "image"
"""Names of the tags in `labeling_config`."""


OUTCOMES = ("answered", "before", "open", "disagreeing", "unknown", "refused")


class Imported(NamedTuple):
    """The number of tasks by outcome (`OUTCOMES`),
    and a sentence for each refused task."""

    outcomes: dict[str, int]
    refusals: list[str]


class _Value(BaseModel):
    choices: list[str] = []


class _Result(BaseModel):
    type: str = ""
    value: _Value = Field(default_factory=_Value)


class _Annotation(BaseModel):
    result: list[_Result] = []
    was_cancelled: bool = False
    completed_by: int | dict[str, Any] | None = None
    updated_at: AwareDatetime | None = None


class _Data(BaseModel):
    """The SHA-256 hash of the image or, for a random query, the ID of the request."""

    evernear: str = Field(default="", pattern=r"^[0-9a-f]{64}$")
    query: str = ""

    @model_validator(mode="after")
    def _names_an_image(self) -> Self:
        if not self.evernear and not self.query:
            raise ValueError("neither evernear nor query")
        return self


class _Task(BaseModel):
    data: _Data
    annotations: list[_Annotation] = []


def labeling_config(labels: Sequence[str]) -> str:
    """The labeling interface of a project, which shows the image and its class. Paste
    the result into the settings of the Label Studio project.
    """
    choices = "".join(f"    <Choice value={quoteattr(label)}/>\n" for label in labels)
    return (
        f'<View>\n  <Image name="{TO_NAME}" value="$image"/>\n'
        f'  <Choices name="{FROM_NAME}" toName="{TO_NAME}" choice="single">\n{choices}  </Choices>\n</View>\n'
    )


def to_tasks(
    items: Iterable[Item], suspects: Iterable[tuple[Suspect, bytes]], random_queries: Iterable[RandomQuery] = ()
) -> list[dict[str, Any]]:
    """Create tasks, each with the image as a data URI and the suggested class as a
    prediction. Each suspect comes with the PNG file of its image.

    A task for a random query has no prediction, because a prediction would suggest a
    label and thereby distort the measured accuracy.
    """
    tasks = [_task(item.id, item.image, "query", "", item.candidates[0] if item.candidates else "") for item in items]
    return [
        *tasks,
        *(_task(each.image, png, "suspect label", each.label, each.suggested) for each, png in suspects),
        *(
            {"data": {"image": _data_uri(each.image), "query": each.id, "kind": "random query"}}
            for each in random_queries
        ),
    ]


def import_tasks(
    data: bytes, answers: Answers, queue: Queue, suspects: Sequence[Suspect], now: AwareDatetime, store: Store
) -> Imported:
    """Record the annotations in a JSON export, and return the number of tasks by
    outcome. Labels of random queries are stored only in ``store``.

    The outcomes are:

    - ``answered``: the annotation was recorded.
    - ``before``: the image already had an answer.
    - ``open``: the task has no annotation.
    - ``disagreeing``: annotators chose different classes.
    - ``unknown``: the image is no longer in the query log or among the suspects.
    - ``refused``: the source rejects the label,
      or the label is not usable as a folder name.

    Import the same file again to continue after an error.

    Raises:
        DataError: the file is not an export of tasks that evernear created.
    """
    by_image = {suspect.image: suspect for suspect in suspects}
    outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
    refusals: list[str] = []
    tasks = _tasks(data)
    labeled = (
        {query.id for query in labeled_queries(store).queries} if any(task.data.query for task in tasks) else set()
    )
    for task in tasks:
        try:
            if task.data.query:
                outcomes[_import_random(task, labeled, store, now)] += 1
            else:
                outcomes[_import(task, answers, queue, by_image.get(task.data.evernear), now)] += 1
        except (DataError, SettingsError) as error:
            outcomes["refused"] += 1
            refusals.append(str(error))
    return Imported(outcomes, refusals)


def _tasks(data: bytes) -> list[_Task]:
    """Parse an export. The encoding may be UTF-8, UTF-16 or UTF-32, with or without a
    byte order mark, because editors and shells may convert the file.
    """
    try:
        return TypeAdapter(list[_Task]).validate_json(data.decode(json.detect_encoding(data)))
    except UnicodeDecodeError as error:
        reason = str(error)
    except ValidationError as error:
        reason = f"at {'.'.join(map(str, error.errors()[0]['loc'])) or 'its start'}"
    raise DataError(
        f"The file is not a JSON export of tasks that `evernear labels export` wrote ({reason}); choose the format JSON"
        " in Label Studio, not JSON-MIN."
    )


def _import_random(task: _Task, labeled: Collection[str], store: Store, now: AwareDatetime) -> str:
    labels = {label for each in task.annotations if (label := _label(each, is_query=False))}
    if len(labels) != 1:
        return "disagreeing" if labels else "open"
    if task.data.query in labeled:
        return "before"
    return "answered" if import_labels(store, {task.data.query: labels.pop()}, now).stored else "unknown"


def _import(task: _Task, answers: Answers, queue: Queue, suspect: Suspect | None, now: AwareDatetime) -> str:
    image = task.data.evernear
    decided = [(_label(each, is_query=suspect is None), each) for each in task.annotations]
    decided = [(label, each) for label, each in decided if label is not None]
    labels = {label for label, _ in decided}
    if len(labels) != 1:
        return "disagreeing" if labels else "open"
    label, annotation = decided[-1]
    if image in answers.latest():
        return "before"
    item = None if suspect else queue.find(image)
    if item is None and suspect is None:
        return "unknown"
    action: Literal["label", "skip", "keep"] = "label" if label else "skip"
    if suspect and label == suspect.label:
        action, label = "keep", ""
    answer = Answer(
        image=image,
        action=action,
        label=label or "",
        files=suspect.files if suspect else (),
        who=f"label-studio:{_who(annotation.completed_by)}",
        at=annotation.updated_at or now,
    )
    try:
        answers.label(item.image if item else b"", answer)
    except ConflictError:
        return "before"
    return "answered"


def _label(annotation: _Annotation, is_query: bool) -> str | None:
    """The chosen class, an empty string if the annotator skipped a query, or None if
    the annotator made no decision.
    """
    if annotation.was_cancelled:
        return "" if is_query else None
    choices = [choice for result in annotation.result if result.type == "choices" for choice in result.value.choices]
    return choices[0] if len(choices) == 1 else None


def _who(completed_by: int | dict[str, Any] | None) -> str:
    """The e-mail address of an annotator if the export contains the address, otherwise
    the annotator's number.
    """
    if isinstance(completed_by, dict):
        return str(completed_by.get("email") or completed_by.get("id") or "unknown")
    return str(completed_by or "unknown")


def _task(image: str, png: bytes, kind: str, label: str, suggested: str) -> dict[str, Any]:
    data = {"image": _data_uri(png), "evernear": image, "kind": kind}
    result = {"from_name": FROM_NAME, "to_name": TO_NAME, "type": "choices", "value": {"choices": [suggested]}}
    return {
        "data": data | ({"label": label} if label else {}),
        "predictions": [{"model_version": "evernear", "result": [result]}] if suggested else [],
    }


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
