"""Tuning in a cluster: ``python -m pipelines.tune --image REF@sha256:... --source s3://images > experiment.yaml``.

It writes a Katib Experiment, which ``kubectl create -f experiment.yaml`` starts. Each trial is a Job of the train image
that runs ``evernear trial``: it trains with the parameters of the trial and prints ``accuracy=...``, which Katib's
collector reads from its standard output. On one machine, ``evernear tune`` searches the same space with Optuna. In both
cases the best parameters become the settings of a normal run, which passes the same gate.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from evernear.common.output import print_line
from evernear.deployment.kubernetes.pod_template import CONTAINER_SECURITY, POD_SECURITY
from evernear.errors import EvernearError, SettingsError
from evernear.integrations.tuning.space import BUILT_IN, Parameter, Range, SearchSpace, load_space

METRIC = "accuracy"
CONTAINER = "trial"
GENERATE_NAME = "tune-evernear-"
"""Katib creates a Service EXPERIMENT-tpe: one called evernear-* puts variables EVERNEAR_* into the namespace's pods."""


def main(arguments: list[str] | None = None) -> int:
    """Print the experiment; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", required=True, help="the train image by its digest, REF@sha256:...")
    parser.add_argument("--source", required=True, help="images to train on, as for a run: s3://bucket/prefix, mnist")
    parser.add_argument("--store", default="s3://evernear", help="object store of the dataset")
    parser.add_argument("--space", type=Path, default=BUILT_IN, help="search space (TOML)")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=2, help="trials at the same time")
    parser.add_argument("--s3-secret", default="evernear-s3", help="Secret with the keys of the store")
    parser.add_argument("--cpu", default="4", help="CPU limit of a trial")
    parser.add_argument("--memory", default="8G", help="memory limit of a trial")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every trial")
    options = parser.parse_args(arguments)
    try:
        manifest = experiment(options, load_space(options.space))
    except EvernearError as error:
        print_line(str(error), sys.stderr)
        return error.exit_code
    sys.stdout.write(yaml.safe_dump(manifest, sort_keys=False))
    return 0


def experiment(options: argparse.Namespace, space: SearchSpace) -> dict[str, Any]:
    """The Experiment (kubeflow.org/v1beta1), for ``kubectl create``.

    Raises:
        SettingsError: the image has no digest, or a number of trials is not positive.
    """
    if "@sha256:" not in options.image:
        raise SettingsError(f"--image {options.image} has no digest; use REF@sha256:..., so that all trials are equal.")
    for name, value in (("--trials", options.trials), ("--parallel", options.parallel)):
        if value < 1:
            raise SettingsError(f"{name} {value} is not positive; use 1 or more.")
    return {
        "apiVersion": "kubeflow.org/v1beta1",
        "kind": "Experiment",
        "metadata": {"generateName": GENERATE_NAME},
        "spec": {
            "objective": {"type": "maximize", "objectiveMetricName": METRIC},
            "algorithm": {"algorithmName": "tpe"},
            "metricsCollectorSpec": {"collector": {"kind": "StdOut"}},
            "maxTrialCount": options.trials,
            "parallelTrialCount": min(options.parallel, options.trials),  # Katib refuses more
            "maxFailedTrialCount": options.trials,  # a failed trial is also a result
            "parameters": [_parameter(name, parameter) for name, parameter in space.parameters.items()],
            "trialTemplate": {
                "primaryContainerName": CONTAINER,
                "trialParameters": [{"name": _reference(name), "reference": name} for name in space.parameters],
                "trialSpec": _job(options, space),
            },
        },
    }


def _parameter(name: str, parameter: Parameter) -> dict[str, Any]:
    if isinstance(parameter, Range):
        feasible = {"min": str(parameter.low), "max": str(parameter.high)}
        feasible["distribution"] = "logUniform" if parameter.log else "uniform"
        kind = "int" if parameter.is_whole else "double"
        return {"name": name, "parameterType": kind, "feasibleSpace": feasible}
    values = [str(value) for value in parameter.choices]
    return {"name": name, "parameterType": "categorical", "feasibleSpace": {"list": values}}


def _reference(name: str) -> str:
    """A name for ``${trialParameters.NAME}``, in which a dot would end the name."""
    return name.replace(".", "-").replace("_", "-")


def _job(options: argparse.Namespace, space: SearchSpace) -> dict[str, Any]:
    tuned = [f"{name}=${{trialParameters.{_reference(name)}}}" for name in space.parameters]
    assignments = [f"store={options.store}", *options.set, *tuned]
    limits = {"cpu": options.cpu, "memory": options.memory}
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": ["evernear", "trial", "--source", options.source, *(f"--set={each}" for each in assignments)],
        "envFrom": [{"secretRef": {"name": options.s3_secret}}],
        "resources": {"requests": limits, "limits": limits},
        "securityContext": CONTAINER_SECURITY,
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "spec": {"backoffLimit": 0, "template": {"spec": pod}}}


if __name__ == "__main__":
    sys.exit(main())
