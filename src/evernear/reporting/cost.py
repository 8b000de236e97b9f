"""An estimate of the cost of a step."""

from evernear.run_record import StepRecord
from evernear.settings import CostSettings

HOUR_S = 3600
GIB_BYTES = 2**30


def cost(step: StepRecord, prices: CostSettings) -> float | None:
    """The cost of ``step`` in the currency of ``prices``; None if it is unknown.

    A container occupies the CPUs and the memory of its limits for the whole step, used or not. Without a limit, the CPU
    time counts, and the peak memory for the whole step.
    """
    if step.ended is None or not step.cpu_s or (step.gpus and not prices.gpu_hour):
        return None
    hours = (step.ended - step.started).total_seconds() / HOUR_S
    cpu_hours = step.cpu_s / HOUR_S if step.cpu_limit is None else step.cpu_limit * hours
    memory_gib = (step.memory_limit_bytes or step.peak_memory_bytes) / GIB_BYTES
    return cpu_hours * prices.cpu_hour + hours * (memory_gib * prices.memory_gib_hour + step.gpus * prices.gpu_hour)
