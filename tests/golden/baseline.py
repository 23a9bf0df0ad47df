"""What a run is compared with: the committed record where it was made on such a machine, else the code that made it.

The bits of a computation depend on the CPU and on torch. Where both are those of the record, the record counts, and so
it does for a run that has its bits on another CPU. For any other run there, the code of the commit that wrote the
record is run too, and what it gives counts: any change since then is seen on any machine. Invariant: there is always
something to compare with, or an error that says how to get it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.jobs import group_of
from tests.golden.record import FOLDER, Record, differences, environment, load, load_runs

ROOT = Path(__file__).parents[2]


class NoBaseline(AssertionError):
    """Neither the record nor the code that made it can be used here."""


@dataclass(frozen=True)
class Baseline:
    runs: dict[str, Record]
    words: dict[str, str]
    """Of each run: what it is compared with, for people."""


def baseline_for(found: Mapping[str, Record]) -> Baseline:
    """Of runs that were made here."""
    here, runs, words = environment(), {}, {}
    elsewhere: dict[str, list[str]] = {}
    for name, run in found.items():
        told = load(group_of(name))
        if told["environment"] == here or not differences(told["runs"][name], run):
            runs[name], words[name] = told["runs"][name], "the committed record"
        else:
            elsewhere.setdefault(_written_by(group_of(name)), []).append(name)
    for revision, those in elsewhere.items():
        runs.update(made_by(revision, those))
        what = f"commit {revision[:12]}, run here: the record is of another CPU or torch"
        words.update(dict.fromkeys(those, what))
    return Baseline(runs, words)


def has_history() -> bool:
    return (ROOT / ".git").exists()


def _written_by(group: str) -> str:
    """The commit that last wrote the record of a group; in a clone whose history ends before it, the parent of HEAD."""
    path = str((FOLDER / f"{group}.json").relative_to(ROOT))
    commit = _git("log", "-1", "--format=%H", "--", path).strip() or _lacking(f"{path} is in no commit")
    is_shallow = _git("rev-parse", "--is-shallow-repository").strip() == "true"
    if not is_shallow or commit not in _git("rev-list", "--max-parents=0", "HEAD").split():
        return commit
    parents = _git("log", "-1", "--format=%P").split()
    return parents[0] if parents else _lacking("this clone has the last commit alone")


def _lacking(why: str) -> str:
    what = "The golden record was made on another CPU or torch, so the commit that wrote it must be run here, but"
    fix = "Compare in a clone with its whole history (git fetch --unshallow)."
    raise NoBaseline(f"{what} {why}. {fix}")


def made_by(revision: str, names: Iterable[str]) -> dict[str, Record]:
    """What the code of another commit makes of these jobs on this machine."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        tree = Path(folder) / "tree"
        extract(revision, tree)
        return made_in(tree, names)


def extract(revision: str, tree: Path) -> None:
    """The files of a commit; where it has no golden record yet, with the jobs of this one."""
    archive = tree.with_suffix(".tar")
    _git("archive", "--format=tar", f"--output={archive}", revision)
    with tarfile.open(archive) as file:
        file.extractall(tree, filter="data")
    if not (tree / "tests" / "golden" / "__main__.py").exists():
        shutil.copytree(Path(__file__).parent, tree / "tests" / "golden", dirs_exist_ok=True)


def made_in(tree: Path, names: Iterable[str]) -> dict[str, Record]:
    """By the code and the jobs of a tree, in processes of their own."""
    out = tree / "golden-record"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    words = [sys.executable, "-m", "tests.golden", "--write", "--to", str(out), "--jobs", *names]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoBaseline(f"The code in {tree} could not train the golden jobs:\n{done.stdout}\n{done.stderr}")
    return load_runs(out)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else _lacking(f"git {words[0]} says: {done.stderr.strip()}")


# --- the record is not edited


def unexplained(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Runs that a later version of a record changes or drops, with neither a new torch nor a reason."""
    if old["environment"]["torch"] != new["environment"]["torch"] or len(new["reasons"]) > len(old["reasons"]):
        return []
    return [name for name, run in old["runs"].items() if new["runs"].get(name) != run]
