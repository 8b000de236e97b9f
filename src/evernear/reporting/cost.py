"""Estimate the cost of a step and of the nodes that ran its parts."""

from evernear.common.run_parts import PartsRecord
from evernear.common.run_record import StepRecord
from evernear.settings import CostSettings

HOUR_S = 3600
GIB_BYTES = 2**30


def cost(step: StepRecord, prices: CostSettings) -> float | None:
    """In the currency of ``prices``, or None if the cost is unknown. A container with limits is
    charged for all CPUs and memory up to them for the duration of the step. Without a CPU limit,
    the CPU time is charged, and without a memory limit, the peak memory for this duration."""
    if step.ended is None or not step.cpu_s or (step.gpus and not prices.gpu_hour):
        return None
    hours = (step.ended - step.started).total_seconds() / HOUR_S
    cpu_hours = step.cpu_s / HOUR_S if step.cpu_limit is None else step.cpu_limit * hours
    memory_gib = (step.memory_limit_bytes or step.peak_memory_bytes) / GIB_BYTES
    return cpu_hours * prices.cpu_hour + hours * (memory_gib * prices.memory_gib_hour + step.gpus * prices.gpu_hour)


def cost_of_nodes(ran: PartsRecord, prices: CostSettings) -> float | None:
    """The cost of the pods that ran parts, for their duration, or None if a pod has no limits."""
    if ran.cpus is None or ran.memory_bytes is None:
        return None
    per_hour = ran.cpus * prices.cpu_hour + ran.memory_bytes / GIB_BYTES * prices.memory_gib_hour
    return ran.parts_s / HOUR_S * per_hour
