"""A study on one machine, in which Optuna chooses each trial's settings from earlier results.

It is a journal file in the study directory. A killed study continues with its next trial.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import optuna
import tomlkit
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from evernear.common.disk import sha256_bytes, write_atomically
from evernear.common.frozen import Frozen
from evernear.data.shards import Dataset
from evernear.errors import SettingsError, TrainingError
from evernear.evaluation.statistics import Proportion
from evernear.integrations.tuning.space import Parameter, Range, SearchSpace
from evernear.integrations.tuning.trial import measure_trial
from evernear.settings import RunSettings, merge, of_run

JOURNAL_FILE = "study.log"
BEST_FILE = "best.toml"
Report = Callable[[str], None]


class StudyResult(Frozen):
    trials: int
    """Trials with a result, except that with the unchanged settings."""
    failed: int
    """Trials in which training failed."""
    baseline: Proportion
    """Accuracy with the unchanged settings on the query split."""
    best: Proportion
    settings: dict[str, int | float | str]
    """The best trial's, by name. Empty if none was better than the unchanged settings."""


def run_study(
    dataset: Dataset, settings: RunSettings, space: SearchSpace, trials: int, directory: Path, report: Report
) -> StudyResult:
    """Run trials until ``directory`` contains ``trials``, and write the best to `BEST_FILE`. The
    unchanged settings are trial 0. A ``directory`` with another study is a `SettingsError`."""
    directory.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(directory / JOURNAL_FILE)))
    study = optuna.create_study(storage=storage, study_name="evernear", direction="maximize", load_if_exists=True)
    _require_same(study, identity(dataset, settings, space), directory)

    while _baseline(study) is None or len(_finished(study)) <= trials:
        # With the same seed, a continued study would repeat its earlier random choices.
        study.sampler = optuna.samplers.TPESampler(seed=settings.train.seed + len(study.trials))
        _run_trial(study, dataset, settings, space, directory, report)
    return _conclude(study, directory)


def _run_trial(
    study: optuna.Study, dataset: Dataset, settings: RunSettings, space: SearchSpace, directory: Path, report: Report
) -> None:
    trial, is_first = study.ask(), _baseline(study) is None
    changes = {} if is_first else suggest(trial, space)
    name = f"trial {trial.number}"
    report(f"{name}: " + (", ".join(f"{key}={value}" for key, value in changes.items()) or "unchanged settings"))
    try:
        with TemporaryDirectory(dir=directory, prefix="trial-") as work:
            chosen = with_changes(settings, changes)
            accuracy = measure_trial(dataset, chosen, Path(work), lambda text: report(f"{name}: {text}"))
    except TrainingError as error:
        if is_first:
            raise
        study.tell(trial, state=TrialState.FAIL)
        report(f"{name}: {error}")
        return
    trial.set_user_attr("accuracy", accuracy.model_dump())
    study.tell(trial, accuracy.value)
    report(f"{name}: label right {accuracy} on the query split")


def suggest(trial: Trial, space: SearchSpace) -> dict[str, int | float | str]:
    return {name: _suggest(trial, name, parameter) for name, parameter in space.parameters.items()}


def _suggest(trial: Trial, name: str, parameter: Parameter) -> int | float | str:
    if not isinstance(parameter, Range):
        return cast("int | float | str", trial.suggest_categorical(name, parameter.choices))
    if parameter.is_whole:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


def with_changes(settings: RunSettings, changes: dict[str, int | float | str]) -> RunSettings:
    """``changes`` are keyed by name, as in ``{"train.margin": 0.2}``."""
    tree: dict[str, Any] = settings.model_dump(mode="json", include=set(RunSettings.model_fields))
    merge(tree, _tree(changes))
    return of_run(tree)


def identity(dataset: Dataset, settings: RunSettings, space: SearchSpace) -> str:
    """A hash of everything that the trials of a study have in common."""
    parts = [
        dataset.digest,
        settings.train.model_dump_json(),
        settings.index.model_dump_json(),
        space.model_dump_json(),
    ]
    return sha256_bytes("\n".join(parts).encode())


def _require_same(study: optuna.Study, expected: str, directory: Path) -> None:
    actual = study.user_attrs.setdefault("identity", expected)
    if actual != expected:
        raise SettingsError(
            f"{directory} has a study of other images, settings or parameters; choose another directory with --study."
        )
    study.set_user_attr("identity", expected)


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with an outcome. A killed process leaves some without."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))


def _baseline(study: optuna.Study) -> FrozenTrial | None:
    """The trial with the unchanged settings, or None if it has no result."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return next((trial for trial in complete if not trial.params), None)


def _conclude(study: optuna.Study, directory: Path) -> StudyResult:
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    baseline, best = _baseline(study) or complete[0], study.best_trial
    settings = tomlkit.dumps(_tree(best.params))
    write_atomically(directory / BEST_FILE, f"# The best trial of a study by `evernear tune`.\n{settings}")
    return StudyResult(
        trials=len(complete) - 1,
        failed=len(_finished(study)) - len(complete),
        baseline=Proportion(**baseline.user_attrs["accuracy"]),
        best=Proportion(**best.user_attrs["accuracy"]),
        settings=best.params,
    )


def _tree(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = value
    return tree
