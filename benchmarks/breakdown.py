"""Where does the time of a step go, by kind of kernel?

Invariant: every kernel counts once, in the first kind whose pattern its name matches; what matches none is ``other``,
and what the wall clock shows beyond all of them is ``idle``.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        # cuDNN's attention kernels carry the architecture in their names as matrix products do, so they come first.
        ("attention", r"sdpa|flash|fmha|attention"),
        ("optimizer and clip", r"adam|multi_tensor_apply|lpnorm|foreach|_clip_"),
        ("loss", r"log_softmax|softmax|nll|cross_entropy|logsumexp"),
        ("matmul", r"gemm|nvjet|xmma|cutlass|cublas|splitk|aten::(mm|addmm|bmm|linear)\b"),
        ("copies", r"memcpy|memset|aten::(copy_|zero_|fill_)|nccl"),
        ("embedding", r"embedding|indexing_backward|index_select|gather"),
        ("pointwise", r"triton|elementwise|reduce|vectorized|cat|aten::"),
    )
)

# Spans that the profiler lays over kernels: counted, they would count every kernel twice.
_SPANS = re.compile(r"^(Optimizer\.|Torch-Compiled Region|## Call |ProfilerStep|step \d+$|autograd::engine)")


def is_kernel(name: str) -> bool:
    return not _SPANS.match(name)


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(kernel)), "other")


def break_down(
    take_steps: Callable[[int], None], wait: Callable[[], None], num_steps: int
) -> tuple[dict[str, float], list[str]]:
    """Milliseconds a step by kind, the largest first, and the ten costliest kernels in words."""
    has_device = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_device else [])]
    wait()
    with profile(activities=activities) as taken:
        began_at = time.perf_counter()
        take_steps(num_steps)
        wait()
        wall_ms = 1000 * (time.perf_counter() - began_at) / num_steps
    kinds: dict[str, float] = defaultdict(float)
    kernels: list[tuple[float, str]] = []
    wanted = DeviceType.CUDA if has_device else DeviceType.CPU
    for event in taken.key_averages():
        is_span = getattr(event, "is_user_annotation", False) or not is_kernel(event.key)
        if is_span or event.device_type != wanted:
            continue
        spent_us = event.self_device_time_total if has_device else event.self_cpu_time_total
        kinds[kind_of(event.key)] += spent_us / 1000 / num_steps
        kernels.append((spent_us / 1000 / num_steps, event.key))
    kinds["idle"] = max(0.0, wall_ms - sum(kinds.values()))
    top = [f"{ms:8.2f} ms  {name[:100]}" for ms, name in sorted(kernels, reverse=True)[:10]]
    return {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])}, top
