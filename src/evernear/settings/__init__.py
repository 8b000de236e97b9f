"""All settings of evernear: frozen pydantic models, one per section.

Each source overrides those before it:

1. the defaults
2. ``--preset``
3. the working directory's ``evernear.toml`` (`evernear.settings.layers`)
4. ``--config FILE`` (TOML)
5. the environment (``EVERNEAR_TRAIN__EPOCHS=3``)
6. ``--set train.epochs=3``

The error for an unknown key suggests the most similar known one. Secrets are not settings: S3 keys
come from the sources of `evernear.common.store.credentials`, a remote server's token from
``EVERNEAR_TOKEN`` or the file ``EVERNEAR_TOKEN_FILE``.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from evernear.errors import SettingsError
from evernear.settings import sources
from evernear.settings.data import MAX_SIZE_PX, ClassSettings, DataSettings, absolute_source
from evernear.settings.evaluation import EvaluationSettings, GateSettings
from evernear.settings.index import IndexSettings
from evernear.settings.kubernetes import CostSettings, KubernetesSettings, PipelineSettings
from evernear.settings.layers import DEFAULT_WORKDIR, PRESET, Layers, read_layers
from evernear.settings.section import LocalPath, Section
from evernear.settings.serving import PrepSettings, ServingSettings
from evernear.settings.sources import Tree, merge, parse
from evernear.settings.train import TrainSettings
from evernear.settings.triggers import ConsoleSettings, PermissionSettings, SlackSettings, WatchSettings
from evernear.settings.validation import ValidationSettings

PRETRAINED_SIZE_PX = 256
"""Automatic size of the shorter side of photographs for a pretrained backbone, as in most
pretraining, whose center crop of 7/8 then has the 224 pixels that the backbone sees."""
PARAMETERS = {"source": "data.source", "serving_image": "kubernetes.image", "target": "target", "store": "store"}
"""The settings that are separate pipeline parameters, keyed by parameter."""


class RunSettings(Section):
    """The settings of pipeline runs and their releases."""

    workdir: LocalPath = Field(
        default=DEFAULT_WORKDIR,
        description="Directory of runs and logs, and of the store unless ``store`` is set.",
    )
    store: str = Field(default="", description="file:///path or s3://bucket/prefix; if empty, WORKDIR/store.")
    target: Literal["local", "registry", "kubernetes"] = Field(
        default="local",
        description="Where a promoted release goes: TorchServe on this machine, the registry only, "
        "or a Deployment in a cluster.",
    )
    data: DataSettings = DataSettings()
    validation: ValidationSettings = ValidationSettings()
    train: TrainSettings = TrainSettings()
    index: IndexSettings = IndexSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    gate: GateSettings = GateSettings()
    serving: ServingSettings = ServingSettings()
    prep: PrepSettings = PrepSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    cost: CostSettings = CostSettings()

    @model_validator(mode="after")
    def _timed(self) -> Self:
        train = self.train
        if train.minutes is None:
            return self
        given = f"train.minutes is {train.minutes:g}"
        if train.frozen:
            raise ValueError(f"{given}, but train.frozen trains nothing; set train.frozen=false or train.minutes=null")
        for name in ("nodes", "processes"):
            if (count := getattr(train, name)) > 1:
                raise ValueError(
                    f"{given}, but time limits training with one of train.{name}, not {count}; set train.epochs "
                    f"instead of train.minutes, or train.{name}=1"
                )
        return self

    @property
    def store_uri(self) -> str:
        """As an absolute URI."""
        return self.store or (self.workdir.resolve() / "store").as_uri()

    @property
    def max_size_px(self) -> int:
        """Limit of the size of the dataset's images, unless ``data.size_px`` is set."""
        return PRETRAINED_SIZE_PX if self.train.weights else MAX_SIZE_PX


class OneRun(RunSettings):
    """The settings of a run, and what is true of this run alone: flags of `evernear run`. Kubeflow
    Pipelines passes them as JSON."""

    classes: ClassSettings = ClassSettings()
    reread: bool = Field(
        default=False,
        description="Read all files again and compare their contents, as --checksum of rsync does, instead of trusting "
        "sizes, times and ETags.",
    )
    moved_from: Annotated[str, AfterValidator(absolute_source)] = Field(
        default="",
        description="The earlier location of the source, as data.source named it, if its images have moved. Images "
        "that are gone since are removed, and new labels count.",
    )


class Settings(RunSettings):
    """The settings of a run, the console, the Kubeflow Pipelines server and the triggers."""

    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Log of the preprocessing server, the Slack bot and the watcher. As JSON, one object per line, the "
        "preprocessing server also logs every prediction.",
    )
    keep_runs: int = Field(
        default=20,
        ge=1,
        description="Newest local runs whose directories, with the artifacts of all steps, stay in ``WORKDIR/runs``. "
        "Releases, run pages and run records stay in the store.",
    )
    permissions: PermissionSettings = PermissionSettings()
    console: ConsoleSettings = ConsoleSettings()
    pipeline: PipelineSettings = PipelineSettings()
    slack: SlackSettings = SlackSettings()
    watch: WatchSettings = WatchSettings()


def load_layers(
    *,
    preset: str | None = None,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    remembered: bool = True,
) -> Layers[Settings]:
    """Read the settings from all sources, the working directory's file only if ``remembered``.

    ``overrides`` are ``section.key=value`` strings.

    Raises:
        SettingsError: a key is unknown, a value is invalid, or a file cannot be read.
    """
    assigned = sources.assignments(Settings, overrides) | ({} if preset is None else {PRESET: preset})
    variables = os.environ if environment is None else environment
    return read_layers(Settings, config, variables, assigned, remembered=remembered)


def load(**sources_of_layers: Any) -> Settings:
    """The combined settings of `load_layers`."""
    return load_layers(**sources_of_layers).settings()


def of_run(overrides: Mapping[str, Any], *, preset: str = "", **parameters: str) -> OneRun:
    """The settings of one pipeline run: the defaults, ``preset``, ``overrides``, ``parameters``.

    ``overrides`` is a tree such as ``{"train": {"epochs": 3}}``. ``parameters`` are keyed by
    `PARAMETERS`. An empty one is ignored, one that contradicts ``overrides`` a `SettingsError`.
    """
    tree = sources.preset(OneRun, preset) if preset else {}
    merge(tree, overrides)
    for name, value in parameters.items():
        if not value:
            continue
        section, _, key = PARAMETERS[name].rpartition(".")
        override = (overrides.get(section, {}) if section else overrides).get(key, value)
        if override != value:
            raise SettingsError(
                f"{PARAMETERS[name]} is set twice, to {value!r} by the parameter {name} and to {override!r} in "
                "settings; remove one of them."
            )
        merge(tree, {section: {key: value}} if section else {key: value})
    return parse(OneRun, tree)


def overrides_from(words: Iterable[str]) -> Tree:
    """Parse ``section.key=value`` strings into a tree for `of_run`."""
    return sources.assignments(OneRun, words)
