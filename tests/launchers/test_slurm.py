from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launchers.cluster import Cluster, end, read_until, wait_for
from tests.launchers.conftest import STEPS
from tests.launchers.jobs import ROOT, SMALL, TINY, TRAIN, assert_complete, endings, losses, said, trained

pytestmark = [pytest.mark.world, pytest.mark.slurm]
ONE_HOST = ("--nodes=1", "--ntasks=2", "--kill-on-bad-exit=1")
TWO_HOSTS = ("--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1")
ENDLESS = "train.steps=1000000"


def job(folder: Path, *more: str) -> list[str]:
    return [sys.executable, *TRAIN, *SMALL, f"run.folder={folder}", *more]


@contextmanager
def training(cluster: Cluster, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on one host that has taken its fifth step and would go on for ever."""
    process = cluster.start(*ONE_HOST, *job(folder, ENDLESS, "telemetry.report=false"))
    try:
        read_until(process, "step     5/")
        yield process
    finally:
        end(process)
        wait_for(lambda: cluster.is_idle, lambda: "the step has not ended")


@pytest.mark.parametrize(
    ("shape", "address"),
    [
        pytest.param(ONE_HOST, {}, marks=pytest.mark.slow),
        (TWO_HOSTS, {"MASTER_ADDR": "127.0.0.1"}),  # the hosts' names stand in no name service here
    ],
    ids=["1 host x 2 tasks", "2 hosts x 1 task"],
)
def test_a_step_trains_as_two_workers_of_our_own_do(
    cluster: Cluster, tmp_path: Path, expected: list[float], shape: tuple[str, ...], address: dict[str, str]
) -> None:
    done = cluster.srun(*shape, *job(tmp_path / "run", f"train.steps={STEPS}"), **address)
    assert done.code == 0, done.text
    assert "on 2 workers" in done.text
    assert_complete(tmp_path / "run", expected)


def test_the_documented_script_runs_to_completion(cluster: Cluster, tmp_path: Path, expected: list[float]) -> None:
    script, log = ROOT / "examples" / "launchers" / "slurm.sbatch", tmp_path / "log"
    more = [f"train.steps={STEPS}", f"run.folder={tmp_path}/run"]
    number = cluster.sbatch(f"--output={log}", script, TINY, *SMALL, *more)
    wait_for(lambda: cluster.state(number) not in ("PENDING", "RUNNING", "COMPLETING"), lambda: log.read_text(), 60)
    assert cluster.state(number) == "COMPLETED", log.read_text()
    assert_complete(tmp_path / "run", expected)


def test_after_sigterm_all_ranks_stop_together_and_the_run_goes_on_as_if_nothing_had_been(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with training(cluster, folder) as process:
        assert all(ipaddress.ip_address(address).is_loopback for address in listening(cluster))
        cluster.command("scancel", "--signal=TERM", cluster.command("squeue", "-h", "-o", "%i"))
        text, _ = process.communicate(timeout=300)
    (stopped_at, reason), other = endings(folder)
    assert other == (stopped_at, reason) == (stopped_at, "drained")
    assert said(text) == [f"closeranks: stopped at step {stopped_at}. Resume via checkpoint.resume={folder}."]
    assert process.returncode == 143

    last = stopped_at + 3
    done = cluster.srun(*ONE_HOST, *job(folder, f"train.steps={last}", f"checkpoint.resume={folder}"))
    assert done.code == 0, done.text
    uninterrupted = trained(tmp_path / "uninterrupted", last)
    assert [losses(folder, rank) for rank in (0, 1)] == [uninterrupted] * 2
    assert endings(folder) == [(last, "finished")] * 2


def listening(cluster: Cluster) -> list[str]:
    """The addresses on which the ranks wait for connections: gloo's and the store's."""
    sockets = [one for rank in (0, 1) for one in cluster.task(rank).net_connections("inet")]
    found = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]
    assert len(found) >= 2
    return found


def test_a_killed_rank_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    with training(cluster, tmp_path / "run") as process:
        cluster.task(1).kill()
        text, _ = process.communicate(timeout=300)
    assert "task 1: Killed" in text
    assert process.returncode != 0
    assert [line.startswith("closeranks: rank 0 lost another rank after step") for line in said(text)] == [True]
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        pytest.param("train.stepz=4", "1 problem in the job", marks=pytest.mark.slow),
        ("data.path=/nowhere", "data.path = '/nowhere' does not exist"),
    ],
)
def test_a_mistake_is_told_once_and_every_rank_exits_2(
    cluster: Cluster, tmp_path: Path, mistake: str, sentence: str
) -> None:
    done = cluster.srun("--ntasks=2", "--nodes=1", *job(tmp_path / "run", "train.steps=4", mistake))
    assert [sentence in line for line in said(done.text)] == [True]
    assert done.task_codes() == {0: 2, 1: 2}
    assert done.code == 2
    assert "Traceback" not in done.text


def test_a_port_in_use_is_told_once(cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        done = cluster.srun(*ONE_HOST, *job(tmp_path / "run", "train.steps=4"), MASTER_PORT=port)
    fix = "Set MASTER_PORT to a free port of the first host."
    assert said(done.text) == [f"closeranks: port {port} on 127.0.0.1 is already in use (rank 0). {fix}"]
    assert done.task_codes()[0] == 2
    assert "Traceback" not in done.text


def test_a_first_host_that_nobody_knows_is_told_at_once(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.srun(*TWO_HOSTS, *job(tmp_path / "run", "train.steps=4"))
    assert [("'n1' does not resolve" in line, "Set MASTER_ADDR" in line) for line in said(done.text)] == [(True, True)]
    assert done.task_codes()[0] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_requeued_job_goes_on_where_it_stopped(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm lets a requeued job wait until its old credential has expired: seconds here, two minutes by default."""
    script, log = ROOT / "examples" / "launchers" / "slurm.sbatch", tmp_path / "log"
    named = ["--job-name=again", f"--chdir={tmp_path}", f"--output={log}"]
    number = cluster.sbatch(*named, script, TINY, *SMALL, "train.steps=400", "telemetry.report=false")
    wait_for(lambda: log.exists() and "step    20/" in log.read_text(), lambda: log.read_text(), 300)
    cluster.command("scontrol", "requeue", number)
    wait_for(lambda: cluster.state(number) == "COMPLETED", lambda: log.read_text(), 300)
    assert "resumed at step" in log.read_text()
    folder = tmp_path / "runs" / f"again-{number}"
    assert losses(folder, 1) == trained(tmp_path / "uninterrupted", 400)
