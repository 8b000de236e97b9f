"""Exchange with Label Studio: tasks in its JSON format, and the annotations that come back in it.

https://labelstud.io/guide/task_format
"""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import quoteattr

from pydantic import AwareDatetime, BaseModel, Field, TypeAdapter, ValidationError

from evernear.errors import ConflictError, DataError, SettingsError
from evernear.review.answers import Answer, Answers
from evernear.review.queue import Item, Queue
from evernear.review.suspects import Suspect

FROM_NAME, TO_NAME = "label", "image"
"""Names of the tags of `labeling_config`."""


OUTCOMES = ("answered", "before", "open", "disagreeing", "unknown", "refused")


class Imported(NamedTuple):
    """The number of tasks by each of `OUTCOMES`, and a sentence for each refused one."""

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
    evernear: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Task(BaseModel):
    data: _Data
    annotations: list[_Annotation] = []


def labeling_config(labels: Sequence[str]) -> str:
    """The labeling interface of a project: the image and its class. Paste it into the project's settings."""
    choices = "".join(f"    <Choice value={quoteattr(label)}/>\n" for label in labels)
    return (
        f'<View>\n  <Image name="{TO_NAME}" value="$image"/>\n'
        f'  <Choices name="{FROM_NAME}" toName="{TO_NAME}" choice="single">\n{choices}  </Choices>\n</View>\n'
    )


def to_tasks(items: Iterable[Item], suspects: Iterable[tuple[Suspect, bytes]]) -> list[dict[str, Any]]:
    """Tasks with the image as a data URI and the suggested class as a prediction; a suspect comes with its picture."""
    tasks = [_task(item.id, item.image, "query", "", item.candidates[0] if item.candidates else "") for item in items]
    return [
        *tasks,
        *(_task(each.image, png, "suspect label", each.label, each.suggested) for each, png in suspects),
    ]


def import_tasks(
    data: bytes, answers: Answers, queue: Queue, suspects: Sequence[Suspect], now: AwareDatetime
) -> Imported:
    """Record the annotations of a JSON export; return the number of tasks by outcome.

    ``answered``: recorded. ``before``: the image already had an answer. ``open``: not annotated. ``disagreeing``:
    annotators chose different classes. ``unknown``: the image is no longer in the query log or among the suspects.
    ``refused``: the source does not take the label, or it is not a usable folder name. Import the same file again to
    continue after an error.

    Raises:
        DataError: the file is not an export of tasks that evernear exported.
    """
    by_image = {suspect.image: suspect for suspect in suspects}
    outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
    refusals: list[str] = []
    for task in _tasks(data):
        try:
            outcomes[_import(task, answers, queue, by_image.get(task.data.evernear), now)] += 1
        except (DataError, SettingsError) as error:
            outcomes["refused"] += 1
            refusals.append(str(error))
    return Imported(outcomes, refusals)


def _tasks(data: bytes) -> list[_Task]:
    """Parse an export in UTF-8, UTF-16 or UTF-32, with or without a byte order mark: editors and shells convert it."""
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
    """The chosen class; empty if the annotator skipped a query, None if nothing was decided."""
    if annotation.was_cancelled:
        return "" if is_query else None
    choices = [choice for result in annotation.result if result.type == "choices" for choice in result.value.choices]
    return choices[0] if len(choices) == 1 else None


def _who(completed_by: int | dict[str, Any] | None) -> str:
    """The e-mail address of an annotator if the export has it, or the number."""
    if isinstance(completed_by, dict):
        return str(completed_by.get("email") or completed_by.get("id") or "unknown")
    return str(completed_by or "unknown")


def _task(image: str, png: bytes, kind: str, label: str, suggested: str) -> dict[str, Any]:
    data = {"image": f"data:image/png;base64,{base64.b64encode(png).decode()}", "evernear": image, "kind": kind}
    result = {"from_name": FROM_NAME, "to_name": TO_NAME, "type": "choices", "value": {"choices": [suggested]}}
    return {
        "data": data | ({"label": label} if label else {}),
        "predictions": [{"model_version": "evernear", "result": [result]}] if suggested else [],
    }
