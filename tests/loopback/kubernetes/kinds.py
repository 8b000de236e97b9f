"""The kinds of objects that the server supports: those built into Kubernetes, and two of Kubeflow
Trainer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind and how a real server treats it."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True
    has_status: bool = False
    counts_generations: bool = False
    unconditional_update: bool = True  # accepts a PUT without resourceVersion
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """``apps/v1``, or ``v1`` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name in error messages, such as ``deployments.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False, has_status=True)
POD = Kind("", "v1", "Pod", "pods", has_status=True, subresources=("log",))
SERVICE = Kind("", "v1", "Service", "services", has_status=True, subresources=("proxy",))
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
NODE = Kind("", "v1", "Node", "nodes", namespaced=False, has_status=True)
EVENT = Kind("", "v1", "Event", "events")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", has_status=True)
DEPLOYMENT = Kind(
    "apps",
    "v1",
    "Deployment",
    "deployments",
    has_status=True,
    counts_generations=True,
)
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets", has_status=True, counts_generations=True)
BUDGET = Kind(
    "policy",
    "v1",
    "PodDisruptionBudget",
    "poddisruptionbudgets",
    has_status=True,
    counts_generations=True,
    unconditional_update=False,
)
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", has_status=True)
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", counts_generations=True)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases", unconditional_update=False)
JOB = Kind("batch", "v1", "Job", "jobs", has_status=True, counts_generations=True)
POD_TEMPLATE = Kind("", "v1", "PodTemplate", "podtemplates")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
TRAIN_JOB = Kind(
    "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", has_status=True, unconditional_update=False
)
TRAINING_RUNTIME = Kind(
    "trainer.kubeflow.org", "v1alpha1", "TrainingRuntime", "trainingruntimes", unconditional_update=False
)

KINDS = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}


def find(group: str, version: str, plural: str) -> Kind | None:
    """Return the kind of ``/apis/GROUP/VERSION/.../PLURAL``, or None."""
    return next((k for k in KINDS.values() if (k.group, k.version, k.plural) == (group, version, plural)), None)
