"""Labels and annotations for a release's Kubernetes objects."""

from evernear.settings import KubernetesSettings

PREFIX = "evernear.dev"
RELEASE = f"{PREFIX}/release"
MANIFEST_SHA256 = f"{PREFIX}/manifest-sha256"
ARCHIVE_SHA256 = f"{PREFIX}/archive-sha256"
SETTINGS_SHA256 = f"{PREFIX}/settings-sha256"
REVISION = f"{PREFIX}/revision"
"""A pod label with a hash of the pod template, which selects the pods of one rollout."""
VERSION = "app.kubernetes.io/version"
COMMON_LABELS = {"app.kubernetes.io/part-of": "evernear", "app.kubernetes.io/managed-by": "evernear"}
WATCHER = {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": "watch"}
"""The watcher's pod, which compares releases after a rollout."""


def selector(kubernetes: KubernetesSettings) -> dict[str, str]:
    """The immutable labels that select the pods."""
    return {
        "app.kubernetes.io/name": "evernear",
        "app.kubernetes.io/instance": kubernetes.name,
        "app.kubernetes.io/component": "serving",
    }
