"""One flipped bit, anywhere in any file of a run's checkpoints: refused or survived, in loading, never believed."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.core.errors import CheckpointError
from tests.checkpoint import making
from tests.checkpoint.load.test_resharding_reader import read_all
from tests.checkpoint.making import Whole, a_state, filled

NUM_FLIPS = 2_000


def load(root: Path) -> tuple[int, Any] | None:
    """The step and everything of the checkpoint a resumed run would take; None: all were refused."""
    for found in find_checkpoints(str(root)).candidates():
        try:
            reader = CheckpointReader(found.storage, found.name)
            reader.check_files()
            return reader.manifest.step, (reader.tree, read_all(reader))
        except CheckpointError:
            continue
    return None


def expected(state: making.State, step: int) -> Any:
    return {"progress": {"step": step}}, {name: whole.values.tobytes() for name, whole in state.items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """Step 20 stands alone, step 40 refers to some of its bytes."""
    old = {**a_state(), ("model", "wide"): Whole("float32", filled((40, 30), "float32", 8))}
    new = {**a_state(50), ("model", "wide"): old["model", "wide"], ("model", "fresh"): old["model", "wide"]}
    base = making.write(tmp_path, 20, old)
    making.write(tmp_path, 40, new, base=base)
    return tmp_path, {20: expected(old, 20), 40: expected(new, 40)}


def flip(path: Path, bit: int) -> None:
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, bit // 8)[0] ^ (1 << bit % 8)
    os.pwrite(fd, bytes([byte]), bit // 8)
    os.close(fd)


def test_every_flipped_bit_is_refused_or_survived(saved: tuple[Path, dict[int, Any]]) -> None:
    root, states = saved
    assert load(root) == (40, states[40])
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"latest", "manifest.json", "data-00000-of-00002.safetensors"}
    draw = random.Random(4)
    outcomes: Counter[tuple[str, int]] = Counter()
    for _ in range(NUM_FLIPS):
        path = draw.choice(files)
        bit = draw.randrange(8 * path.stat().st_size)
        flip(path, bit)
        got = load(root)
        flip(path, bit)
        assert got is None or got[1] == states[got[0]], f"bit {bit} of {path} was believed"
        outcomes[path.name, got[0] if got else 0] += 1
    assert load(root) == (40, states[40])
    told = Counter({name: sum(n for (of, _), n in outcomes.items() if of == name) for name, _ in outcomes})
    assert sum(told.values()) == NUM_FLIPS
    assert outcomes["latest", 40] == told["latest"], "the manifests themselves survive a damaged latest"
    assert outcomes["manifest.json", 20] > 0, "a damaged newest manifest falls back to the one before"
    assert any(step == 20 for name, step in outcomes if name.startswith("data-")), "so do damaged bytes"
    assert any(step == 0 for name, step in outcomes if name.startswith("data-")), "shared bytes leave nothing to load"
