"""Split the slow tier into five parts of about equal duration; CI runs one of them per commit.

Invariant: every test is in exactly one part, which depends only on its node id and on ``durations.txt``. A test that
is added or removed moves no other test.

    python -m tests.parts                       # seconds, tests and files of each part
    python -m tests.parts --measure a.xml ...   # write durations.txt anew from pytest's --junitxml
"""

from __future__ import annotations

import argparse
import math
import subprocess
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from zlib import crc32

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("durations.txt")
NUM_PARTS = 5
NUM_PROCESSES = 2
"""``make test-part`` runs a part on this many processes, each file on one of them."""
HEADER = "# Seconds of each slow test; written by: python -m tests.parts --measure JUNIT_XML...\n"


class Block(NamedTuple):
    """Tests of one file that stay together: they may share costly module-scoped fixtures."""

    seconds: float
    nodes: tuple[str, ...]

    @property
    def file(self) -> str:
        return file_of(self.nodes[0])


def file_of(node: str) -> str:
    return node.partition("::")[0]


def assign(nodes: Iterable[str], durations: Mapping[str, float]) -> dict[str, int]:
    """The part of each node id; a test without a measured duration goes where its file is, or by its file's name."""
    measured = _assign_measured(durations)
    of_files = {file_of(node): part for node, part in reversed(measured.items())}
    return {
        node: measured.get(node, of_files.get(file_of(node), crc32(file_of(node).encode()) % NUM_PARTS))
        for node in nodes
    }


def _assign_measured(durations: Mapping[str, float]) -> dict[str, int]:
    """Longest block first, each into the part with the fewest seconds that has no block of its file yet."""
    limit = sum(durations.values()) / (NUM_PARTS * NUM_PROCESSES)
    by_file = groupby(sorted(durations, key=file_of), key=file_of)
    blocks = [block for _, nodes in by_file for block in _cut([*nodes], durations, limit)]
    seconds, files = [0.0] * NUM_PARTS, [set[str]() for _ in range(NUM_PARTS)]
    parts = {}
    for block in sorted(blocks, key=lambda block: (-block.seconds, block.nodes)):
        part = min(range(NUM_PARTS), key=lambda part: (block.file in files[part], seconds[part], part))
        seconds[part] += block.seconds
        files[part].add(block.file)
        parts.update(dict.fromkeys(block.nodes, part))
    return {node: parts[node] for node in durations}


def _cut(nodes: list[str], durations: Mapping[str, float], limit: float) -> list[Block]:
    """One file as a whole, or in runs of consecutive tests where it would keep one process busy for longer than all."""
    total = sum(durations[node] for node in nodes)
    num_blocks = max(1, min(NUM_PARTS, math.ceil(total / limit))) if limit else 1
    numbered, before = list[tuple[int, str]](), 0.0
    for node in nodes:
        middle = before + durations[node] / 2
        numbered.append((int(num_blocks * middle / total) if total else 0, node))
        before += durations[node]
    runs = (tuple(node for _, node in run) for _, run in groupby(numbered, key=lambda pair: pair[0]))
    return [Block(sum(durations[node] for node in run), run) for run in runs]


def read_durations() -> dict[str, float]:
    lines = (line for line in TABLE.read_text().splitlines() if not line.startswith("#"))
    return {node: float(seconds) for seconds, _, node in (line.partition(" ") for line in lines)}


def format_durations(durations: Mapping[str, float]) -> str:
    """Sorted by file; within a file as they ran, so that neighbours share what they share."""
    return HEADER + "".join(f"{durations[node]:.1f} {node}\n" for node in sorted(durations, key=file_of))


def measure(junits: Iterable[Path]) -> dict[str, float]:
    """Seconds per node id, set-up and tear-down included."""
    seconds: dict[str, float] = {}
    for case in (case for path in junits for case in ElementTree.parse(path).iter("testcase")):
        node = _node_id(case.attrib["classname"], case.attrib["name"])
        seconds[node] = seconds.get(node, 0.0) + float(case.attrib["time"])
    return seconds


def _node_id(classname: str, name: str) -> str:
    """JUnit's ``tests.run.test_x.TestY`` says neither where the file ends nor where a class begins."""
    words = classname.split(".")
    length = next(n for n in range(1, len(words) + 1) if (ROOT / "/".join(words[:n])).with_suffix(".py").is_file())
    return "::".join([f"{'/'.join(words[:length])}.py", *words[length:], name])


class Choice(NamedTuple):
    part: int
    reason: str

    def __str__(self) -> str:
        return f"part {self.part} of {NUM_PARTS} ({self.reason})"


def choose(asked: str, root: Path = ROOT) -> Choice:
    """The part that was asked for, or with ``auto`` the one whose turn it is. Raises ``ValueError`` otherwise."""
    if asked == "auto":
        return _by_commit(root)
    if asked not in map(str, range(NUM_PARTS)):
        raise ValueError(f"a part of the slow tests is 0 to {NUM_PARTS - 1}, or auto; got {asked!r}")
    return Choice(int(asked), "as asked for")


def _by_commit(root: Path) -> Choice:
    """A shallow clone cannot count its commits; their hashes visit all parts too, in no particular order."""
    try:
        if _git(root, "rev-parse", "--is-shallow-repository") == "true":
            commit = _git(root, "rev-parse", "HEAD")
            return Choice(int(commit, 16) % NUM_PARTS, f"shallow clone: commit {commit[:12]} mod {NUM_PARTS}")
        count = int(_git(root, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"git cannot count the commits of {root}; choose a part, such as PART=0") from error
    return Choice(count % NUM_PARTS, f"commit count {count} mod {NUM_PARTS}")


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def summary(durations: Mapping[str, float]) -> str:
    parts = assign(durations, durations)
    lines = []
    for part in range(NUM_PARTS):
        nodes = [node for node in durations if parts[node] == part]
        seconds, files = sum(durations[node] for node in nodes), {file_of(node) for node in nodes}
        lines.append(f"part {part}: {seconds:6.0f} s in {len(nodes)} tests of {len(files)} files")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description="The five parts of the slow tier.")
    parser.add_argument("--measure", nargs="+", type=Path, metavar="JUNIT_XML", help="write durations.txt from these")
    args = parser.parse_args()
    if args.measure:
        TABLE.write_text(format_durations(measure(args.measure)))
    print(summary(read_durations()))


if __name__ == "__main__":
    main()
