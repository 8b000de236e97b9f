"""The compiled pipelines: reproducible, with the expected images, parameters, retries and
resources."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from evernear.common.store import patience
from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN, NAMES, PIPELINES
from evernear.kubeflow.publish import for_cluster, uploaded_version
from evernear.settings import PipelineSettings
from evernear.settings.sources import IMAGE_VARIABLE
from pipelines.compile import main as compile_main
from tests import ROOT

COMPONENTS = sorted(path for path in (ROOT / "components").glob("*.py") if path.name != "__init__.py")
RELEASING = {"ingest", "validate", "embed", "index", "evaluate", "gate", "archive", "deploy", "notify"}
STEPS = {
    "continuous_training": RELEASING | {"train", "export", "probe"},
    "reindex": RELEASING | {"reuse"},
    "rollback": {"rollback", "notify"},
    "promote": {"promote", "notify"},
    "predict": {"predict", "notify"},
}
PARAMETERS = {"continuous_training": 8, "reindex": 7, "rollback": 6, "promote": 6, "predict": 5}
IMAGE = "registry.example/evernear-train@sha256:" + "ab" * 32
HOUR_S = 3600


class Compiled:
    """One golden file."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.spec, platform = yaml.load_all((GOLDEN / f"{module}.yaml").read_text(), yaml.CSafeLoader)
        self.kubernetes = platform["platforms"]["kubernetes"]
        self.root_tasks = self.spec["root"]["dag"]["tasks"]
        self.parameters = self.spec["root"]["inputDefinitions"]["parameters"]

    @cached_property
    def tasks(self) -> dict[str, Any]:
        """All tasks that are components, by name."""
        return {name: task for _, tasks in self.groups() for name, task in tasks.items() if "-" not in name}

    def groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The parameters and tasks of each graph, including the root."""
        for part in ({"x": self.spec["root"]} | self.spec["components"]).values():
            if "dag" in part:
                yield part.get("inputDefinitions", {}).get("parameters", {}), part["dag"]["tasks"]

    def container(self, task: str) -> dict[str, Any]:
        return self.spec["deploymentSpec"]["executors"][f"exec-{task}"]["container"]

    def pod(self, task: str) -> dict[str, Any]:
        return self.kubernetes["deploymentSpec"]["executors"][f"exec-{task}"]


@pytest.fixture(params=PIPELINES, scope="module")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return Compiled(request.param)


@pytest.mark.parametrize("pipeline", NAMES)
def test_every_step_has_the_image_and_knows_it(pipeline: str) -> None:
    spec = next(yaml.load_all(for_cluster(pipeline, IMAGE, PipelineSettings()), yaml.CSafeLoader))
    for name, executor in spec["deploymentSpec"]["executors"].items():
        assert executor["container"]["image"] == IMAGE, name
        assert {"name": IMAGE_VARIABLE, "value": IMAGE} in executor["container"]["env"], name


@pytest.mark.parametrize("moving", ["r/train:latest", "train@sha256:abc", "a b@sha256:" + "ab" * 32])
def test_image_without_a_digest_is_refused(moving: str) -> None:
    with pytest.raises(SettingsError, match="has no digest"):
        for_cluster("continuous-training", moving, PipelineSettings())


def test_every_component_is_a_task_with_the_same_name(compiled: Compiled) -> None:
    assert set(compiled.tasks) == STEPS[compiled.module]
    assert {path.stem for path in COMPONENTS} == set().union(*STEPS.values())


def test_pipeline_and_parameters_have_descriptions(compiled: Compiled) -> None:
    info = compiled.spec["pipelineInfo"]
    assert info["displayName"]
    assert info["description"].endswith(".")
    names = [task["taskInfo"]["name"] for _, tasks in compiled.groups() for task in tasks.values()]
    assert not [name for name in names if name.startswith(("condition-", "exit-handler-"))]
    for name, parameter in compiled.parameters.items():
        assert parameter["description"].endswith("."), name
        assert "defaultValue" in parameter, name


def test_caching_is_disabled_for_every_task(compiled: Compiled) -> None:
    assert not [name for name, task in compiled.tasks.items() if task.get("cachingOptions", {}).get("enableCache")]


def test_run_form_is_short_and_has_no_settings_defaults(compiled: Compiled) -> None:
    assert len(compiled.parameters) == PARAMETERS[compiled.module]
    assert not compiled.parameters.keys() & PipelineSettings().cluster.keys()
    assert compiled.parameters.get("settings", {"defaultValue": {}})["defaultValue"] == {}


def test_task_parameters_are_passed_to_their_group(compiled: Compiled) -> None:
    """kfp does not pass the parameter of a limit to the group, so that the run fails before the
    task."""
    for values, tasks in compiled.groups():
        for name, task in tasks.items():
            inputs = task.get("inputs", {}).get("parameters", {}).values()
            used = {value["componentInputParameter"] for value in inputs if "componentInputParameter" in value}
            assert used <= set(values), name


def test_exit_step_runs_after_all_others_and_even_after_failures(compiled: Compiled) -> None:
    notify = compiled.root_tasks["notify"]
    assert notify["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert set(notify["dependentTasks"]) == set(compiled.root_tasks) - {"notify"}


def test_deployment_depends_on_the_boolean_of_the_gate() -> None:
    for module in ("continuous_training", "reindex"):
        compiled = Compiled(module)
        gate = compiled.spec["components"]["comp-gate"]["outputDefinitions"]["parameters"]
        assert {name: parameter["parameterType"] for name, parameter in gate.items()} == {"Output": "BOOLEAN"}
        assert {"deploy"} == {
            name
            for _, tasks in compiled.groups()
            for task in tasks.values()
            if "condition" in task.get("triggerPolicy", {})
            for name in compiled.spec["components"][task["componentRef"]["name"]]["dag"]["tasks"]
        }


def test_secrets_are_not_parameters_and_every_step_has_store_credentials(compiled: Compiled) -> None:
    for name in compiled.tasks:
        variables = {key["envVar"] for secret in compiled.pod(name)["secretAsEnv"] for key in secret["keyToEnv"]}
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= variables
        verifies = name in ("deploy", "rollback", "promote")
        assert ("EVERNEAR_TOKEN" in variables) == verifies, "only tasks that request predictions get the token"
        if verifies or name == "notify":  # both set the alias of the champion's collection
            assert {"EVERNEAR_MILVUS_URI", "EVERNEAR_MILVUS_TOKEN"} <= variables, name
    suspicious = [name for name in compiled.parameters if "key" in name or "password" in name or "token" in name]
    assert suspicious == []


def test_every_secret_of_a_step_is_in_the_example() -> None:
    example = [*yaml.safe_load_all((ROOT / "deploy/secrets.example.yaml").read_text())]
    documented = {
        secret["metadata"]["name"]: secret["stringData"].keys()
        for secret in example
        if secret["metadata"]["namespace"] == "kubeflow"
    }
    read: dict[str, set[str]] = {}
    for pipeline in map(Compiled, PIPELINES):
        for name in pipeline.tasks:
            for secret in pipeline.pod(name)["secretAsEnv"]:
                read.setdefault(secret["secretName"], set()).update(key["secretKey"] for key in secret["keyToEnv"])
    assert read.keys() == documented.keys()
    assert all(keys and keys <= read[name] for name, keys in documented.items())


def test_no_task_counts_on_retries_of_the_platform(compiled: Compiled) -> None:
    """A stock KFP 2.17.0 retries no step that exits with an error, whatever the pipeline says."""
    assert [name for name, task in compiled.tasks.items() if "retryPolicy" in task] == []


def test_every_task_has_a_timeout_in_which_it_may_wait_for_the_store(compiled: Compiled) -> None:
    for name in compiled.tasks:
        assert 2 * patience.IN_A_POD_S < int(compiled.pod(name)["activeDeadlineSeconds"]) <= 24 * HOUR_S


def test_runs_have_a_deadline_and_are_deleted_from_the_cluster(compiled: Compiled) -> None:
    config = compiled.kubernetes["pipelineConfig"]
    assert config["activeDeadlineSeconds"] > 24 * HOUR_S
    assert config["resourceTtlOnCompletion"] == 7 * 24 * HOUR_S


@pytest.mark.parametrize(
    "settings",
    [
        PipelineSettings(),
        PipelineSettings(
            task_cpu="500m", task_memory="2Gi", train_cpu="8", train_memory="64Gi", train_accelerator="amd.com/gpu"
        ),
    ],
)
def test_every_task_has_resource_limits_and_only_training_requests_accelerators(
    compiled: Compiled, settings: PipelineSettings
) -> None:
    uploaded = for_cluster(compiled.module.replace("_", "-"), IMAGE, settings)
    executors = next(yaml.load_all(uploaded, yaml.CSafeLoader))["deploymentSpec"]["executors"]
    for name in compiled.tasks:
        resources = executors[f"exec-{name}"]["container"]["resources"]
        accelerator = resources.get("accelerator", {})
        trains = name in ("train", "probe")
        cpu, memory = (
            (settings.train_cpu, settings.train_memory) if trains else (settings.task_cpu, settings.task_memory)
        )
        assert (resources["resourceCpuLimit"], resources["resourceMemoryLimit"]) == (cpu, memory)
        assert accelerator.get("resourceType") == (settings.train_accelerator if trains else None)
        assert accelerator.get("resourceCount") == (reference("train_accelerators") if trains else None)
    if compiled.module == "continuous_training":
        count = compiled.parameters["train_accelerators"]
        # KFP ignores a count that is not text.
        assert (count["parameterType"], count["defaultValue"]) == ("STRING", "0")


def test_change_of_the_cluster_is_another_version() -> None:
    def version(**settings: str) -> str:
        return uploaded_version("c0ffee", PipelineSettings.model_validate(settings))

    assert version() == version(endpoint="https://kfp.example.org") == version(task_cpu="2")
    changed = [version(**{name: "8"}) for name in PipelineSettings().cluster]
    assert len({version(), *changed}) == 1 + len(changed)
    assert all(name.startswith("c0ffee-") for name in changed)


def test_change_of_the_defaults_is_another_version() -> None:
    """So that a changed KFP_PARAMETERS of the workflow needs no new commit."""
    first, second = ["store=s3://a", "source=s3://b"], ["store=s3://a", "source=s3://c"]
    names = [uploaded_version("c0ffee", PipelineSettings(), defaults) for defaults in ((), first, second, first[::-1])]
    assert len({*names[:3]}) == 3
    assert names[1] == names[3]


def test_steps_that_read_images_mount_the_scratch_volume(compiled: Compiled) -> None:
    readers = {name for name in compiled.tasks if compiled.pod(name).get("pvcMount")}
    assert readers == {"ingest", "train", "export", "embed", "probe", "evaluate", "archive"} & STEPS[compiled.module]


def reference(parameter: str) -> str:
    return f"{{{{$.inputs.parameters['pipelinechannel--{parameter}']}}}}"


def test_predictions_need_no_other_nodes_unless_they_are_requested() -> None:
    """A cluster without deploy/components/many-machines has no PodTemplate for them."""
    assert Compiled("predict").parameters["nodes"]["defaultValue"] == 1


def test_pipelines_for_a_cluster_are_reproducible_files_and_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = f"r/evernear-train@sha256:{64 * 'a'}"
    for directory in ("one", "two"):
        options = ["--image", image, "--output", str(tmp_path / directory), "--set", "data.size_px=32"]
        assert compile_main(options) == 0
    for name in NAMES:
        written = (tmp_path / "one" / f"{name}.yaml").read_bytes()
        assert written == (tmp_path / "two" / f"{name}.yaml").read_bytes()
        assert image.encode() in written
    assert b"size_px: 32" in (tmp_path / "one" / "continuous-training.yaml").read_bytes()
    capsys.readouterr()
    options = ["--kubernetes-native", "--version", "abc", "--namespace", "kubeflow", "--output", str(tmp_path)]
    assert compile_main(["rollback", "--image", image, *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/rollback.yaml\n"
    objects = yaml.load_all((tmp_path / "rollback.yaml").read_bytes(), yaml.CSafeLoader)
    assert [each["kind"] for each in objects] == ["Pipeline", "PipelineVersion"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollback", "retrain", "--image", f"x@sha256:{64 * 'a'}"], "Unknown pipeline 'retrain'"),
        (["--image", f"x@sha256:{64 * 'a'}", "--output", "a-file"], "a-file/continuous-training.yaml: File exists"),
    ],
)
def test_errors_of_a_compilation_for_a_cluster_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert compile_main(words) == SettingsError.exit_code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
