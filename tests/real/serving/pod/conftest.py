"""A release in a bucket, and pods that serve it."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from minio import Minio

from evernear.common.store import open_store
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from tests.real.serving.pod.kubelet import TOKEN, Pod, Shipped, StartPod
from tests.releases import MakeRelease

KEYS = ("tester", "not-a-secret")


@pytest.fixture(scope="module")
def bucket_store(s3_endpoint: str) -> Iterator[str]:
    """The URI of a store in a bucket, with the environment for init containers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        environment.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
        environment.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
        environment.setenv("AWS_REGION", "us-east-1")
        client = Minio(s3_endpoint.removeprefix("http://"), *KEYS, secure=False, region="us-east-1")
        if not client.bucket_exists("pods"):
            client.make_bucket("pods")
        yield "s3://pods/prod"


@pytest.fixture(scope="module")
def shipped(make_release: MakeRelease, bucket_store: str, tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    release = make_release()
    Registry(open_store(bucket_store)).publish(release.archive)
    parts = open_release(release.archive, tmp_path_factory.mktemp("opened") / "release")
    return Shipped(release, parts, bucket_store)


@pytest.fixture(scope="module")
def start_pod(shipped: Shipped, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPod]:
    """Start a pod as a kubelet does, and wait until it is ready."""
    with ExitStack() as pods:

        def start(removal_s: float = 10) -> Pod:
            pod = Pod(tmp_path_factory.mktemp("pod"), TOKEN, removal_s)
            pods.callback(pod.kill)
            fetched = pod.fetch(shipped.store, shipped.version, shipped.sha256)
            assert fetched.returncode == 0, fetched.stderr
            pod.start()
            assert "8 stored queries" in pod.await_started()
            assert pod.probe() == 200
            return pod

        yield start
