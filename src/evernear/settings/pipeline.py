"""The settings of the ``pipeline`` section."""

from pydantic import Field

from evernear.settings.section import LocalPath, Section


class PipelineSettings(Section):
    """The Kubeflow Pipelines server.

    Credentials come from the environment: KFP_TOKEN (a bearer token) or KFP_COOKIES
    (``name=value; ...``, the cookies of a Dex or IAP session). If neither is set, a pod
    uses its service account's token for KFP.
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
    timeout_s: float = Field(default=30.0, gt=0.0, description="Timeout of an API call.")
    attempts: int = Field(
        default=4, ge=1, le=10, description="Attempts of an API call that cannot connect or gets 5xx."
    )
