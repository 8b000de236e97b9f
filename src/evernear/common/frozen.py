"""The base class for all values that evernear stores or passes between steps."""

import re
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from evernear.common.disk import write_atomically
from evernear.common.output import printable
from evernear.errors import IntegrityError

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
            if any(each["loc"][-1:] == ("format",) for each in faults):
                raise IntegrityError(
                    f"{source} is a {_words(cls)} in the format of another version of evernear. Until 1.0, a changed "
                    "format needs a new store: choose another --workdir or store, or use the version that wrote it."
                ) from None
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


def _words(cls: type[Frozen]) -> str:
    """``ReleaseManifest`` is "release manifest"."""
    return " ".join(re.findall(r"[A-Z][a-z0-9]*", cls.__name__)).lower()
