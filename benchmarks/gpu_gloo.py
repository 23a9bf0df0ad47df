"""What can several ranks do on one GPU over Gloo? Which collectives work on its tensors, and which layouts train?

NCCL refuses two ranks on one device; Gloo copies through the host. Each collective that closeranks uses is tried in
float32 and bf16; then a tiny Llama is trained under each layout and its losses are compared with those of one process.
What cannot run is listed in torch's own words. Every try runs in processes of its own with a time limit, after which
they are killed.

    PYTHONPATH=src python benchmarks/gpu_gloo.py                   2 and 4 ranks on the first GPU
    python benchmarks/gpu_gloo.py --device cpu --ranks 2           the same on the CPU
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gloo_tries import DTYPES, OPS, WORKS, Try, told_by, train, try_all
from results import conclude, say
from teams import last_words

from closeranks.testing.world import WorldError, run_world

TOLERANCE = 1e-4  # of the loss, in float32: sums are taken in another order
LAYOUTS: dict[str, dict[str, Any]] = {
    "data=2": {"data": 2},
    "data=2 zero=1": {"data": 2, "zero": 1},
    "data=2 zero=3": {"data": 2, "zero": 3},
    "tensor=2": {"tensor": 2},
    "pipeline=2": {"pipeline": 2},
    "data=4": {"data": 4},
    "data=4 zero=3 shard=2": {"data": 4, "zero": 3, "shard": 2},
    "data=2 tensor=2": {"data": 2, "tensor": 2},
    "data=2 zero=1 pipeline=2": {"data": 2, "zero": 1, "pipeline": 2},
    "tensor=2 pipeline=2": {"tensor": 2, "pipeline": 2},
}


def main() -> None:
    args = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Any] = {"device": args.device, "collectives": {}, "layouts": {}}
    for size in args.ranks:
        say(f"{size} ranks on one {args.device} device over Gloo")
        found = figures["collectives"][str(size)] = probe(size, args.device, args.timeout_s)
        for name, words in found.items():
            say(f"  {name:<36} {words}")
    chosen = [name for name, layout in LAYOUTS.items() if num_ranks(layout) in args.ranks and name in args.layouts]
    figures["layouts"] = train_all(chosen, args) if chosen else {}
    goal = "every layout trains on one device and agrees with one process"
    conclude("gpu_gloo", figures, goal, judge(figures["layouts"]))


def judge(layouts: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(layouts) and all(found["agrees"] for found in layouts.values())


def num_ranks(layout: Mapping[str, int]) -> int:
    return layout.get("data", 1) * layout.get("tensor", 1) * layout.get("pipeline", 1)


def probe(size: int, device: str, timeout_s: float) -> dict[str, str]:
    """Every collective to ``works`` or to what it said; after one that did not work a new world tries the others."""
    pending = [Try(op, dtype) for op in OPS for dtype in DTYPES]
    found: dict[str, str] = {}
    while pending:
        with tempfile.TemporaryDirectory(prefix="closeranks-gloo-") as folder:
            words = "it ended without a word"
            try:
                run_world(try_all, size, pending, device, folder, timeout_s=timeout_s)
            except WorldError as error:
                words = in_words(error, timeout_s)
            results = verdicts([told_by(Path(folder), rank) for rank in range(size)], words)
        found |= {str(one): result for one, result in zip(pending, results, strict=False)}
        pending = pending[len(results) :]
    return found


def verdicts(ranks: Sequence[Sequence[str]], ending: str) -> list[str]:
    """What the tries came to, up to the first that did not work on every rank; if no rank complained of that one, it
    is told by how the world ended."""
    results: list[str] = []
    for one in zip_longest(*ranks, fillvalue=None):
        complaint = next((words for words in one if words not in (WORKS, None)), None)
        results.append(complaint or (ending if None in one else WORKS))
        if results[-1] != WORKS:
            return results
    return results or [ending]


def train_all(names: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="closeranks-gloo-") as folder:
        expected, words = _losses("one process", {}, args, folder)
        if not expected:
            say(f"  one process: {words}")
        found = {}
        for name in names:
            losses, words = _losses(name, LAYOUTS[name], args, folder)
            found[name] = compare(losses, expected, words)
            say(f"  {name:<36} {found[name]['words']}")
    return found


def _losses(name: str, layout: Mapping[str, int], args: argparse.Namespace, folder: str) -> tuple[list[float], str]:
    """The losses of a short training, or why there are none."""
    place = Path(folder) / name.replace(" ", "-")
    try:
        told = run_world(train, num_ranks(layout), layout, args.device, place, timeout_s=args.timeout_s)
    except WorldError as error:
        return [], in_words(error, args.timeout_s)
    return told[0], ""


def compare(losses: Sequence[float], expected: Sequence[float], words: str) -> dict[str, Any]:
    """Whether a layout trained, and as one process does."""
    if not losses or len(losses) != len(expected):
        return {"agrees": False, "gap": None, "words": words or "nothing to compare with"}
    gap = max(abs(own - other) / abs(other) for own, other in zip(losses, expected, strict=True))
    agrees = gap <= TOLERANCE  # not a number agrees with none
    verdict = "agrees with" if agrees else "DIFFERS from"
    return {"agrees": agrees, "gap": gap, "words": f"{verdict} one process ({gap:.1e} over {len(losses)} steps)"}


def in_words(error: WorldError, timeout_s: float) -> str:
    hung = [failure.rank for failure in error.failures if failure.kind == "hung"]
    return f"ranks {hung} did not end in {timeout_s:g} s" if hung else last_words(error)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--timeout-s", type=float, default=90.0, help="for each try")
    return parser.parse_args()


if __name__ == "__main__":
    main()
