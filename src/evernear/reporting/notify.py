"""The outcome of a run: promoted, held, rolled back, predicted, stopped or failed. The exit step
derives it from the run's record in the store (`evernear.common.run_record`)."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from evernear.common.frozen import Document
from evernear.common.output import quantity
from evernear.common.progress import RunCommand
from evernear.common.run_record import EXIT_STEP, OUTCOME, RunRecord, StepRecord, StopRecord
from evernear.common.store import Store
from evernear.evaluation.headline import headline
from evernear.evaluation.verdict import Rule
from evernear.release.promotions import CHAMPION_ALONE

SUCCEEDED = ("SUCCEEDED", "COMPLETE")
"""The state of a task group in which all tasks succeeded, from kfp's local runner and from the KFP
server."""
STOPPED = ("CANCELED", "CANCELING")
NO_ERROR = (
    "The run ended early, and no step recorded an error: "
    "it was stopped in Kubeflow Pipelines, or one of its pods could not start. "
    "The run's page there shows which."
)
"""The last step cannot ask Kubeflow Pipelines, which tells it that a stopped run is RUNNING."""
FEW_EPOCHS = 10
_RULES_OF_DATA = {"same_test_set", "test_images_unseen", "classes_kept"}
"""Rules that fail because of the data, however long the network is trained."""
CONFUSION_MATRIX = "confusion.png"
"""The image in a run's record that shows the candidate's confusion matrix in Slack."""
SHARED_OPTIONS = ("--workdir", "--config", "--set")
"""Options of a run that suggested commands repeat, ``--set`` only for `_SHARED_SETTINGS`."""
_SHARED_SETTINGS = ("store", "target", "index.uri", "serving.", "prep.", "kubernetes.")
"""Settings that locate releases and servers."""


Place = Literal["terminal", "run page", "console"]


class NextStep(NamedTuple):
    purpose: str
    command: str


class RunOutcome(Document):
    run: str
    pipeline: str = ""
    state: Literal["promoted", "held", "rolled back", "predicted", "stopped", "failed"]
    release: str | None = None
    """The release that the run deployed, if any."""
    url: str | None = None
    """Where the release is live, or None if the run's target is only the registry."""
    candidate: str | None = None
    """The release that the run archived, whether deployed or held, if any."""
    step: str = ""
    reasons: tuple[str, ...] = ()
    caution: str = ""
    """See `Verdict.caution`."""
    metrics: dict[str, float] = {}
    gate_settings: tuple[str, ...] = ()
    """``key=value`` settings with which the gate would have promoted a held candidate, if any."""
    few_epochs: int = 0
    """The ``train.epochs`` of a held run if that is less than `FEW_EPOCHS`, and if longer training
    may pass the rules that failed."""
    command: tuple[str, ...] = ()
    """The arguments of an ``evernear`` command that repeats the run on this machine. Empty for a
    run on KFP."""
    served_here: bool = False
    """Whether the release is live in the TorchServe process of the run's machine and working
    directory."""

    def without_reasons(self) -> str:
        """The outcome, without the reasons of a held run."""
        return (
            f"held: release {self.candidate} is not promoted{self._measured()}"
            if self.state == "held"
            else self.summary()
        )

    def summary(self) -> str:
        reasons = " ".join(self.reasons)
        match self.state:
            case "promoted":
                caution = f". WARNING: {self.caution}" if self.caution else ""
                return f"promoted: release {self.release} {self.release_state()}{self._measured()}{caution}"
            case "held":
                return f"held: {reasons.removesuffix('.')}{self._measured()}."
            case "rolled back":
                return f"rolled back: release {self.release} {self.release_state(' again')}. {reasons}".strip()
            case "predicted":
                return f"predicted: {reasons}"
            case "stopped":
                return f"stopped {reasons}" + self._live_despite_failure()
            case "failed":
                where = f" at {self.step}" if self.step else ""
                return f"failed{where}: {reasons}" + self._live_despite_failure()

    def _measured(self) -> str:
        text = headline(self.metrics)
        return f". {text.capitalize()}" if text else ""

    def next_steps(self, place: Place = "terminal") -> tuple[NextStep, ...]:
        """Suggested actions after the run, most likely first. Empty if there is nothing to suggest,
        for example if the run only moved the champion. The ``place`` that shows them does not
        suggest itself."""
        in_browser = "recognize images, and mend labels, in the browser"
        console = (NextStep(in_browser, self._command("console")),) if self.command and place != "console" else ()
        if self.state == "held" and self.candidate:
            return (*self._next_steps_after_hold(self.candidate, place), *console)
        if self.state == "promoted" and self.candidate:
            inspect = self._command("inspect", "run", self.candidate, "--image", "IMAGE")
            predict = f"{self._command('predict')} IMAGE"
            return (
                NextStep("recognize an image", predict if self.served_here else inspect),
                NextStep("undo it", self._command("registry", "rollback", "--why", "REASON")),
                *console,
            )
        if self.state in ("stopped", "failed") and (self.command or self.pipeline):
            return (NextStep("run again", self._same_command()),)
        return ()

    def _next_steps_after_hold(self, candidate: str, place: Place) -> Iterator[NextStep]:
        """What makes a better model, then what looks at this one, last what ignores the gate."""
        if self.command and self.few_epochs:
            words = _without("--preset", self.command)
            longer = shlex.join(["evernear", *words, "--preset", "default", "--set", "train.epochs=null"])
            yield NextStep(f"train longer than {quantity(self.few_epochs, 'epoch')}, with the default preset", longer)
        if self.command and place != "run page":
            yield NextStep("look at its worst mistakes", self._command("report", "--open"))
        if self.command:
            yield NextStep("look for wrong labels", self._command("labels", "check"))
        if self.command or self.pipeline:
            yield NextStep("add images, most of all of what it confuses, and run again", self._same_command())
        inspect = self._command("inspect", "run", candidate, "--image", "IMAGE")
        yield NextStep("recognize images without promoting it", inspect)
        force = self._command("registry", "promote", candidate, "--force", "--why", "REASON")
        yield NextStep("promote it anyway, although nothing shows that its answers are good enough", force)

    def _same_command(self, *options: str) -> str:
        return shlex.join(["evernear", *(self.command or ("pipeline", "run", self.pipeline)), *options])

    def _command(self, *words: str) -> str:
        """A command that uses the run's store, with the run's options that locate it."""
        shared: list[str] = []
        for word, following in zip(self.command, (*self.command[1:], ""), strict=False):
            option, equals, value = word.partition("=")
            if option in SHARED_OPTIONS and (
                option != "--set" or (value if equals else following).startswith(_SHARED_SETTINGS)
            ):
                shared += [word] if equals else [word, following]
        return shlex.join(["evernear", *words, *shared])

    def release_state(self, suffix: str = "") -> str:
        """The current state of the release that the run deployed, as in "is live"."""
        return f"is live{suffix}" if self.url else CHAMPION_ALONE

    def _live_despite_failure(self) -> str:
        return f" Nevertheless, release {self.release} {self.release_state()}." if self.release else ""


def _without(option: str, words: Sequence[str]) -> list[str]:
    """``words`` of a command without an option and its value."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if option not in (before, word) and not word.startswith(f"{option}=")
    ]


def load_outcome(store: Store, run: str) -> RunOutcome | None:
    """None before `finalize` is called for this run."""
    return RunRecord(store, run).find(OUTCOME, RunOutcome)


def load_rules(store: Store, run: str) -> tuple[Rule, ...]:
    """The rules in the run's verdict. Empty if the gate has not decided yet."""
    return tuple(Rule.model_validate(rule) for rule in RunRecord(store, run).load("verdict").get("rules", ()))


def command_to_repeat(record: RunRecord) -> tuple[str, ...]:
    """The arguments of the ``evernear`` command that repeats this run. After the validate step, the
    working directory remembers the settings of the run."""
    command = RunCommand.of_environment()
    is_validated = any(each.step == "validate" and each.state == "finished" for each in record.steps())
    return command.later if is_validated else command.typed


def finalize(
    record: RunRecord, pipeline: str, state: str, error_message: str, command: tuple[str, ...] = ()
) -> RunOutcome:
    """Derive the outcome of a run, and store it in the run's record.

    ``state`` is the run's state according to KFP (COMPLETE, FAILED, RUNNING ...).
    ``error_message``, also KFP's, is usually empty. The KFP server does not count the skipped
    deployment of a held run: it reports RUNNING, or FAILED if a step was retried. It also reports a
    stopped run as RUNNING. Therefore the records of the steps determine what happened.
    """
    verdict = record.load("verdict")
    rollback, promotion, deployment = (record.load(name) for name in ("rollback", "promotion", "deployment"))
    deployed = rollback or promotion or deployment
    candidate = record.load("archived").get("version")
    outcome = RunOutcome(
        run=record.run,
        pipeline=pipeline,
        state="failed",
        candidate=candidate,
        metrics=record.load("metrics"),
        command=command,
    )
    is_held = candidate is not None and verdict.get("promote") is False
    if state not in SUCCEEDED and not is_held:
        fields = _failure(record, state, error_message) | {"release": deployed.get("version")}
    elif rollback:
        fields = {"state": "rolled back", "release": rollback["version"], "reasons": _reasons(rollback)}
    elif promotion:
        fields = {"state": "promoted", "release": promotion["version"], "reasons": _reasons(promotion)}
    elif predictions := record.load("predictions"):
        fields = {"state": "predicted", "reasons": (predictions["summary"],)}
    elif verdict.get("promote") and deployment:
        fields = {
            "state": "promoted",
            "release": deployment["version"],
            "reasons": tuple(verdict["reasons"]),
            "caution": verdict.get("caution", ""),
        }
    elif verdict.get("promote"):
        fields = {"reasons": ("The gate promoted the candidate, but it was not deployed.",)}
    else:
        fields = {
            "state": "held",
            "reasons": tuple(verdict.get("reasons", ())),
            "gate_settings": _settings_of(verdict.get("rules", ())),
            "few_epochs": _few_epochs(record) if pipeline != "reindex" else 0,
        }
    url = deployed.get("url")
    served_here = bool(url and command) and record.load("settings").get("target") == "local"
    outcome = outcome.model_copy(update={**fields, "url": url, "served_here": served_here})
    record.save(**{OUTCOME: outcome.model_dump(mode="json")})
    return outcome


def _reasons(move: dict[str, Any]) -> tuple[str, ...]:
    return (move["why"],) if move["why"] else ()


def _settings_of(rules: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """The settings with which the failed rules would pass, or an empty tuple if one of them has
    none."""
    settings = tuple(str(rule.get("setting", "")) for rule in rules if not rule["passed"])
    return settings if all(settings) else ()


def _few_epochs(record: RunRecord) -> int:
    failed = {rule["name"] for rule in record.load("verdict").get("rules", ()) if not rule["passed"]}
    if failed and failed <= _RULES_OF_DATA:
        return 0
    epochs = record.load("settings").get("train", {}).get("epochs") or 0
    return epochs if epochs < FEW_EPOCHS else 0


def _failure(record: RunRecord, state: str, error_message: str) -> dict[str, object]:
    if stop := record.find("stop", StopRecord):
        return {"state": "stopped", "reasons": (f"by {stop.by}.",)}
    unfinished = [step for step in record.steps() if step.step != EXIT_STEP and step.state != "finished"]
    if unfinished:
        unfinished.sort(key=lambda step: step.state != "failed")  # recorded errors first
        (step, message), *others = map(_error_of, unfinished)
        return {"step": step, "reasons": (message, *(f"{name}: {error}" for name, error in others))}
    if state in STOPPED:
        return {"state": "stopped", "reasons": ("in Kubeflow Pipelines.",)}
    return {"reasons": (error_message or NO_ERROR,)}


def _error_of(step: StepRecord) -> tuple[str, str]:
    if step.state == "failed":
        return step.step, step.message
    ending = "The step ended without recording an error: it was stopped, evicted or out of memory."
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        limit = "train_memory" if step.step in ("train", "probe") else "task_memory"
        ending += f" `evernear pipeline upload --set pipeline.{limit}=...` raises its memory limit."
    return step.step, ending
