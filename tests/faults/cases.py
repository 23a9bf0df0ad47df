"""Every kind of fault, as something that can be done to the job under any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.elastic.faults.cgroups import FREEZER, CgroupControl, CgroupUnavailable, find_cgroup_parent
from tests.cli.commands import IMPORTABLE
from tests.faults.agent_faults import AgentFault, ClockJump, KillNewWorker, TouchFile


def lacking_control(need: CgroupControl) -> str:
    """Why there is no such control group here; empty where there is."""
    try:
        find_cgroup_parent(need)
    except CgroupUnavailable as reason:
        return str(reason)
    return ""


IMPATIENT = "elastic.hang_floor_s=3"
SLOW = ("elastic.slow_steps=3", "elastic.slow_ratio=2.0")
IN_RECOVERY = ("restore.agreed", "restore.before_verify", "restore.after_verify")
"""Points that a generation passes on its way back, on one host."""
AROUND_RECOVERY = ("restore.forked", "restore.opened", "restore.first_step")
"""Points before and after those."""
IN_COPYING = (
    *("slot.before_data", "slot.in_data", "slot.after_data"),
    *("slot.after_index", "slot.before_header", "slot.after_header"),
)
FROZEN = "all threads stopped" if lacking_control(FREEZER) else "all threads frozen"
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))

# faketime 0.9.10 turns the call behind time.sleep into EINVAL where it is told to leave the monotonic clock alone.
_SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"


def order(folder: Path, misdeed: str, rank: int, step: int) -> TouchFile:
    """To a user's code, see ``misdeeds``."""
    return TouchFile(str(folder / "orders" / f"{misdeed}-{rank}"), rank, step)


def sweep(folder: Path, labels: Sequence[str], *, first: int, every: int, rank: int) -> list[AgentFault]:
    """Orders to die at these points, one after the other."""
    return [TouchFile(str(folder / "orders" / label), rank, first + every * n) for n, label in enumerate(labels)]


def deadly(folder: Path) -> dict[str, str]:
    """The environment in which those are obeyed."""
    return {"CLOSERANKS_KILL_IN": str(folder / "orders")}


def false_clock(folder: Path) -> dict[str, str]:
    """The environment in which the wall clock, and it alone, is what the file ``clock`` says."""
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_SLEEP)
    (folder / "clock").write_text("+0\n")
    return {
        "LD_PRELOAD": str(FAKETIME[0]),
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
        "PYTHONPATH": f"{site}:{IMPORTABLE['PYTHONPATH']}",
    }


def jumps(folder: Path) -> list[AgentFault]:
    """A year ahead, then two years back."""
    return [ClockJump(str(folder / "clock"), "+365d", 4), ClockJump(str(folder / "clock"), "-365d", 11)]


def _nothing(folder: Path) -> list[AgentFault]:
    return []


@dataclass(frozen=True)
class Case:
    """One run, and the faults that strike it."""

    names: tuple[str, ...]
    """Of the faults, in the order in which they strike."""
    faults: str = ""
    agent_faults: Callable[[Path], Sequence[AgentFault]] = _nothing
    settings: tuple[str, ...] = ()
    env: Callable[[Path], dict[str, str]] = lambda folder: {}
    kinds: tuple[str, ...] = ()
    """As what the ends of generations are told, in order."""
    needs: tuple[str, ...] = field(default=())
    """Kinds that not every machine allows."""
    is_timed: bool = True
    """Whether the moment of the strike is known, by a clock that can be trusted."""


KILLS = "kill(rank=1, step=1), kill(rank=0, step=8, at=0.5), kill(rank=2, step=16)"
_EVERY = "kill(rank=0, step=4), kill(rank=1, step=8), kill(rank=2, step=12)"

CASES = (
    Case(
        tuple(f"SIGKILL of a worker, {when} step" for when in ("first", "middle", "last")), KILLS, kinds=("killed",) * 3
    ),
    Case(
        ("SIGTERM to a worker", "SIGKILL of two workers", "SIGKILL of the zygote"),
        "term(rank=2, step=2), kill2(rank=0, other=2, step=12), zygote(step=14)",
        kinds=("preempted", "killed", "zygote"),
    ),
    Case(
        ("hang in Python", "SIGSTOP"),
        "stop(rank=2, step=10)",
        lambda folder: [order(folder, "sleep", 1, 5)],
        (IMPATIENT,),
        kinds=("hang", "stopped"),
    ),
    Case(
        ("hang in a collective", f"hang, {FROZEN}"),
        "hang(rank=0, step=10)",
        lambda folder: [order(folder, "alone", 1, 5)],
        (IMPATIENT,),
        kinds=("hang", "stopped"),
    ),
    Case(("hang with the GIL held",), "", lambda folder: [order(folder, "gil", 2, 6)], (IMPATIENT,), kinds=("hang",)),
    Case(
        ("connections cut", "exception in a user's code", "out-of-memory kill"),
        "exception(rank=1, step=4), oom(rank=2, step=12)",
        lambda folder: [order(folder, "raise", 0, 8)],
        kinds=("exception", "exception", "oom"),
        needs=("exception", "oom"),
    ),
    Case(("torn copy", "flipped bit"), "torn(rank=1, step=3), bitflip(rank=2, step=9)", kinds=("killed", "killed")),
    Case(
        ("slow worker, reported",),
        "slow(rank=1, step=3, steps=13, share=0.05)",
        settings=("elastic.stragglers=report", *SLOW),
        needs=("slow",),
    ),
    Case(
        ("slow worker, replaced",),
        "slow(rank=1, step=3, steps=13, share=0.05)",
        settings=("elastic.stragglers=evict", *SLOW),
        kinds=("slow",),
        needs=("slow",),
    ),
    Case(
        ("disk full",),
        "diskfull(step=4, steps=8)",
        settings=("checkpoint.every=2",),
        needs=("diskfull",),
    ),
    Case(
        ("SIGKILL of a worker", "a second one while ranks are closed", "and a third"),
        "kill(rank=2, step=6)",
        lambda folder: [KillNewWorker(0, 1), KillNewWorker(1, 2)],
        kinds=("killed",) * 3,
    ),
    Case(
        tuple(f"SIGKILL at {label}" for label in IN_RECOVERY),
        _EVERY,
        lambda folder: sweep(folder, IN_RECOVERY, first=3, every=4, rank=0),
        env=deadly,
        kinds=("killed",) * 2 * len(IN_RECOVERY),
        is_timed=False,
    ),
    Case(
        tuple(f"SIGKILL at {label}" for label in IN_COPYING),
        "",
        lambda folder: sweep(folder, IN_COPYING, first=2, every=2, rank=1),
        env=deadly,
        kinds=("killed",) * len(IN_COPYING),
        is_timed=False,
    ),
    Case(
        ("wall clock a year ahead", "wall clock two years back"),
        "",
        jumps,
        env=false_clock,
        is_timed=False,
    ),
)

SERVER_CASES = (
    Case(
        ("SIGKILL of a server", "server stopped", "connections of a server cut"),
        "kill(rank=3, step=3, at=0.5), stop(rank=2, step=8), exception(rank=3, step=13)",
        settings=(IMPATIENT,),
        kinds=("killed", "stopped", "exception"),
        needs=("exception",),
    ),
    Case(
        (f"hang of a server, {FROZEN}", "SIGKILL of both servers", "flipped bit of a server"),
        "hang(rank=2, step=3), kill2(rank=2, other=3, step=8), bitflip(rank=3, step=13)",
        settings=(IMPATIENT,),
        kinds=("stopped", "killed", "killed"),
    ),
    Case(
        ("slow server",),
        "slow(rank=3, step=3, steps=10, share=0.1)",
        settings=("elastic.stragglers=report", *SLOW),
        needs=("slow",),
    ),
)
"""Faults of parameter servers, for the layout that has them: ranks 2 and 3."""
