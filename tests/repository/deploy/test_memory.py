"""Memory limits of pods that decode client images cover the maximum that their settings allow."""

import argparse
import re

import pytest

from evernear import settings
from evernear.data.preprocess import decode_size_bytes
from evernear.serving.decoding import pool_size_bytes
from evernear.serving.http.prep import prep_memory_size_bytes
from evernear.serving.pod import memory_size_bytes as torchserve_size_bytes
from evernear.serving.pod import pod_memory
from evernear.settings import ServingSettings, Settings
from evernear.settings.serving import LARGE_DECODES, MAX_BODIES_SIZE_BYTES
from tests.repository.deploy.rendered import PARTS, Object, containers, named, objects, pod_specs

MIB = 2**20
# Memory of a process before its first large image, with the digits (benchmarks/hostile_traffic.py).
PREDICTOR, TRANSFORMER = 720 * MIB, 220 * MIB


def size_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG]i)", quantity).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(number) * {"Mi": MIB, "Gi": 1024 * MIB}[unit]


def limit_bytes(container: Object) -> int:
    """The limit. It is also the request: a node that is full kills pods that use more than they
    requested."""
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    return size_bytes(resources["limits"]["memory"])


def running(part: str, *command: str) -> list[Object]:
    all_containers = [container for spec in pod_specs(objects(part)).values() for container in containers(spec)]
    return [item for item in all_containers if item.get("command", [])[: len(command)] == list(command)]


def kserve_containers(part: str, image: str) -> list[Object]:
    """The predictors (``evernear-serve``) or the transformers (``evernear-prep``)."""
    servers = running(part, "python", "-m", "evernear.serving.http")
    return [container for container in servers if f"/{image}@" in container["image"]]


def settings_in(part: str, container: Object) -> Settings:
    """The settings in the container's environment."""
    (name,) = (name for name in named(objects(part), "ConfigMap") if name.startswith("evernear-settings"))
    environment = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    return settings.load(environment=named(objects(part), "ConfigMap")[name]["data"] | environment)


@pytest.mark.parametrize("part", [part for part in PARTS if not part.startswith("kserve")])
def test_memory_of_serving_pods_in_the_settings_suffices(part: str) -> None:
    (container,) = running(part, "evernear", "prep")
    assert size_bytes(pod_memory(settings_in(part, container))) >= torchserve_size_bytes(ServingSettings(), 0, 0)


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("kserve")])
def test_memory_of_a_predictor_is_at_least_that_of_torchserve(part: str) -> None:
    for container in kserve_containers(part, "evernear-serve"):
        assert limit_bytes(container) >= size_bytes(pod_memory(Settings()))


@pytest.mark.parametrize("part", [part for part in PARTS if not part.startswith("kserve")])
def test_memory_of_the_preprocessing_server_covers_its_settings(part: str) -> None:
    (container,) = running(part, "evernear", "prep")
    assert prep_memory_size_bytes(settings_in(part, container)) <= limit_bytes(container)


def test_more_pixels_need_more_memory() -> None:
    few = prep_memory_size_bytes(Settings())
    more = Settings(serving=ServingSettings(max_pixels=50_000_000))
    assert prep_memory_size_bytes(more) - few == decode_size_bytes(25_000_000)


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("kserve")])
@pytest.mark.parametrize(
    ("image", "process_size_bytes"), [("evernear-serve", PREDICTOR), ("evernear-prep", TRANSFORMER)]
)
def test_memory_of_kserve_pods_covers_their_arguments(part: str, image: str, process_size_bytes: int) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_pixels", type=int, default=ServingSettings().max_pixels)
    parser.add_argument("--large_decodes", type=int, default=LARGE_DECODES)
    parser.add_argument("--max_bodies_size_bytes", type=int, default=MAX_BODIES_SIZE_BYTES)
    servers = kserve_containers(part, image)
    assert servers or "canary" in part, "only a canary lacks a transformer"
    for container in servers:
        args, _ = parser.parse_known_args(container["args"])
        decoding = pool_size_bytes(args.large_decodes, args.max_pixels)
        assert process_size_bytes + decoding + 2 * args.max_bodies_size_bytes <= limit_bytes(container)


def test_memory_of_torchserve_grows_with_its_limits_and_the_release() -> None:
    few = torchserve_size_bytes(ServingSettings(), 0, 0)
    assert few <= 2 * 1024 * MIB, "a small release fits a common node"
    assert torchserve_size_bytes(ServingSettings(max_pixels=50_000_000), 0, 0) - few == decode_size_bytes(25_000_000)
    two_workers = ServingSettings(workers=2)
    assert torchserve_size_bytes(two_workers, 700, 0) - torchserve_size_bytes(two_workers, 0, 0) == 700
    assert torchserve_size_bytes(two_workers, 0, 700) - torchserve_size_bytes(two_workers, 0, 0) == 2 * 700
