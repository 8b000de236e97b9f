"""The base classes for values that evernear stores or passes between steps, and the format of a
store."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from evernear.common.disk import write_atomically
from evernear.common.output import printable
from evernear.errors import FormatError, IntegrityError

FORMAT = 12
"""The format of all documents in a store. Raise it if you change one of them, such as a field of a
`Document`, a column of a table or the content of a checkpoint."""
_QUOTED_MAX_CHARACTERS = 200


class Frozen(BaseModel):
    """An immutable value that rejects unknown fields and can be stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    remedy: ClassVar[str] = ""
    """How to mend an invalid document, such as "run the train step again"."""

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """Parse a stored document. ``remedy`` overrides the class's own. An `IntegrityError` names
        ``source``, the first invalid field and the remedy."""
        if not data:
            raise IntegrityError(f"{source} is not a valid {_words(cls)}: it is empty{cls._ending(remedy)}")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            fault = faults[0]
            field = printable(".".join(str(part) for part in fault["loc"]), _QUOTED_MAX_CHARACTERS)
            if all(each["type"] == "extra_forbidden" for each in faults):
                raise IntegrityError(
                    f"{source} is not a valid {_words(cls)} for this version of evernear, which does not know the "
                    f"field {field}. If a later version wrote it, upgrade evernear here, servers before pipelines."
                ) from None
            reason = printable(fault["msg"].removeprefix("Value error, "), _QUOTED_MAX_CHARACTERS)
            detail = ": ".join(filter(None, [field, reason]))
            raise IntegrityError(f"{source} is not a valid {_words(cls)}: {detail}{cls._ending(remedy)}") from None

    def save(self, path: Path) -> None:
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"Cannot read {path}: {error.strerror}{cls._ending()}") from error
        return cls.from_json(data, path)

    @classmethod
    def _ending(cls, remedy: str | None = None) -> str:
        remedy = cls.remedy if remedy is None else remedy
        return f"; {remedy}." if remedy else "."


@cache
def own_version() -> str:
    return version("evernear")


def stamp() -> dict[str, Any]:
    """The fields of a stored document with its format and the version that wrote it."""
    return {"format": FORMAT, "evernear_version": own_version()}


class Document(Frozen):
    """A value that is an object in a store, or a line of one."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    evernear_version: str = Field(default_factory=own_version)
    """The version that wrote it."""

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """Like `Frozen.from_json`. Raises `FormatError` if another version wrote the document."""
        require_format(data, source)
        return super().from_json(data, source, remedy)


def require_format(data: bytes | str, source: Path | str) -> Mapping[str, object]:
    """Compare the stamp of a JSON document from ``source`` with that of this version, and return
    its fields. A document that is no JSON object, or an empty one, is damaged.

    Raises:
        FormatError: it is of another version.
    """
    try:
        parsed: object = from_json(data)  # `json` recurses without a limit
    except ValueError:
        return {}
    if not isinstance(parsed, dict) or not parsed:
        return {}
    fields = cast("dict[str, object]", parsed)
    require_stamp(fields, source)
    return fields


def require_stamp(fields: Mapping[str, object], source: Path | str) -> None:
    """Compare the `stamp` of a document, and of the documents in it, with that of this version.

    Raises:
        FormatError: one of them is of another version.
    """
    parts = (cast("Mapping[str, object]", part) for part in fields.values() if isinstance(part, dict))
    for stamped in (fields, *(part for part in parts if isinstance(part.get("format"), int))):
        if stamped.get("format") != FORMAT:
            raise _of_another_version(stamped, source)


def _of_another_version(stamped: Mapping[str, object], source: Path | str) -> FormatError:
    number, writer = (
        printable(str(stamped.get(name) or ""), _QUOTED_MAX_CHARACTERS) for name in ("format", "evernear_version")
    )
    wrote = f"evernear {writer}" if writer else "an evernear that recorded no version"
    return FormatError(
        f"{source} is of another version of evernear and was not changed: {wrote} wrote it in "
        f"{f'format {number}' if number else 'a format without a number'}, while evernear {own_version()} here reads "
        f"format {FORMAT}; use the version that wrote it, or choose another --workdir or store, which draws the splits "
        "again, so that test images of the old champion count as seen."
    )


def _words(cls: type[Frozen]) -> str:
    """``ReleaseManifest`` is "release manifest"."""
    return " ".join(re.findall(r"[A-Z][a-z0-9]*", cls.__name__)).lower()
