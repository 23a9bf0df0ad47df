"""What the kernel is asked for is done, or left without harm."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

FORK = """
import mmap, os, re
from closeranks.core.system.linux import use_huge_pages

def huge():
    with open("/proc/self/smaps_rollup") as figures:
        return 1024 * int(re.search(r"AnonHugePages: +(\\d+)", figures.read())[1])

held = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pattern = bytes(range(256)) * (1 << 16)
held[:] = pattern
moved = use_huge_pages()
assert moved % (2 << 20) == 0
assert held[:] == pattern
assert huge() >= moved
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert held[:] == pattern, "a fork writes its own"
else:
    held[5 << 20] = 1
    os._exit(0 if held[: 5 << 20] == pattern[: 5 << 20] else 1)
print(moved)
"""


def huge_pages_can_be_asked_for() -> bool:
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    version = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
    return version >= (6, 1) and size.exists() and int(size.read_text()) == 2 << 20


def test_huge_pages_hold_what_was_written_here_and_in_a_fork() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == huge_pages_can_be_asked_for()
