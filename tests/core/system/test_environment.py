from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from closeranks.core.errors import SetupError
from closeranks.core.system import environment
from closeranks.core.system.environment import child_environment, detect_world, set_world, thread_limit
from closeranks.core.world import World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "5",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
}


@pytest.fixture(autouse=True)
def _forget_world() -> Iterator[None]:
    set_world(None)
    yield
    set_world(None)


def test_nobody_said_anything() -> None:
    assert detect_world({}) == World()


def test_torchrun() -> None:
    expected = World(rank=3, size=4, local_rank=1, local_size=2, launcher="torchrun", generation=0, store="h:5")
    assert detect_world(TORCHRUN) == expected


def test_a_restart_of_torchrun_is_a_new_generation() -> None:
    assert detect_world({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).generation == 2


def test_torchrun_needs_rank_and_size_alone() -> None:
    world = detect_world({"RANK": "1", "WORLD_SIZE": "2"})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.store) == (1, 2, 0, 1, "127.0.0.1:29500")


def test_a_step_of_slurm() -> None:
    world = detect_world(SLURM)
    assert world == World(rank=5, size=7, local_rank=1, local_size=2, launcher="slurm", store="gpu03:23456")


@pytest.mark.parametrize(("node", "tasks"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_says_how_many_tasks_stand_on_each_host(node: str, tasks: int) -> None:
    assert detect_world({**SLURM, "SLURM_NODEID": node}).local_size == tasks


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-07,12],login1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("a1,a2", "a1"),
        ("login1,gpu[03-07]", "login1"),
        ("single", "single"),
        ("gpu[03-07]-ib,login1", "gpu03-ib"),
        ("rack[1-2]gpu[003,005]", "rack1gpu003"),
    ],
)
def test_the_store_stands_on_the_first_host(nodes: str, host: str) -> None:
    assert detect_world({**SLURM, "SLURM_STEP_NODELIST": nodes}).store == f"{host}:23456"


def test_one_host_needs_no_name() -> None:
    assert detect_world({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).store == "127.0.0.1:23456"


def test_steps_side_by_side_take_different_ports() -> None:
    worlds = [
        detect_world({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}) for job in "12" for step in ("0", "1", "2")
    ]
    assert len({world.store for world in worlds}) == 6


def test_a_step_of_one_task_is_a_shell() -> None:
    """``srun --pty bash`` or an interactive allocation: our own agent starts the workers there."""
    one = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}
    assert detect_world(one) == World()


def test_an_address_that_was_given_wins() -> None:
    assert detect_world({**SLURM, "MASTER_ADDR": "lead", "MASTER_PORT": "99"}).store == "lead:99"


def test_a_batch_script_of_slurm_is_no_worker() -> None:
    """sbatch's own shell has a process id but stands in no step of srun."""
    assert detect_world({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) == World()


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert detect_world({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_what_the_agent_said_wins_over_the_environment() -> None:
    told = World(rank=1, size=3, launcher="agent", generation=4)
    set_world(told)
    assert detect_world(TORCHRUN) == told


@pytest.mark.parametrize("value", ["", "x", "1.5"])
def test_a_rank_that_is_not_a_number_is_named(value: str) -> None:
    with pytest.raises(SetupError, match=f"the environment variable RANK is '{value}', not a number") as caught:
        detect_world({**TORCHRUN, "RANK": value})
    assert "torchrun or srun" in caught.value.fix


def test_threads_are_limited_only_when_asked() -> None:
    assert thread_limit({}) is None
    assert thread_limit({"OMP_NUM_THREADS": ""}) is None
    assert thread_limit({"OMP_NUM_THREADS": "3"}) == 3


def test_a_child_keeps_the_environment_and_gets_no_thread_pool() -> None:
    child = child_environment(2, {"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert child["PATH"] == "/bin"
    assert (child["OMP_NUM_THREADS"], child["MKL_NUM_THREADS"], child["OPENBLAS_NUM_THREADS"]) == ("2", "2", "1")
    assert child["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert child["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        (lambda: environment.bind_gloo("lo"), "GLOO_SOCKET_IFNAME", "lo"),
        (environment.fix_cublas_workspace, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_an_explicit_choice_is_never_overwritten(
    monkeypatch: pytest.MonkeyPatch, change: object, name: str, value: str
) -> None:
    assert callable(change)
    monkeypatch.setenv(name, "mine")
    change()
    assert os.environ[name] == "mine"
    monkeypatch.delenv(name)
    change()
    assert os.environ[name] == value


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("GPU-1a, GPU-2b,", 2)])
def test_gpus_are_those_the_shell_allows(visible: str, count: int) -> None:
    assert environment.num_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_are_those_the_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "null"])
    assert environment.num_gpus({}) == 2
