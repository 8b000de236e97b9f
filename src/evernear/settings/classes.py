from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from evernear.common.text import class_name
from evernear.settings.section import Section

ClassName = Annotated[str, AfterValidator(class_name)]


class ClassSettings(Section):
    """Champion classes that were removed or renamed on purpose. Entries for other classes are
    ignored."""

    retired: tuple[ClassName, ...] = Field(
        default=(), description="Classes that new releases no longer need to recognize."
    )
    renamed: dict[ClassName, ClassName] = Field(default={}, description="New name of each renamed class.")

    @field_validator("renamed")
    @classmethod
    def _without_spellings(cls, renamed: dict[str, str]) -> dict[str, str]:
        """Drop entries whose names are spellings of one class (`evernear.common.text`)."""
        return {old: new for old, new in renamed.items() if old != new}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := sorted({*self.retired} & {*self.renamed, *self.renamed.values()}):
            raise ValueError(f"{both[0]!r} is both retired and renamed")
        if chained := sorted({*self.renamed} & {*self.renamed.values()}):
            raise ValueError(f"{chained[0]!r} is both the old and the new name of a class")
        return self

    def current(self, label: str) -> str | None:
        """The current name of a champion class in any spelling, or None if it was retired."""
        name = class_name(label)
        return None if name in self.retired else self.renamed.get(name, name)

    def current_labels(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Without retired classes and duplicates."""
        return tuple(dict.fromkeys(name for name in map(self.current, labels) if name is not None))

    @property
    def former_names(self) -> tuple[str, ...]:
        return (*self.retired, *self.renamed)
