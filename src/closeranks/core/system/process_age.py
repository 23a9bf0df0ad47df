"""How long ago was this process started? By the kernel's clock: the wall clock may have been set since."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since this process was started, or forked, to a hundredth; 0 where the kernel does not say."""
    try:
        # The program's name is in the parentheses and may contain anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return 0.0
