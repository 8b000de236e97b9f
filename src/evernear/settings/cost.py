from pydantic import Field

from evernear.settings.section import Section


class CostSettings(Section):
    """Prices for the [cost of a run](run-page.md#cost). The defaults are AWS Fargate's on-demand
    prices in us-east-1 for Linux/x86."""

    currency: str = Field(default="USD", max_length=8, description="Currency of the prices.")
    cpu_hour: float = Field(default=0.04048, ge=0.0, description="Price of a CPU for an hour.")
    memory_gib_hour: float = Field(default=0.004445, ge=0.0, description="Price of 1 GiB of memory for an hour.")
    gpu_hour: float = Field(
        default=0.0, ge=0.0, description="Price of a GPU for an hour; 0: unknown, and so is the cost of steps with one."
    )
