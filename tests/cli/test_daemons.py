"""User code that starts a daemon: it gets nothing of the run's memory and connections, and does not outlive the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import TINY, closeranks

pytestmark = pytest.mark.world

HOOK = """
import json, os, time
from pathlib import Path
from closeranks import Hook

class Daemon(Hook):
    def on_step(self, session, step):
        if step.step != 3:
            return
        has_looked, looks = os.pipe()
        if os.fork() != 0:
            os.close(looks)
            os.read(has_looked, 1)  # the run ends soon, and the daemon with it
            os.close(has_looked)
            return
        os.setsid()
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass
        maps = [line.split()[-1] for line in open("/proc/self/maps") if "/memfd:closeranks" in line]
        found = {"pid": os.getpid(), "links": links, "maps": maps}
        Path(f"daemon-{session.world.rank}.json").write_text(json.dumps(found))
        os.write(looks, b".")
        time.sleep(1000)
        os._exit(0)
"""


def test_a_daemon_of_a_hook_holds_nothing_and_is_ended(tmp_path: Path) -> None:
    (tmp_path / "own_daemon.py").write_text(HOOK)
    small = ["model.num_layers=2", "model.dim=32", "train.global_batch=6", "train.micro_batch=3", "train.eval_every=0"]
    rest = ["train.steps=6", "telemetry.report=false", "run.folder=run", "checkpoint.every=2"]
    hook = 'run.hooks=["own_daemon:Daemon"]'
    done = closeranks("train", TINY, "-n", 2, *small, *rest, hook, cwd=tmp_path, timeout_s=300.0)
    assert done.code == 0, done.err
    assert done.left_behind == []
    for rank in range(2):
        found = json.loads((tmp_path / f"daemon-{rank}.json").read_text())
        memory = [target for target in (*found["links"], *found["maps"]) if "closeranks-" in target]
        assert all("closeranks-progress" in target for target in memory), memory
        sockets = [target for target in found["links"] if target.startswith("socket:")]
        assert len(sockets) <= 2, sockets  # of the writer and the loader: between processes of this host
        assert f"{found['pid']} (" in done.out
    assert "Ending processes that the run's code started and left running" in done.out
