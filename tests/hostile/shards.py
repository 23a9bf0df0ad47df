"""Data sets that are not what they say: shards damaged, cut, or replaced by FIFOs and devices."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile import checks
from tests.hostile.cases import between, kind, one_of
from tests.hostile.checks import Problem
from tests.hostile.forged import DAMAGES, SPECIAL, damage, is_root, replace
from tests.hostile.jobs import SHAPES
from tests.hostile.lab import Done, Lab

_PATIENCE_S = 60.0
READERS = ("verify", "verify", "stats", "show", "train")


@kind(
    "data files",
    is_live=False,
    needs=is_root,
    target=one_of("shard", "dataset.json"),
    how=one_of(*DAMAGES, *SPECIAL),
    reader=one_of(*READERS),
    salt=between(0, 10**6),
)
def damaged_data(lab: Lab, target: str, how: str, reader: str, salt: int) -> None:
    """Named in a sentence by whoever reads it; verify never calls it sound, and nothing is trained on it unnoticed."""
    path = min(_shards(lab).glob("dataset.json" if target == "dataset.json" else "*.crs"))
    if how in SPECIAL:
        replace(path, SPECIAL[how])
    else:
        damage(path, how, random.Random(salt))
    done = _read(lab, reader)
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {0, 1, 2}, done.said)
    if reader == "verify" and done.code == 0:
        raise Problem(f"verify finds nothing wrong with {path.name} ({how}): {done.out[-300:]}")


def _shards(lab: Lab) -> Path:
    (lab.folder / "text.txt").write_text("\n".join(" ".join(map(str, range(n, n + 60))) for n in range(60)))
    done = lab.command("data", "build", "text.txt", "--out", "corpus", "--split", "line")
    checks.check_code(done.code, {0}, done.said)
    return lab.folder / "corpus"


def _read(lab: Lab, reader: str) -> Done:
    if reader == "train":
        workers = SHAPES[lab.shape].num_workers
        data = ["data.name=tokens", "data.path=corpus", "~data.max_bytes", "train.steps=6", "run.hooks=[]"]
        return lab.command("train", lab.job, "-n", workers, *data, "checkpoint.save=false", timeout_s=300.0)
    words = ["data", "show", "3", "corpus"] if reader == "show" else ["data", reader, "corpus"]
    return lab.command(*words, timeout_s=_PATIENCE_S)
