"""The one module that reads the environment: settings from the launcher and the shell.

Invariant: an explicit argument always wins; the environment only supplies what nothing else sets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from closeranks.core.errors import SetupError
from closeranks.core.world import World

_WORLD: World | None = None
_TOKEN = "CLOSERANKS_TOKEN"


def set_world(world: World | None) -> None:
    """Workers of the agent receive their world by message; it holds for the life of the process."""
    global _WORLD
    _WORLD = world


@contextmanager
def temporarily_set(name: str, value: str) -> Iterator[None]:
    """For a library that reads a setting only from the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def default_setting(name: str, value: str) -> Iterator[None]:
    """The same, unless the user has chosen another value."""
    with temporarily_set(name, os.environ.get(name, value)):
        yield


def set_default(name: str, value: str) -> None:
    """For a library that reads a setting only from the environment; what the user has set wins."""
    os.environ.setdefault(name, value)


def detect_world(environ: Mapping[str, str] = os.environ) -> World:
    """The world this process was started in: set by our agent, torchrun or srun; otherwise a world of one process."""
    if _WORLD is not None:
        return _WORLD
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun_world(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and _slurm_tasks(environ) > 1:
        return _slurm_world(environ)
    return World()


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        fix = "Start with `closeranks train -n N`, torchrun or srun, which set it."
        raise SetupError(f"the environment variable {name} is '{text}', not a number", fix) from None


def _torchrun_world(environ: Mapping[str, str]) -> World:
    """A restart by torchrun's agent is a new generation, so that no key of the previous one is read again."""
    return World(
        rank=_integer(environ, "RANK"),
        size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        local_size=_integer(environ, "LOCAL_WORLD_SIZE", 1),
        launcher="torchrun",
        generation=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        store=f"{environ.get('MASTER_ADDR', '127.0.0.1')}:{_integer(environ, 'MASTER_PORT', 29500)}",
    )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """A step of one task (``srun --pty bash``, an interactive allocation) is a shell, in which our agent starts the
    workers."""
    return _integer(environ, "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_NTASKS", 1))


def _slurm_world(environ: Mapping[str, str]) -> World:
    """The store runs on the first host of the step, on a port derived from job and step.

    Steps of one job may run side by side on one host, as may jobs with consecutive numbers.
    """
    job = _integer(environ, "SLURM_JOB_ID", 0) + 997 * _integer(environ, "SLURM_STEP_ID", 0)
    host = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""), environ)
    port = _integer(environ, "MASTER_PORT", 20000 + job % 10000)
    return World(
        rank=_integer(environ, "SLURM_PROCID"),
        size=_slurm_tasks(environ),
        local_rank=_integer(environ, "SLURM_LOCALID", 0),
        local_size=_tasks_here(environ),
        launcher="slurm",
        generation=_integer(environ, "SLURM_RESTART_COUNT", 0),
        store=f"{host}:{port}",
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """``SLURM_STEP_TASKS_PER_NODE`` reads ``2(x3),1``: two tasks on each of three nodes, then one."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * (int(times.rstrip(")")) if times else 1)
    return counts[_integer(environ, "SLURM_NODEID", 0) % len(counts)]


def _first_host(nodelist: str, environ: Mapping[str, str]) -> str:
    """The first name of a Slurm host list such as ``rack[1-2]gpu[03-07,12]-ib,login1``."""
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")) == "1":
        return "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodelist)


def thread_limit(environ: Mapping[str, str] = os.environ) -> int | None:
    """Threads per process that the user asked for, if any."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # "4,2" means nested levels: the first is ours
    return int(text) if text.isdecimal() and int(text) else None


def child_environment(threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the zygote and its workers.

    One thread per maths library until a worker sets its own number: a thread pool that exists at a fork hangs the
    child. The NVML check and the single compile thread keep the zygote from initializing CUDA, which a forked child
    could then not use. PYTHONUNBUFFERED: a killed worker's last line reaches its log. The job's token is removed: only
    the agents may have it.
    """
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": str(threads),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**{name: value for name, value in environ.items() if name != _TOKEN}, **fixed}


def bind_gloo(interface: str) -> None:
    """The interface for gloo's connections in this process. An explicit choice wins."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def fix_cublas_workspace() -> None:
    """cuBLAS is deterministic only with a fixed workspace, and reads this when CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def is_nvtx_tool_attached(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a tool that reads NVTX ranges started this process; Nsight Systems injects itself by this variable."""
    return bool(environ.get("NVTX_INJECTION64_PATH"))


def job_token(environ: Mapping[str, str] = os.environ) -> str:
    """The secret that the agents of a job share, if the shell was given it; empty if not."""
    return environ.get(_TOKEN, "")


def num_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs this process may use, without loading any driver: those the shell allows, else those the kernel shows."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        allowed = names[: names.index("-1")] if "-1" in names else names  # CUDA reads no further than -1
        return len([name for name in allowed if name])
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])


def gpus_are_per_task(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm gave each task devices of its own (``--gpus-per-task``)."""
    return bool(environ.get("SLURM_GPUS_PER_TASK"))


def requested_failpoint(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """``CLOSERANKS_KILL_AT=label[:n]``: a test wants this process and its children killed at that failpoint."""
    text = environ.get("CLOSERANKS_KILL_AT", "")
    if not text:
        return None
    label, _, count = text.partition(":")
    return label, int(count or 1)


def temporary_folder() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def failpoint_folder(environ: Mapping[str, str] = os.environ) -> str:
    """``CLOSERANKS_KILL_IN=folder``: where a test places kill requests while processes run; empty if it does not."""
    return environ.get("CLOSERANKS_KILL_IN", "")
