"""The arguments of a run, from this process's own settings and from what a person types."""

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN
from evernear.kubeflow.client import arguments_for, parameters_of
from evernear.kubeflow.publish import fill_defaults
from evernear.kubeflow.runs import combine, for_pipeline, from_settings, from_words, split_words
from evernear.settings import load, of_run
from tests import ROOT

IMAGE = "registry.example/evernear-serve@sha256:" + 64 * "a"


def uploaded(**pinned: Any) -> Any:
    """The newest version as KFP describes it, with the defaults that the upload pinned."""
    compiled = fill_defaults((GOLDEN / "continuous_training.yaml").read_bytes(), pinned)
    return SimpleNamespace(pipeline_spec=next(yaml.load_all(compiled, yaml.CSafeLoader)))


def deployed_settings() -> dict[str, str]:
    """The environment of the bot and the watcher, as ``deploy/`` ships it."""
    lines = (ROOT / "deploy" / "base" / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_shipped_bot_and_watcher_start_deployable_runs() -> None:
    version = uploaded(serving_image=IMAGE, settings={"kubernetes": {"replicas_min": 3}, "gate": {"significance": 0.2}})
    parameters = from_settings(load(environment=deployed_settings()), parameters_of(version))
    assert parameters["settings"] == {
        "kubernetes": {"namespace": "evernear", "query_secret": "evernear-s3-queries", "token_secret": "evernear-token"}
    }, "what is not set is not sent"
    arguments = arguments_for(version, combine(parameters, from_words(["train.epochs=3"], parameters_of(version))))
    assert "serving_image" not in arguments

    defaults = {parameter.name: parameter.default for parameter in parameters_of(version)} | arguments
    names = ("preset", "source", "target", "serving_image", "store")
    chosen = of_run(defaults["settings"], **{name: defaults[name] for name in names})
    assert (chosen.kubernetes.image, chosen.kubernetes.replicas_min) == (IMAGE, 3)
    assert (chosen.kubernetes.token_secret, chosen.gate.significance) == ("evernear-token", 0.2)
    assert (chosen.data.source, chosen.store, chosen.target) == ("s3://evernear-images", "s3://evernear", "kubernetes")
    assert chosen.train.epochs == 3


def test_setting_can_be_given_by_name_or_parameter() -> None:
    known = parameters_of(uploaded())
    assert from_words(["data.source=s3://x"], known) == from_words(["source=s3://x"], known) == {"source": "s3://x"}
    assert from_words([f"kubernetes.image={IMAGE}"], known) == {"serving_image": IMAGE}
    once = {"reread": True, "moved_from": "s3://old", "classes": {"retired": ["cat"]}}
    words = ["reread=true", "moved_from=s3://old", 'classes.retired=["cat"]']
    assert from_words(words, known) == {"settings": once}
    assert from_words(["train.epochs=3", "train.width=8", 'settings={"gate": {"significance": 0.2}}'], known) == {
        "settings": {"train": {"epochs": 3, "width": 8}, "gate": {"significance": 0.2}}
    }


@pytest.mark.parametrize("pipeline", ["promote", "rollback"])
def test_serving_image_is_a_setting_of_what_moves_the_champion(pipeline: str) -> None:
    known = parameters_of(
        SimpleNamespace(pipeline_spec=next(yaml.safe_load_all((GOLDEN / f"{pipeline}.yaml").read_text())))
    )
    expected = {"kubernetes": {"image": IMAGE}}
    for word in ("serving_image", "kubernetes.image"):
        assert from_words([f"{word}={IMAGE}"], known) == {"settings": expected}
    assert from_settings(load(environment={"EVERNEAR_KUBERNETES__IMAGE": IMAGE}), known)["settings"] == expected
    pinned = {"serving_image": IMAGE, "source": "s3://images", "settings": {"kubernetes": {"replicas_min": 3}}}
    assert for_pipeline(pinned, known) == {"settings": {"kubernetes": {"replicas_min": 3, "image": IMAGE}}}
    with pytest.raises(SettingsError, match="source"):
        from_words(["source=s3://images"], known)


def test_memory_that_no_release_can_run_with_is_refused_before_the_run() -> None:
    known = parameters_of(uploaded())
    with pytest.raises(SettingsError, match=r"^Invalid setting kubernetes\.memory = 1Gi: a pod needs 2048Mi or more"):
        from_words(["kubernetes.memory=1Gi"], known)
    with pytest.raises(SettingsError, match=r"kubernetes\.memory = 2Gi: a pod needs 3072Mi or more"):
        from_words(["kubernetes.memory=2Gi", "serving.workers=2"], known)
    chosen = {"kubernetes": {"memory": "4Gi"}, "serving": {"workers": 2}}
    assert from_words(["kubernetes.memory=4Gi", "serving.workers=2"], known) == {"settings": chosen}


def test_settings_are_validated_together_over_the_defaults_of_the_pipeline() -> None:
    known = parameters_of(uploaded())
    assert from_words(["kubernetes.replicas_min=1", "kubernetes.replicas_max=1"], known) == {
        "settings": {"kubernetes": {"replicas_min": 1, "replicas_max": 1}}
    }
    assert from_words(["preset=best", "train.members=3"], known)["settings"] == {"train": {"members": 3}}
    with pytest.raises(SettingsError, match="replicas_max is less than replicas_min, 2"):
        from_words(["kubernetes.replicas_max=1"], known)
    single = {"kubernetes": {"replicas_min": 1}}
    pinned = [p.model_copy(update={"default": single}) if p.name == "settings" else p for p in known]
    assert from_words(["kubernetes.replicas_max=1"], pinned) == {"settings": {"kubernetes": {"replicas_max": 1}}}
    assert single == {"kubernetes": {"replicas_min": 1}}, "the defaults are not changed"


@pytest.mark.parametrize(
    "word",
    [
        *("source=s3://ada:hunter2@bucket", "store=s3://ada:hunter2/2@bucket", "data.source=s3://ada:hunter2@bucket"),
        *('settings={"index": {"uri": "http://a:hunter2@host:1"}}', "train.weights=s3://b/w?X-Amz-Signature=hunter2"),
    ],
)
def test_secret_in_an_argument_is_refused(word: str) -> None:
    """Kubeflow Pipelines shows the arguments of a run, and stores them."""
    with pytest.raises(SettingsError, match="contains a secret") as caught:
        from_words([word], parameters_of(uploaded()))
    assert "hunter2" not in str(caught.value)


def test_pipeline_of_another_version_is_named() -> None:
    older = [parameter for parameter in parameters_of(uploaded()) if parameter.name != "settings"]
    with pytest.raises(SettingsError, match="another version of evernear uploaded it; upload it again"):
        from_words(["train.epochs=3"], older)


def test_words_are_split_like_in_a_shell_with_curly_quotes() -> None:
    assert split_words("a=1 b=\u201cx y\u201d") == ["a=1", "b=x y"]
    with pytest.raises(SettingsError, match="a quote in it is not closed"):
        split_words("a='x")
