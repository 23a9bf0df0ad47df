"""Kills: of workers, once and again while the run recovers, at labelled points, while saving; of the agent itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator

from tests.faults.agent_faults import KillAfter, TouchFile
from tests.faults.cases import AROUND_RECOVERY, IN_COPYING, IN_RECOVERY, deadly
from tests.hostile.cases import STEPS, between, kind, one_of, seconds, step
from tests.hostile.lab import Run, kill

IN_SAVING = (
    *("capture.begun", "capture.copied", "saver.sent", "writer.order_received", "save.ordered", "save.first_bytes"),
    *("save.half_way", "save.data_written", "save.data_durable", "save.read_back", "save.part_published"),
    *("commit.parts_gathered", "commit.manifest_published", "commit.parts_removed", "commit.latest_published"),
    *("collect.manifest_removed", "collect.file_removed", "collect.folder_removed", "collect.done"),
)


@kind(
    "kills",
    fault=one_of("kill", "term", "stop", "torn", "bitflip", "exception", "zygote"),
    rank=between(0, 1),
    step=step(1, STEPS),
    at=one_of(0.0, 0.3, 0.7),
)
def one_fault(run: Run, fault: str, rank: int, step: int, at: float) -> Generator[None]:
    # A copy can only be torn or flipped where there was one.
    first = max(step, 3) if fault in ("torn", "bitflip") else step
    where = f"step={min(first, STEPS - 3)}" if fault in ("torn", "zygote", "stop") else f"step={first}"
    who = "" if fault == "zygote" else f"rank={rank}, "
    run.faults.append(f"{fault}({who}{where}{f', at={at}' if at and fault == 'kill' else ''})")
    yield


@kind("kills", rank=between(0, 1), step=step(), victim=between(0, 1), after_s=seconds(1.0), times=between(1, 3))
def second_kill_in_recovery(run: Run, rank: int, step: int, victim: int, after_s: float, times: int) -> Generator[None]:
    """Kills of each following generation some time after its worker was forked: in fork, open, restore, or a step."""
    run.faults.append(f"kill(rank={rank}, step={step})")
    run.agent_faults += [KillAfter((victim + n) % 2, n + 1, after_s) for n in range(times)]
    yield


@kind("kills", label=one_of(*IN_RECOVERY, *AROUND_RECOVERY), rank=between(0, 1), step=step())
def kill_at_a_point_of_recovery(run: Run, label: str, rank: int, step: int) -> Generator[None]:
    run.environment |= deadly(run.lab.folder)
    run.faults.append(f"kill(rank={rank}, step={step})")
    run.agent_faults.append(TouchFile(str(run.lab.orders / label), 0, max(1, step - 1)))
    yield


@kind("kills", label=one_of(*IN_COPYING), rank=between(0, 1), step=step())
def kill_at_a_point_of_a_copy(run: Run, label: str, rank: int, step: int) -> Generator[None]:
    run.environment |= deadly(run.lab.folder)
    run.agent_faults.append(TouchFile(str(run.lab.orders / label), rank, step))
    yield


@kind("kills", label=one_of(*IN_SAVING), step=step(1))
def kill_at_a_point_of_a_save(run: Run, label: str, step: int) -> Generator[None]:
    """Whoever passes there first: the trainer, its writer, or whoever collects."""
    run.environment |= deadly(run.lab.folder)
    run.settings += ["checkpoint.every=3", "checkpoint.keep_last=2"]
    run.agent_faults.append(TouchFile(str(run.lab.orders / label), 0, step))
    yield


@kind("kills", step=step(1, STEPS), after_s=seconds(0.5))
def killed_agent(run: Run, step: int, after_s: float) -> Generator[None]:
    """Workers go with their agent; the next start goes on from the last checkpoint."""
    run.allowed |= {-signal.SIGKILL}
    run.hold(step)
    yield
    with run.held(step):
        pass
    time.sleep(after_s)
    kill(run.process.pid)


@kind("kills", signal_name=one_of("SIGTERM", "SIGINT"), step=step(1), again_s=one_of(None, 0.0, 0.05, 0.3))
def asked_to_stop(run: Run, signal_name: str, step: int, again_s: float | None) -> Generator[None]:
    """Drained and saved; a second signal ends it at once, and then the last checkpoint counts."""
    number = signal.Signals[signal_name]
    run.allowed |= {128 + number}
    run.hold(step)
    yield
    with run.held(step):
        kill(run.process.pid, number)
    if again_s is not None:
        run.allowed |= {-number}  # where it comes when all is done and the process only has to leave: a shell shows 143
        time.sleep(again_s)
        if run.process.poll() is None:
            os.kill(run.process.pid, number)
