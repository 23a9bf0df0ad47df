"""How a run can end before its time: a killed worker, Ctrl-C, SIGTERM, a killed agent. Nothing is left behind."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cli.calling import call
from tests.cli.commands import TINY, closeranks, marked_processes, started, wait_for_line

pytestmark = pytest.mark.world

LONG = ["train.steps=100000", "model.num_layers=2", "train.eval_every=0", "telemetry.log_every=1"]
PATIENT = "agent.interrupt_s=120"  # a busy machine may not save within the default


def workers(name: str) -> list[int]:
    """Process ids of the workers of a marked command in the order of their ranks: the zygote forks them in order."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and name.encode() in (entry / "environ").read_bytes():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    (agent,) = [pid for pid, parent in parents.items() if parent not in parents]
    (zygote,) = [pid for pid, parent in parents.items() if parent == agent]
    return sorted(pid for pid, parent in parents.items() if parent == zygote)


def gone_within(name: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while marked_processes(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def last_step(folder: Path, rank: int) -> int:
    lines = (folder / "metrics" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return max(json.loads(line)["step"] for line in lines if '"event": "step"' in line)


def test_a_killed_worker_ends_the_run_with_one_clear_report(tmp_path: Path) -> None:
    once = "elastic.enabled=false"
    with started("train", TINY, "-n", 2, *LONG, once, "run.folder=run", cwd=tmp_path) as (process, name):
        wait_for_line(process, "step     5/")
        os.kill(workers(name)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert gone_within(name, 30.0)
    report = err[err.index("closeranks: ") :]
    assert re.search(r"rank 1 .*SIGKILL", report), report
    assert re.search(r"step \d+", report)
    assert report.index("rank 1") < report.index("rank", report.index("rank 1") + 6)
    assert "rank-00001.log" in report
    assert "Traceback" not in err + out
    assert report.count("closeranks: ") == 1
    assert "rank 1" in (tmp_path / "run" / "report.md").read_text()


def test_ctrl_c_saves_and_ends_everything(tmp_path: Path) -> None:
    more = ["run.folder=run", "telemetry.report=false"]
    with started("train", TINY, "-n", 2, *LONG, PATIENT, *more, cwd=tmp_path) as (process, name):
        wait_for_line(process, "step     5/")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130
        assert not marked_processes(name)
    run = tmp_path / "run"
    assert last_step(run, 0) == last_step(run, 1), "all ranks stopped at the same step"
    assert (run / "checkpoints" / "latest").exists()
    more = [f"train.steps={last_step(run, 0) + 2}", "model.num_layers=2", "train.eval_every=0", "run.folder=run"]
    done = closeranks("train", TINY, "-n", 2, *more, "checkpoint.resume=run", "telemetry.report=false", cwd=tmp_path)
    assert done.code == 0, done.err


def test_ctrl_c_ends_a_run_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\nprint('hanging now', flush=True)\ntime.sleep(1000)\n")
    with started("run", "-n", 2, "hangs.py", cwd=tmp_path) as (process, name):
        wait_for_line(process, "hanging now")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130
        assert not marked_processes(name)


def test_sigterm_drains_and_exits_cleanly(tmp_path: Path) -> None:
    with started("train", TINY, "-n", 2, *LONG, "run.folder=run", "telemetry.report=false", cwd=tmp_path) as (
        process,
        name,
    ):
        wait_for_line(process, "step     5/")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 143, err
        assert "checkpoint.resume=run" in err
        assert gone_within(name, 30.0)
    assert "saved step" in out
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_sigusr1_saves_the_same_step_of_all_ranks_and_goes_on(tmp_path: Path) -> None:
    """Until Ctrl-C, which saves once more and leaves nothing behind; ``status`` sees the run at work and afterwards."""
    more = ["run.folder=run", "checkpoint.every=0", "telemetry.report=false", PATIENT]
    with started("train", TINY, "-n", 2, *LONG, *more, cwd=tmp_path) as (process, name):
        wait_for_line(process, "step     5/")
        told = json.loads(call("status", tmp_path / "run", "--json").out)
        assert (told["state"], told["heard"], told["writer"]["pid"]) == ("running", "now", process.pid)
        process.send_signal(signal.SIGUSR1)
        line = wait_for_line(process, "saved step")
        wait_for_line(process, "step ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130
        assert not marked_processes(name)
    assert call("status", tmp_path / "run").out.startswith("run: interrupted ")
    saved = int(re.findall(r"saved step (\d+)", line)[0])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == [f"step-{saved:08d}", f"step-{last_step(tmp_path / 'run', 0):08d}"]
    assert len(list((tmp_path / "run" / "checkpoints" / names[0]).glob("data-*"))) == 2, "both ranks wrote a share"


def test_a_killed_agent_takes_its_workers_with_it(tmp_path: Path) -> None:
    with started("train", TINY, "-n", 2, *LONG, "run.folder=run", cwd=tmp_path) as (process, name):
        wait_for_line(process, "step     3/")
        process.kill()
        process.wait()
        assert gone_within(name, 30.0)
