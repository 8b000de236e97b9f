from pydantic import Field

from evernear.settings.section import Section


class TrainJobSettings(Section):
    """The TrainJob of Kubeflow Trainer, used if ``train.nodes`` is greater than 1. The
    TrainingRuntime ``evernear`` has everything else about the nodes."""

    namespace: str = Field(
        default="",
        pattern=r"^$|^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Namespace of the TrainJob; if empty, that of the pod that runs the train step.",
    )
    image: str = Field(default="", description="Image of the nodes; if empty, that of the pipeline.")
