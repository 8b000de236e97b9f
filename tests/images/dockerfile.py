"""A Dockerfile, as far as ours need it: its stages and their instructions, with arguments put in."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile.serve", "Dockerfile.train")


@dataclass
class Stage:
    """What follows a ``FROM``: (``RUN``, "...") and the like, and the environment that they see."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def all(self, word: str) -> list[str]:
        return [text for found, text in self.instructions if found == word]


def stages(file: str, **arguments: str) -> dict[str, Stage]:
    """The stages of ``file`` by name, built with ``--build-arg``s; the last one is also called ``""``."""
    known: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, text in _instructions((ROOT / file).read_text()):
        if word == "FROM":
            base, _, name = _fill(text, known).partition(" AS ")
            stage = Stage(name, base)
            if base in found:
                stage.variables |= found[base].variables
            found[name] = stage
        elif word == "ARG":
            name, _, default = text.partition("=")
            value = arguments.get(name, default or known.get(name, ""))
            (known if stage is None else stage.variables)[name] = value
        else:
            assert stage is not None
            if word == "ENV":
                stage.variables |= dict(re.findall(r"(\w+)=(\S+)", text))
            stage.instructions.append((word, text))
    return found


def line_of(file: str, last: str, **arguments: str) -> list[Stage]:
    """The stages that ``last`` is built on, oldest first."""
    found = stages(file, **arguments)
    line = [found[last]]
    while line[0].base in found:
        line.insert(0, found[line[0].base])
    return line


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for joined in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if joined.strip():
            word, _, rest = joined.strip().partition(" ")
            yield word, re.sub(r" {2,}", " ", rest.strip())


def _fill(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], text)
