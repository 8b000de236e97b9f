"""Prepare compiled pipelines for a cluster: set image and defaults, or convert to manifests."""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, components
from kfp.compiler.compiler_utils import KubernetesManifestOptions

from evernear.common.disk import sha256_bytes
from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN, NAMES, PLACEHOLDER_IMAGE
from evernear.kubeflow.client import parameters_in
from evernear.kubeflow.parameters import for_pipeline, from_words
from evernear.kubeflow.runs import Parameter
from evernear.release.manifest import git_commit
from evernear.settings import PipelineSettings


def for_cluster(pipeline: str, image: str, settings: PipelineSettings) -> bytes:
    """The golden file of ``pipeline`` with ``image`` and the cluster's ``settings``.

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
    compiled = golden.read_bytes().replace(PLACEHOLDER_IMAGE.encode(), image.encode())
    default = PipelineSettings()
    if settings.cluster == default.cluster:
        return compiled
    spec, platform = yaml.load_all(compiled, Loader=yaml.CSafeLoader)
    for executor in spec["deploymentSpec"]["executors"].values():
        _set_limits(executor["container"]["resources"], settings)
    for executor in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        for secret in executor["secretAsEnv"]:
            if secret["secretName"] == default.s3_secret:
                secret["secretName"] = settings.s3_secret
                secret["secretNameParameter"] = {"runtimeValue": {"constant": settings.s3_secret}}
    return _dump([spec, platform])


def compile_pipelines(
    pipelines: Sequence[str] | None, image: str, defaults: list[str], cluster: PipelineSettings
) -> dict[str, bytes]:
    """All or the named pipelines, by name. A default applies to all that have the parameter."""
    compiled = {name: for_cluster(name, image, cluster) for name in pipelines or NAMES}
    declared = {name: compiled_parameters(content) for name, content in compiled.items()}
    arguments = from_words(defaults, [parameter for parameters in declared.values() for parameter in parameters])
    return {name: fill_defaults(content, for_pipeline(arguments, declared[name])) for name, content in compiled.items()}


def words_of_section(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words of the ``pipeline`` section (server and cluster), and the others: defaults."""
    words = list(words)
    of_section = [word for word in words if word.startswith("pipeline.")]
    return of_section, [word for word in words if word not in of_section]


def _set_limits(resources: dict[str, Any], settings: PipelineSettings) -> None:
    """Set one task's limits. Only tasks that train have an accelerator."""
    cpu, memory = settings.task_cpu, settings.task_memory
    if accelerator := resources.get("accelerator"):
        cpu, memory = settings.train_cpu, settings.train_memory
        accelerator |= {"resourceType": settings.train_accelerator, "type": settings.train_accelerator}
    resources |= {"resourceCpuLimit": cpu, "resourceMemoryLimit": memory}
    for deprecated in ("cpuLimit", "memoryLimit"):  # KFP reads them only without the other two
        resources.pop(deprecated)


def default_version(version: str | None, settings: PipelineSettings) -> str:
    """The name of a version that users name ``version``, or by default the git commit."""
    if named := version or git_commit():
        return cluster_version(named, settings)
    raise SettingsError(
        "evernear is not installed from a git checkout, so the version has no default name; pass --version."
    )


def cluster_version(version: str, settings: PipelineSettings) -> str:
    """Differs for clusters with different settings."""
    values = json.dumps(settings.cluster, sort_keys=True)
    return f"{version}-{sha256_bytes(values.encode())[:8]}"


def compiled_parameters(compiled: bytes) -> Sequence[Parameter]:
    return parameters_in(next(yaml.load_all(compiled, Loader=yaml.CSafeLoader))["root"])


def fill_defaults(compiled: bytes, defaults: Mapping[str, Any]) -> bytes:
    if not defaults:
        return compiled
    documents = list(yaml.load_all(compiled, Loader=yaml.CSafeLoader))
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    for name, value in defaults.items():
        parameters[name]["defaultValue"] = value
    return _dump(documents)


def _dump(documents: list[Any]) -> bytes:
    return yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=True).encode()


def as_manifests(compiled: bytes, version: str, namespace: str) -> bytes:
    """Pipeline and PipelineVersion manifests for KFP's Kubernetes-native mode."""
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
    """The name in KFP. Unlike the display name, it must be unique in the namespace."""
    return f"{pipeline}-{version}"
