"""What a job sets for the whole process: tried in a fresh one each, as it stands for that process's life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.worker.process_setup import _threads

LOOK = """
import json, os, torch, torch.utils.deterministic
from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.worker.process_setup import prepare_process

tables, world, times = {given!r}
job = load_job(None, extra={{"model": {{}}, "data": {{}}, "train": {{"steps": 1}}, **tables}}).value
torch.set_num_threads(8)
for _ in range(times):
    prepare_process(job, World(**world))
print(json.dumps({{
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "fills": torch.utils.deterministic.fill_uninitialized_memory,
    "benchmark": torch.backends.cudnn.benchmark,
    "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    "threads": torch.get_num_threads(),
}}))
"""


def prepared(tables: dict[str, Any], world: dict[str, Any] | None = None, times: int = 1) -> dict[str, Any]:
    set_by_us = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG")  # by sessions of other tests
    plain = {key: value for key, value in os.environ.items() if key not in set_by_us}
    code = LOOK.format(given=(tables, world or {}, times))
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_deterministic_flag_reaches_every_switch() -> None:
    assert prepared({"run": {"deterministic": True}}) == {
        "deterministic": True,
        "fills": False,
        "benchmark": False,
        "cublas": ":4096:8",
        "gloo": "lo",
        "threads": 8,
    }


def test_a_plain_job_touches_none_and_other_hosts_are_not_cut_off() -> None:
    """One worker here of two in all; asked twice, as a script's second session does."""
    found = prepared({}, {"size": 4, "local_size": 2}, times=2)
    assert found == {
        "deterministic": False,
        "fills": True,
        "benchmark": False,
        "cublas": None,
        "gloo": None,
        "threads": 4,
    }


@pytest.mark.parametrize(("threads", "shell", "expected"), [(3, "5", 3), (0, "5", 5)])
def test_threads_as_the_job_says_else_as_the_shell_says(
    monkeypatch: pytest.MonkeyPatch, threads: int, shell: str, expected: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", shell)
    extra = {"model": {}, "data": {}, "train": {"steps": 1}, "run": {"threads": threads}}
    assert _threads(load_job(None, extra=extra).value, World()) == expected
