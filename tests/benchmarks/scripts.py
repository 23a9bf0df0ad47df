"""How is a benchmark run in a test? As its user runs it; its last line is what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.benchmarks.conftest import BENCHMARKS


def run_script(name: str, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    """The closing line of a benchmark that ended well; a failing one shows what it printed."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = BENCHMARKS.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    closing: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(closing) == {"name", "figures", "goal", "met"}
    return closing
