"""How long was a step of a published run that states only its TFLOP/s or MFU? And can a stated time be right?

Model FLOPs count attention in full, as MFU does everywhere in this package, unless the row names another convention.
Invariant: a rate whose convention is not known has no step time; a time that the GPUs cannot reach is refused, since
its unit must be another.
"""

from __future__ import annotations

from closeranks.facts.cluster import Cluster
from closeranks.facts.shapes.transformer import num_params
from closeranks.plan.step_time.workload import PlanChoice, Workload
from closeranks.plan.validation.run_table import PublishedRun

_LEAST_SHARE, _MOST_SHARE = 0.001, 1.0
"""Of the peak: below, the time is in milliseconds or the batch in another unit; above, no GPU computes so fast."""


def seconds_of_rate(run: PublishedRun, workload: Workload, choice: PlanChoice, cluster: Cluster) -> float | str:
    """From TFLOP/s, else from MFU; the reason if the row does not say what they count."""
    flops = _counted_flops(run, workload, choice)
    if isinstance(flops, str):
        return flops
    if run.tflops_per_gpu:
        rate = run.tflops_per_gpu * 1e12
    elif (run.mfu_pct or 0.0) > 1:
        rate = (run.mfu_pct or 0.0) / 100 * cluster.device.peak(choice.precision)
    else:
        return "mfu_pct is no percentage"
    return flops * workload.global_batch / (rate * cluster.num_devices)


def _counted_flops(run: PublishedRun, workload: Workload, choice: PlanChoice) -> float | str:
    """Of a sample, in the convention of the row; MFU never counts what is recomputed."""
    kind, shape = run.tflops_kind.lower(), workload.transformer
    attention = 12.0 * shape.num_layers * shape.attention_dim * workload.seq_len**2
    full = workload.flops_per_sample
    if not run.tflops_per_gpu or kind in ("model", "model full") or (not kind and choice.recompute == "none"):
        return full
    if kind == "causal":
        return full - attention / 2
    if kind == "6n":
        return 6.0 * num_params(shape) * workload.seq_len
    if kind == "hardware":
        head = 6.0 * shape.head_params * workload.seq_len
        again = {"none": 0.0, "full": (full - head) / 3, "selective": attention / 3}
        return full + again[choice.recompute]
    return "tflops_kind does not say what its TFLOP/s count"


def implausible(measured_s: float, workload: Workload, choice: PlanChoice, cluster: Cluster) -> str | None:
    reachable = cluster.device.peak(choice.precision) * cluster.num_devices
    share = workload.flops_per_sample * workload.global_batch / measured_s / reachable
    if share > _MOST_SHARE:
        return "its GPUs cannot compute so fast: a time, rate or batch is in another unit"
    return "under 0.1% of the peak: a time, rate or batch is in another unit" if share < _LEAST_SHARE else None
