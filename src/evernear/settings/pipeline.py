from pydantic import Field

from evernear.settings.section import LocalPath, Section

NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
CPU = r"^[0-9]+(\.[0-9]+|m)?$"
MEMORY = r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$"
CLUSTER = ("s3_", "task_", "train_")


class PipelineSettings(Section):
    """The Kubeflow Pipelines server.

    Credentials come from the environment: KFP_TOKEN (a bearer token) or KFP_COOKIES
    (``name=value; ...``, the cookies of a Dex or IAP session). If neither is set, a pod uses its
    service account's token for KFP. The settings from ``s3_secret`` on describe the cluster:
    `evernear pipeline upload` writes them into the pipelines.
    """

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^\s]+)?$",
        description="URL of the KFP API; if empty, ml-pipeline.kubeflow of the cluster that this process runs in.",
    )
    namespace: str = Field(default="", description="The user's namespace, on a multi-user KFP.")
    ui_url: str = Field(default="", description="URL of the KFP UI, for links; if empty, the endpoint.")
    ca_file: LocalPath | None = Field(default=None, description="CA certificates (PEM) that verify the endpoint.")
    experiment: str = Field(default="evernear", min_length=1, description="KFP experiment of the runs.")
    s3_secret: str = Field(
        default="evernear-s3",
        pattern=NAME,
        description="Secret with the keys of the store for each step: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...",
    )
    task_cpu: str = Field(default="2", pattern=CPU, description="CPU limit of each step that does not train.")
    task_memory: str = Field(default="4G", pattern=MEMORY, description="Memory limit of each step that does not train.")
    train_cpu: str = Field(default="4", pattern=CPU, description="CPU limit of the steps that train.")
    train_memory: str = Field(default="8G", pattern=MEMORY, description="Memory limit of the steps that train.")
    train_accelerator: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9]([a-z0-9./_-]*[A-Za-z0-9])?$",
        description="Kubernetes resource of the steps that train; a run's train_accelerators is the number of them.",
    )

    @property
    def cluster(self) -> dict[str, str]:
        """What `pipeline upload` writes into the compiled pipelines."""
        return self.model_dump(include={name for name in type(self).model_fields if name.startswith(CLUSTER)})
