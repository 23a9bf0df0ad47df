"""A process that warms up for each of the jobs it is given and tells what has changed about it. Run by itself: what a
test's own process has learned before would hide it.

    python tests/run/warmed.py JOB.toml "layout.zero=3" "layout.tensor=2 train.precision=bf16"
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _random

import closeranks.run.worker.entry  # noqa: F401  as a zygote has imported it
from closeranks.core.system.environment import detect_world
from closeranks.core.system.linux import num_threads
from closeranks.run.job.job import load_job
from closeranks.run.worker import generation_cache
from closeranks.run.worker.agent_client import current_agent_client, current_link
from closeranks.run.worker.warmup import warm_up

LATE = ("torch._inductor.compile_fx",)


def state() -> dict[str, Any]:
    """Everything that a worker forked now would be born with, as far as it could change what the worker computes."""
    streams = (torch.get_rng_state().tolist(), str(np.random.get_state()), str(random.getstate()))
    return {
        "threads": num_threads(),
        "streams": streams,
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "dtype": (str(torch.get_default_dtype()), str(torch.get_default_device())),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()),
        "precision": torch.get_float32_matmul_precision(),
        "group": (dist.is_initialized(), distributed_c10d._world.group_count, len(distributed_c10d._world.pg_map)),
        "hook": sys.excepthook is sys.__excepthook__,
        "tensor streams": str(_random._rng_tracker),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "files": sorted(str(path) for path in Path.cwd().rglob("*")),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in open_fds()),
        "world": (str(detect_world()), current_link() is None, current_agent_client() is None),
        "flops": generation_cache._Cache.measured_flops,
        "buckets": generation_cache.bucket_mib(),
    }


def open_fds() -> list[str]:
    """Without what torch's kernels on ARM leave open: the description of the CPU, and a map of their code for perf."""
    named = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    kernels = ("/sys/devices/system/cpu/", f"/tmp/perf-{os.getpid()}.map")
    return [fd for fd, path in named.items() if os.path.exists(path) and not os.readlink(path).startswith(kernels)]


def main() -> None:
    torch.manual_seed(123)  # streams that were never touched would be equal by accident
    torch.set_num_threads(2)
    jobs = [load_job(Path(sys.argv[1]), overrides.split()).value for overrides in sys.argv[2:]]
    before, changed = state(), {}
    for job, overrides in zip(jobs, sys.argv[2:], strict=True):
        warm_up({"job": job.model_dump(mode="json")})
        after = state()
        changed[overrides] = [
            (key, str(before[key])[:200], str(after[key])[:200]) for key in before if before[key] != after[key]
        ]
    learned = [name for name in LATE if name in sys.modules]
    print(json.dumps({"changed": changed, "learned": learned}))


if __name__ == "__main__":
    main()
