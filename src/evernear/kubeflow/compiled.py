"""Prepare compiled pipelines for a cluster: set the image and defaults, or convert
pipelines to Kubernetes manifests."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, components
from kfp.compiler.compiler_utils import KubernetesManifestOptions

from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN, NAMES, PLACEHOLDER_IMAGE
from evernear.kubeflow.client import parameters_in
from evernear.kubeflow.runs import Parameter


def for_cluster(pipeline: str, image: str) -> bytes:
    """The golden file of ``pipeline``,
    with the placeholder image replaced by ``image``.

    Raises:
        SettingsError: ``pipeline`` is unknown, or ``image`` has no digest.
    """
    if pipeline not in NAMES:
        raise SettingsError(f"Unknown pipeline {pipeline!r}; known: {', '.join(NAMES)}.")
    if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", image):
        raise SettingsError(
            f"The image {image!r} has no digest; use REF@sha256:<64 hex digits>, because a tag may change between runs."
        )
    golden = GOLDEN / f"{pipeline.replace('-', '_')}.yaml"
    return golden.read_bytes().replace(PLACEHOLDER_IMAGE.encode(), image.encode())


def compiled_parameters(compiled: bytes) -> Sequence[Parameter]:
    """The parameters of a compiled pipeline."""
    return parameters_in(next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["root"])


def fill_defaults(compiled: bytes, defaults: Mapping[str, Any]) -> bytes:
    """Replace parameter defaults in ``compiled`` with ``defaults``."""
    if not defaults:
        return compiled
    documents = list(yaml.load_all(compiled, Loader=yaml.CSafeLoader))
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    for name, value in defaults.items():
        parameters[name]["defaultValue"] = value
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=True).encode()


def as_manifests(compiled: bytes, version: str, namespace: str) -> bytes:
    """Convert ``compiled`` to Pipeline and PipelineVersion manifests for KFP in
    Kubernetes-native mode."""
    information = next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["pipelineInfo"]
    options = KubernetesManifestOptions(
        pipeline_display_name=information.get("displayName"),
        pipeline_version_name=version_name(information["name"], version),
        pipeline_version_display_name=version,
        namespace=namespace or None,
        include_pipeline_manifest=True,
    )
    pipeline = components.load_component_from_text(compiled.decode())
    pipeline.description = information.get("description")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "manifests.yaml"
        compiler.Compiler().compile(
            pipeline, str(path), kubernetes_manifest_options=options, kubernetes_manifest_format=True
        )
        return path.read_bytes()


def version_name(pipeline: str, version: str) -> str:
    """The name of a pipeline version in KFP. Unlike the display name, the name must be
    unique in the namespace.
    """
    return f"{pipeline}-{version}"
