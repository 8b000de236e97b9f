"""The Katib Experiment runs ``evernear trial`` with the parameters of the search space."""

import re

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.integrations.tuning.space import load_space
from pipelines.tune import METRIC, main
from tests.loopback.kubernetes import webhooks
from tests.loopback.kubernetes.users import config_errors, injected

IMAGE = "registry.example/evernear-train@sha256:" + "0" * 64
METRIC_LINE = re.compile(r"([\w|-]+)\s*=\s*([+-]?\d*(\.\d+)?([Ee][+-]?\d+)?)")
"""The format that Katib's collector reads unless an experiment names another one."""


def experiment(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["--image", IMAGE, "--source", "s3://images", *arguments]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_every_parameter_of_the_space_reaches_the_trial(capsys: pytest.CaptureFixture[str]) -> None:
    spec = experiment(capsys)["spec"]
    template = spec["trialTemplate"]
    names = [parameter["name"] for parameter in spec["parameters"]]
    assert names == list(load_space().parameters)
    assert [parameter["reference"] for parameter in template["trialParameters"]] == names
    declared = {parameter["name"] for parameter in template["trialParameters"]}
    command = template["trialSpec"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert set(re.findall(r"\$\{trialParameters\.([^}]*)\}", " ".join(command))) == declared
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", name) for name in declared)


def test_feasible_values_are_text_with_their_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    by_name = {parameter["name"]: parameter for parameter in experiment(capsys)["spec"]["parameters"]}
    rate, batch = by_name["train.learning_rate"], by_name["train.batch_size"]
    assert rate["parameterType"] == "double"
    assert rate["feasibleSpace"] == {"min": "0.001", "max": "0.05", "distribution": "logUniform"}
    assert batch == {
        "name": "train.batch_size",
        "parameterType": "categorical",
        "feasibleSpace": {"list": ["128", "256", "512"]},
    }


@pytest.mark.slow
def test_a_trial_prints_the_metric_that_katib_reads(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = experiment(capsys, "--store", tmp_path.as_uri(), "--set", "train.epochs=2", "--set", "train.min_steps=40")[
        "spec"
    ]
    command = spec["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"][0]["command"]
    lowest = {p["name"].replace(".", "-").replace("_", "-"): p["feasibleSpace"] for p in spec["parameters"]}

    def value(match: re.Match[str]) -> str:
        feasible = lowest[match[1]]
        return feasible["max"] if "max" in feasible else feasible["list"][0]

    arguments = [re.sub(r"\$\{trialParameters\.([^}]*)\}", value, word) for word in command[1:]]
    arguments[arguments.index("s3://images")] = "digits"
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = {name: float(number) for name, number, *_ in METRIC_LINE.findall(result.stdout) if number}
    assert list(metrics) == [METRIC]
    assert 0.3 < metrics[METRIC] <= 1


def test_pods_have_few_privileges_and_read_the_keys_from_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    pod = experiment(capsys, "--s3-secret", "keys")["spec"]["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    collector = "ghcr.io/kubeflow/katib/file-metrics-collector"
    assert config_errors(injected(pod, "metrics-logger-and-collector", collector)) == {}
    assert not pod["automountServiceAccountToken"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_katib_accepts_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--trials", "1"], ["--trials", "3", "--parallel", "8"]):
        manifest = experiment(capsys, *arguments)
        assert webhooks.experiment(manifest) == []
        job = manifest["spec"]["trialTemplate"]["trialSpec"] | {"metadata": {"name": "trial"}}
        kubernetes_validate.validate(job, "1.34", strict=True)


def test_trials_have_no_service_links_and_their_service_has_another_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = experiment(capsys)
    assert not manifest["metadata"]["generateName"].startswith("evernear")
    assert manifest["spec"]["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("option", ["--trials", "--parallel"])
def test_a_number_of_trials_is_positive(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["--image", IMAGE, "--source", "mnist", option, "0"]) == 2
    assert capsys.readouterr().err == f"{option} 0 is not positive; use 1 or more.\n"


def test_an_image_without_a_digest_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--image", "evernear-train:latest", "--source", "mnist"]) == 2
    assert "has no digest; use REF@sha256:..." in capsys.readouterr().err
