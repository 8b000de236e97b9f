from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from evernear.settings.section import Section


def _check_nodes(value: object) -> object:
    if isinstance(value, float) and value.is_integer():  # Kubeflow Pipelines passes numbers as floats
        value = int(value)
    if value == "auto" or (str(value).isdecimal() and int(str(value)) > 0):
        return value
    raise ValueError("should be a number above 0, or auto")


Nodes = Annotated[int | Literal["auto"], BeforeValidator(_check_nodes)]
"""Pods of the Indexed Job that runs a step's parts. With 1, the step's process runs them."""


class PartsJobSettings(Section):
    """The Indexed Job that runs the parts of a step on several nodes. The PodTemplate
    ``evernear-parts`` has everything else about the pods."""

    namespace: str = Field(
        default="",
        pattern=r"^$|^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Namespace of the Job and the PodTemplate. Default: that of the pod that runs the step.",
    )
    image: str = Field(default="", description="Image of the pods. Default: that of the pipeline.")
    max_nodes: int = Field(default=8, ge=1, description="Largest number of nodes that auto may choose.")
