"""A parser for Dockerfiles: stages and their instructions, with build arguments substituted."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests import ROOT

FILES = ("Dockerfile.serve", "Dockerfile.train")


@dataclass
class Stage:
    """A build stage: its instructions, such as (``RUN``, "..."), and the variables that they
    see."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def all(self, word: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == word]


def stages(file: str, **arguments: str) -> dict[str, Stage]:
    """Stages of ``file`` by name, built with ``--build-arg`` values; the last, unnamed stage has
    the name ``""``."""
    known: dict[str, str] = {}
    by_name: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, text in _instructions((ROOT / file).read_text()):
        if word == "FROM":
            base, _, name = _fill(text, known).partition(" AS ")
            stage = Stage(name, base)
            if base in by_name:
                stage.variables |= by_name[base].variables
            by_name[name] = stage
        elif word == "ARG":
            for declared in text.split():
                name, _, default = declared.partition("=")
                value = arguments.get(name, default or known.get(name, ""))
                (known if stage is None else stage.variables)[name] = value
        else:
            assert stage is not None
            if word == "ENV":
                stage.variables |= dict(re.findall(r"(\w+)=(\S+)", text))
            stage.instructions.append((word, text))
    return by_name


def ancestry(file: str, last: str, **arguments: str) -> list[Stage]:
    """The stage ``last`` and the stages that it is based on, base first."""
    by_name = stages(file, **arguments)
    chain = [by_name[last]]
    while chain[0].base in by_name:
        chain.insert(0, by_name[chain[0].base])
    return chain


def sources(file: str, last: str, **arguments: str) -> dict[str, Stage]:
    """The stages that ``last`` is made from: those that it is based on, copies from or mounts."""
    by_name = stages(file, **arguments)
    used: dict[str, Stage] = {}
    names = [last]
    while names:
        if (name := names.pop()) in by_name and name not in used:
            stage = used[name] = by_name[name]
            names += [stage.base, *re.findall(r"(?<=from=)[\w-]+", " ".join(text for _, text in stage.instructions))]
    return used


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for joined in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if joined.strip():
            word, _, rest = joined.strip().partition(" ")
            yield word, re.sub(r" {2,}", " ", rest.strip())


def _fill(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with ``${NAME}``, and ``${NAME%%,*}`` for what comes before the first comma."""

    def value(match: re.Match[str]) -> str:
        return variables[match[1]].partition(",")[0] if match[2] else variables[match[1]]

    return re.sub(r"\$\{(\w+)(%%,\*)?\}", value, text)
