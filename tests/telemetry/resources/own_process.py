"""A process of a test that reads its own counters twice, with work in between: what a sampler in it would record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

READ_TWICE = """
import json, sys, time
from closeranks.telemetry.resources.cgroup_usage import read_cgroup
from closeranks.telemetry.resources.process_usage import read_process
from closeranks.telemetry.resources.reading import used_between
sys.stdin.readline()
at, before = time.monotonic(), (read_process(), read_cgroup())
exec(sys.argv[1])
seconds, after = time.monotonic() - at, (read_process(), read_cgroup())
process, cgroup = (used_between(*pair, seconds) for pair in zip(before, after))
print(json.dumps({"seconds": seconds, "process": process, "cgroup": cgroup}))
"""
SPIN = "import time\nwhile time.process_time() < {seconds}: pass"


def read_twice(work: str, prepare: Callable[[int], None] = lambda pid: None) -> dict[str, Any]:
    """``prepare`` gets the process before it reads for the first time."""
    arguments = [sys.executable, "-c", READ_TWICE, work]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            prepare(process.pid)
            out, _ = process.communicate("go\n", timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found
