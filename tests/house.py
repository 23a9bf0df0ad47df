"""Figures of the source tree: how much of it a step, a save and a resume enter, and how large its rooms are.

``make house`` prints them, so that a change of structure can be compared with what existed before. Counted are calls
of our functions in the main thread of one process.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

from torch import nn

import closeranks
from closeranks import Session
from tests.run import small

ROOT = Path(closeranks.__file__).parent
_SLOWEST = 15
_LONGEST = 5


@dataclass
class Entered:
    """What one action went through."""

    files: int
    calls: int
    changes: int
    """How often the file of a call was not that of the call before."""


@contextmanager
def traced() -> Iterator[list[str]]:
    """The file of each call of ours, in order."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(str(ROOT)):
            calls.append(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def entered(action: Callable[[], object]) -> Entered:
    with traced() as calls:
        action()
    return Entered(len(set(calls)), len(calls), sum(one != other for one, other in pairwise(calls)))


def entered_by_actions(folder: Path) -> dict[str, Entered]:
    """A step (not the first), a save and a resume of a two-layer model on one process."""
    session = _session(folder / "first")
    steps = iter(session)
    taken = next(steps)

    def step() -> None:
        """From the first batch of one step to the first of the next."""
        nonlocal taken
        for batch in taken:
            taken.backward(nn.functional.cross_entropy(session.model(batch["x"]), batch["y"]))
        taken = next(steps, None)

    step()
    step()
    found = {"step": entered(step), "save": entered(session.save)}
    while taken is not None:
        step()
    opened: list[Session] = []
    resume = {"resume": str(folder / "first")}
    found["resume"] = entered(lambda: opened.append(_session(folder / "second", 12, checkpoint=resume)))
    opened[0].close()
    return found


def _session(folder: Path, num_steps: int = 6, **tables: dict[str, Any]) -> Session:
    quiet = {"report": False, "log_every": 1000}
    how = {"steps": num_steps, "global_batch": 8, "micro_batch": 8}
    return small.open_session(folder, telemetry=quiet, train=how, **tables)


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def rooms() -> dict[str, tuple[int, int]]:
    """Files and lines of each room."""
    found: dict[str, list[int]] = {}
    for path in sources():
        parts = path.relative_to(ROOT).parts
        found.setdefault(parts[0] if len(parts) > 1 else ".", []).append(len(path.read_text().splitlines()))
    return {room: (len(lines), sum(lines)) for room, lines in sorted(found.items())}


def folders() -> dict[str, int]:
    """Modules of each folder, packages' own ``__init__`` not counted."""
    return Counter(str(path.parent.relative_to(ROOT)) for path in sources() if path.name != "__init__.py")


def repeated_classes() -> dict[str, int]:
    """Public class names that several files define."""
    names: Counter[str] = Counter()
    for path in sources():
        tree = ast.parse(path.read_text())
        names.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    return {name: count for name, count in names.most_common() if count > 1}


def longest_functions() -> list[tuple[int, str]]:
    """Lines and names, the longest first."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((length, f"{path.relative_to(ROOT)}:{node.name}"))
    return sorted(found, reverse=True)[:_LONGEST]


def slowest_tests(junit: Path) -> list[tuple[float, str]]:
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    times = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(times, reverse=True)[:_SLOWEST]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--junit", type=Path, help="what pytest --junitxml wrote: its slowest tests are listed")
    junit = parser.parse_args().junit
    with tempfile.TemporaryDirectory() as folder:
        actions = entered_by_actions(Path(folder))
    print(f"{'action':<10}{'files':>8}{'calls':>8}{'changes of file':>18}")
    for name, one in actions.items():
        print(f"{name:<10}{one.files:>8}{one.calls:>8}{one.changes:>18}")
    print(f"\n{'room':<12}{'files':>8}{'lines':>8}")
    for room, (num_files, num_lines) in rooms().items():
        print(f"{room:<12}{num_files:>8}{num_lines:>8}")
    longest = sorted(((len(path.read_text().splitlines()), path) for path in sources()), reverse=True)[:_LONGEST]
    print("\nlongest files: " + ", ".join(f"{path.relative_to(ROOT)} {lines}" for lines, path in longest))
    functions = longest_functions()
    print("longest functions: " + ", ".join(f"{name} {lines}" for lines, name in functions))
    repeated = repeated_classes()
    shown = ", ".join(f"{name} x{count}" for name, count in repeated.items())
    print(f"\n{len(repeated)} public class names occur more than once: {shown}")
    if junit:
        print("\nslowest tests:")
        for seconds, name in slowest_tests(junit):
            print(f"{seconds:8.1f} s  {name}")
    totals = [sum(column) for column in zip(*rooms().values(), strict=True)]
    figures = {
        **{name: asdict(one) for name, one in actions.items()},
        "num_files": totals[0],
        "num_lines": totals[1],
        "longest_file": longest[0][0],
        "longest_function": functions[0][0],
        "repeated_class_names": len(repeated),
        "longest_folder": max(folders().values()),
    }
    print(json.dumps({"name": "house", **figures}))


if __name__ == "__main__":
    main()
