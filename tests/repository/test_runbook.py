"""docs/runbook.md explains every alert and every error."""

from collections.abc import Iterator

import yaml

from evernear.errors import EvernearError
from tests import ROOT

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
ALERTS = yaml.safe_load((ROOT / "deploy/components/monitoring/alerts.yaml").read_text())


def table(header: str) -> list[list[str]]:
    """Cells of the table whose header row starts with ``header``."""
    rows = RUNBOOK.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def classes(base: type[EvernearError] = EvernearError) -> Iterator[type[EvernearError]]:
    if base.__module__ == EvernearError.__module__:
        yield base
    for derived in base.__subclasses__():
        yield from classes(derived)


def test_every_error_class_has_its_exit_code_meaning_and_remedy() -> None:
    rows = table("exit code | class")
    documented = {(int(code), name.strip("`")) for code, name, *_ in rows}
    assert documented == {(each.exit_code, each.__name__) for each in classes()}
    assert all(len(row) == 4 and all(row) for row in rows)


def test_every_alert_has_its_severity_meaning_and_remedy() -> None:
    rules = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
    rows = table("alert | severity")
    assert {(name.strip("`"), severity) for name, severity, *_ in rows} == {
        (rule["alert"], rule["labels"]["severity"]) for rule in rules
    }
    assert all(len(row) == 4 and all(row) for row in rows)
