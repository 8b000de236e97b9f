"""What `evernear doctor` tells of a cluster."""

from conftest import MakeSettings
from loopback.kubernetes import LoopbackCluster

from evernear.doctor import examine


def test_a_cluster_that_would_take_a_release_and_nothing_is_left_in_it(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    (found,) = examine(make_settings(), ["cluster"])
    assert found.well, found.message
    assert "would take the 7 objects of a release into namespace evernear" in found.message
    assert not [call for call in loopback.calls if call.verb == "patch" and call.query.get("dryRun") != "All"]


def test_a_namespace_that_is_not_there(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (found,) = examine(make_settings(namespace="elsewhere"), ["cluster"])
    assert not found.well
    assert "elsewhere" in found.message


def test_settings_that_no_release_can_be_deployed_with(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    (found,) = examine(make_settings(image=""), ["cluster"])
    assert not found.well
    assert "kubernetes.image" in found.message
