"""Every kind of fault under every layout: survived, and the same in every bit? ``make drills``.

    python -m tests.faults.drills [--page docs/drills-table.md] [--only TEXT] [--shapes ddp,zero3]

Prints a line for every run as it ends, writes the table, and ends with one line of JSON. Exit 0: all survived, equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from closeranks.core.events import RankLost, RanksClosed, SaveFailed, SlowRank
from closeranks.elastic.faults.requirements import unavailable_kinds
from tests.faults.cases import CASES, FAKETIME, SERVER_CASES, Case, false_clock
from tests.faults.harness import Ran, assert_clean, assert_same, assert_struck, go, wait_for_step
from tests.faults.jobs import SERVERS, SHAPES
from tests.faults.rows import AGENT, HEADINGS, Row
from tests.hosts.drills import HOSTS, drill_hosts
from tests.hosts.lab import why_not

_GOAL = (
    "every fault survived, at most one finished step redone, losses and last state equal in every bit (resized: 1e-9)"
)


def drill(folder: Path, shape: str, case: Case, calm: Ran) -> list[Row]:
    where, layout = folder / f"{shape}-{case.names[0].replace(' ', '-')}", SHAPES[shape].words
    env, agent_faults = case.env(where), case.agent_faults(where)
    try:
        ran = go(where, shape, *case.settings, faults=case.faults, agent_faults=agent_faults, env=env)
    except AssertionError as error:
        return [Row(name, layout, None, None, None, str(error).splitlines()[0]) for name in case.names]
    problem = _problem(calm, ran, case)
    strikes = [] if not (where / "strikes.json").exists() else list(_worth_telling(ran, case))
    rows = [
        Row(name, layout, *_figures(ran, strike, case), problem=problem)
        for name, strike in zip(case.names, strikes, strict=False)
    ]
    missing = case.names[len(rows) :]
    return [*rows, *(Row(name, layout, None, None, None, problem or "it did not strike") for name in missing)]


def _problem(calm: Ran, ran: Ran, case: Case) -> str:
    """What is wrong, in a line."""
    if ran.code != 0:
        return f"exit {ran.code}: {''.join(ran.err.strip().splitlines()[:1])}".replace("|", "/")[:200]
    try:
        assert_same(calm, ran)
        told = [lost.kind for lost in ran.lost]
        assert len(told) == len(case.kinds), f"{told} were told instead of {list(case.kinds)}"
        assert_struck(ran, *case.kinds)
    except AssertionError as error:
        return (str(error) or "not the same").strip().splitlines()[0].replace("|", "/")[:200]
    return ""


def _worth_telling(ran: Ran, case: Case) -> Iterator[dict[str, Any]]:
    """Where orders to die were given, those; else every strike."""
    is_swept = "SIGKILL at" in case.names[0]
    for strike in ran.strikes["struck"]:
        if not is_swept or strike["fault"].startswith("TouchFile"):
            yield strike


def _figures(ran: Ran, strike: dict[str, Any], case: Case) -> tuple[float | None, float | None, int | None]:
    told = ran.course.events
    closed = next(
        (line for line in told if isinstance(line.event, RanksClosed) and line.event.generation > strike["generation"]),
        None,
    )
    if not case.kinds or closed is None:
        noticed = [
            line.at for line in told if isinstance(line.event, SlowRank | SaveFailed) and line.at >= strike["at"]
        ]
        return (noticed[0] - strike["at"] if noticed and case.is_timed else None), None, 0
    assert isinstance(closed.event, RanksClosed)
    lost = [line for line in told if isinstance(line.event, RankLost) and line.event.generation == strike["generation"]]
    is_last = closed.event.generation == strike["generation"] + 1
    noticed_at = closed.at - closed.event.seconds if is_last else lost[0].at if lost else None
    is_known = case.is_timed and noticed_at is not None
    return (
        max(0.0, (noticed_at or 0.0) - strike["at"]) if is_known else None,
        closed.event.seconds,
        closed.event.num_redone,
    )


def drill_agent(folder: Path, shape: str) -> Row:
    def strike(process: subprocess.Popen[str], run: Path) -> None:
        wait_for_step(process, run, 5)
        os.kill(process.pid, signal.SIGKILL)

    try:
        ran = go(folder / f"{shape}-agent", shape, "train.steps=3000", meanwhile=strike)
        assert ran.code == -signal.SIGKILL, ran.said
        assert_clean(ran)
    except AssertionError as error:
        return Row(AGENT, SHAPES[shape].words, None, None, None, str(error).splitlines()[0])
    return Row(AGENT, SHAPES[shape].words, None, None, None)


def possible(case: Case) -> bool:
    return not unavailable_kinds(case.needs) and (case.env is not false_clock or bool(FAKETIME))


def drill_all(folder: Path, shapes: Sequence[str], only: str) -> list[Row]:
    rows: list[Row] = []
    for shape in shapes:
        calm = go(folder / f"calm-{shape}", shape)
        assert_same(calm, calm)
        for case in SERVER_CASES if shape == SERVERS else CASES:
            if only in " ".join(case.names) and possible(case):
                rows += tell(drill(folder, shape, case, calm))
        if only in AGENT and shape != SERVERS:
            rows += tell([drill_agent(folder, shape)])
        if only in " ".join(HOSTS) and shape != SERVERS and not why_not():
            rows += tell(drill_hosts(folder / f"hosts-{shape}", shape))
    return rows


def tell(rows: list[Row]) -> list[Row]:
    for row in rows:
        print("  ".join(row.cells), flush=True)
    return rows


def page(rows: Sequence[Row], seconds: float) -> str:
    order = list(dict.fromkeys(row.fault for row in rows))
    cells = [row.cells for row in sorted(rows, key=lambda row: order.index(row.fault))]
    widths = [max(len(line[n]) for line in [HEADINGS, *cells]) for n in range(len(HEADINGS))]

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)) + " |"

    table = [line(HEADINGS), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, cells)]
    left_out = _left_out()
    without = f" Not possible on that machine, and left out: {', '.join(left_out)}." if left_out else ""
    return "\n".join([*table, "", f"{_sentence(rows)}{without} `make drills`, {seconds / 60:.0f} minutes.", ""])


def _left_out() -> list[str]:
    names = [name for case in CASES if not possible(case) for name in case.names]
    return [*names, *(HOSTS if why_not() else ())]


def _sentence(rows: Sequence[Row]) -> str:
    num_good = sum(not row.problem for row in rows)
    return f"{num_good} of {len(rows)} came out as they should."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=None, help="where the table goes, as Markdown")
    parser.add_argument("--only", default="", help="runs with a fault whose name holds this")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="layouts, with commas")
    asked = parser.parse_args()
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drills-") as folder:
        rows = drill_all(Path(folder), asked.shapes.split(","), asked.only)
    seconds = time.monotonic() - began_at
    if asked.page is not None:
        asked.page.write_text(page(rows, seconds))
    back = [row.back_s for row in rows if row.back_s is not None]
    redone = [row.num_redone for row in rows if row.num_redone is not None]
    is_met = bool(rows) and not any(row.problem for row in rows)
    figures: dict[str, Any] = {"faults": len(rows), "good": sum(not row.problem for row in rows)}
    figures |= {"seconds": round(seconds, 1)}
    figures |= {"back_s": {"median": round(median(back), 3), "most": round(max(back), 3)}} if back else {}
    figures |= {"redone_most": max(redone, default=0)}
    figures |= {"left_out": _left_out()}
    print(json.dumps({"name": "drills", "figures": figures, "goal": _GOAL, "met": is_met}))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
