"""How many instructions does telemetry execute in a step? Counted by valgrind, so that a busy machine changes nothing.

Each part of it (a switch of phases, a counted collective, the record of a step) is called more and less often in
processes of their own under cachegrind, and the difference is what the calls executed: starting Python cancels out.
Instructions of the kernel, which writes the record to the file, are not counted. A stand-in takes torch's place:
nothing of it is called, and its import alone would take minutes under valgrind.

    python benchmarks/telemetry_instructions.py         a minute or two
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from results import say

NUM_CALLS = 1000
PHASES = ("data", "forward", "backward", "data.all_reduce", "optimizer", "vote", "user_code", "other")
"""Of the step that is recorded."""
_TIMEOUT_S = 600.0


def count_instructions() -> dict[str, int] | None:
    """Of one call of each part; None without valgrind."""
    if shutil.which("valgrind") is None:
        return None
    runs = [{}, *({name: 3 * NUM_CALLS} for name in PARTS)]
    with ThreadPoolExecutor(2) as pool:
        base, *more = pool.map(_executed, runs)
    found = {name: (total - base) / (2 * NUM_CALLS) for name, total in zip(PARTS, more, strict=True)}
    found["switch"] /= 2
    return {name: round(executed) for name, executed in found.items()}


def _executed(num_calls: Mapping[str, int]) -> int:
    """Instructions of a process that calls each part so often."""
    calls = [str(num_calls.get(name, NUM_CALLS)) for name in PARTS]
    with tempfile.TemporaryDirectory(prefix="closeranks-instructions-") as folder:
        tool = ["valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={folder}/out"]
        done = subprocess.run(
            [*tool, sys.executable, __file__, folder, *calls],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            timeout=_TIMEOUT_S,
            check=True,
        )
    return parse_total(done.stderr)


def parse_total(text: str) -> int:
    """Cachegrind's line ``I   refs:      1,234``."""
    found = re.search(r"I\s+refs:\s+([\d,]+)", text)
    if found is None:
        raise RuntimeError(f"valgrind counted nothing: {text[-500:]}")
    return int(found[1].replace(",", ""))


def in_step(counts: Mapping[str, float], num_switches: float, num_counts: float) -> float:
    return num_switches * counts["switch"] + num_counts * counts["count"] + counts["record"]


def _switches(folder: Path) -> Callable[[], object]:
    """Entering and leaving a phase, which are two switches."""
    from closeranks.core import phases
    from closeranks.telemetry.phase_clock import HostPhaseClock

    phases.install_clock(HostPhaseClock())

    def enter_and_leave() -> None:
        with phases.phase("data.all_reduce"):
            pass

    return enter_and_leave


def _counts(folder: Path) -> Callable[[], object]:
    from closeranks.core import traffic

    tensor = SimpleNamespace(nbytes=64)
    return lambda: traffic.count_collective("data", "all-reduce", 2, tensor)


def _records(folder: Path) -> Callable[[], object]:
    """What ends a step and writes its line, as a run does it; the phases of the step itself are not counted here."""
    from closeranks.run.components.step_phases import PhaseRecorder
    from closeranks.telemetry.config import TelemetryConfig
    from closeranks.telemetry.run_log.recorder import EventRecorder

    emit = EventRecorder(folder, 0).emit
    recorder = PhaseRecorder(SimpleNamespace(type="cpu"), TelemetryConfig())  # type: ignore[arg-type]
    recorder.begin(0)
    clock = recorder._clock
    assert clock is not None
    spent_ns = dict.fromkeys(PHASES, 1234567)

    def record() -> None:
        clock._spent_ns = spent_ns.copy()  # type: ignore[attr-defined]
        recorder._end_step(1)
        recorder._emit_measured(emit)

    return record


PARTS: Mapping[str, Callable[[Path], Callable[[], object]]] = {
    "switch": _switches,
    "count": _counts,
    "record": _records,
}


def _call_all(folder: Path, calls: list[int]) -> None:
    sys.modules["torch"] = MagicMock()
    for make, num_calls in zip(PARTS.values(), calls, strict=True):
        act = make(folder)
        for _ in range(num_calls):
            act()


def main() -> None:
    if len(sys.argv) > 1:
        _call_all(Path(sys.argv[1]), [int(text) for text in sys.argv[2:]])
        return
    counts = count_instructions()
    if counts is None:
        say("valgrind is not installed")
        return
    for name, executed in counts.items():
        say(f"  {name:<8} {executed:,.0f} instructions")


if __name__ == "__main__":
    main()
