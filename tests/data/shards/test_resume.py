"""A building process that dies anywhere goes on to the very bytes of an undisturbed build."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.core.system.failpoints import FAILPOINTS
from closeranks.data.shards.commit import commit
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.shard_file import ShardFile
from closeranks.data.shards.tokens import ShardTokens
from closeranks.data.shards.verify import verify
from closeranks.data.shards.writer import TokenShardWriter
from tests.checkpoint.test_write_faults import tmpfs
from tests.data.shards.made import content, documents, opened, write_tokens

BUILD = """
import sys
import numpy as np
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

folder, kind = sys.argv[1:]
settings = {"build": "this one", "shard_bytes": 1_500_000}
tokens = kind == "tokens"
writer = TokenShardWriter(folder, "uint16", **settings) if tokens else RecordShardWriter(folder, **settings)
with writer:
    print("from", writer.cursor or 0, writer.num_done)
    for number in range(writer.cursor or 0, 40):
        values = np.random.default_rng(number).integers(0, 999, 60_000 + number).astype(np.uint16)
        writer.append(values if tokens else {"x": values, "n": number, "s": "s" * number}, cursor=number + 1)
    writer.finish_and_commit(DatasetInfo(1000 if tokens else 0, provenance={"numbers": 40}))
"""

LABELS = [
    "shard begun",
    "shard data written",
    "shard data written:2",
    "shard table written",
    "shard footer written",
    "shard durable",
    "shard named",
    "shard begun:3",
    "shard data written:7",
    "shard durable:2",
    "shard named:4",
    "shards read back",
    "document written aside",
    "document in place",
]


def build(folder: Path, kind: str, death: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CLOSERANKS_KILL_AT": death}
    return subprocess.run(
        [sys.executable, "-c", BUILD, folder, kind], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("tokens", "records")}
    for kind, folder in folders.items():
        done = build(folder, kind)
        assert done.returncode == 0, done.stderr
    return {kind: content(folder) for kind, folder in folders.items()}


@pytest.mark.parametrize("label", LABELS)
def test_a_killed_build_goes_on_to_the_same_bytes(
    tmp_path: Path, label: str, undisturbed: dict[str, dict[str, bytes]]
) -> None:
    kind = "tokens" if LABELS.index(label) % 2 else "records"
    died = build(tmp_path, kind, label)
    assert died.returncode == -signal.SIGKILL, died.stderr
    left = {name for name in content(tmp_path) if not name.startswith(".")}
    if "dataset.json" not in left:
        with pytest.raises(DataError, match="not finished"):
            ShardTokens(opened(tmp_path))
    finished = {name for name in left if name.endswith(".crs")}
    assert all(content(tmp_path)[name] == undisturbed[kind][name] for name in finished), "a named shard is whole"
    done = build(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) == int(done.stdout.split()[1])
    assert (int(done.stdout.split()[1]) > 0) == bool(finished), "finished shards are not built again"
    assert {n: d for n, d in content(tmp_path).items() if not n.startswith(".")} == undisturbed[kind]


def test_every_moment_of_a_build_is_swept() -> None:
    ours = {label for label in FAILPOINTS if label.startswith("shard")}
    assert ours == {label.partition(":")[0] for label in LABELS if label.startswith("shard")}


def test_a_torn_shard_of_any_length_is_dropped(tmp_path: Path) -> None:
    write_tokens(tmp_path / "whole", documents())
    expected = content(tmp_path / "whole")
    shard = expected["shard-00001.crs"]
    for length in (0, 10, 4096, len(shard) - 1, len(shard)):
        folder = tmp_path / f"torn-{length}"
        folder.mkdir()
        (folder / "shard-00000.crs").write_bytes(expected["shard-00000.crs"])
        (folder / "shard-00001.crs.part").write_bytes(shard[:length])
        with TokenShardWriter(folder, "uint16", vocab_size=1000, shard_bytes=12_000, block_bytes=4096) as writer:
            for number, tokens in enumerate(documents()[writer.cursor :], writer.cursor):
                writer.append(tokens, cursor=number + 1)
            writer.finish_and_commit(DatasetInfo(1000, "words", "ab" * 32, {"from": "made up"}))
        assert content(folder) == expected


def test_shards_of_another_build_are_not_continued(tmp_path: Path) -> None:
    write_tokens(tmp_path, documents(), build="one")
    for settings in ({"build": "two"}, {"build": "one", "dtype": "uint32"}, {"build": "one", "block_bytes": 8192}):
        with pytest.raises(DataError, match="shard of another build"):
            write_tokens(tmp_path, documents(), **settings)
    other = tmp_path / "other"
    write_tokens(other, documents(), dtype="uint32")
    (other / "shard-00000.crs").rename(tmp_path / "shard-00009.crs")
    with pytest.raises(DataError, match="not form one data set: tokens uint16 in blocks of 4096; tokens uint32"):
        commit(tmp_path, ["shard-00000.crs", "shard-00009.crs"], DatasetInfo())


def test_a_finished_shard_that_was_damaged_is_not_continued(tmp_path: Path) -> None:
    write_tokens(tmp_path, documents())
    path = tmp_path / "shard-00000.crs"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard-00000.crs' cannot be used: .* Remove it and run the same build again"):
        write_tokens(tmp_path, documents())


def test_two_processes_cannot_write_the_same_part(tmp_path: Path) -> None:
    with TokenShardWriter(tmp_path, "uint16", part=4) as writer:
        writer.append([1, 2])
        second = TokenShardWriter(tmp_path, "uint16", part=4)
        with pytest.raises(DataError, match=r"another process is writing .*shard-00004-00000.crs.part"):
            second.append([3])
        writer.append([3])
        (name,) = writer.finish()
    commit(tmp_path, [name], DatasetInfo(10))
    assert ShardTokens(opened(tmp_path)).read(np.array([0]), 3).tolist() == [[1, 2, 3]]


def test_a_shard_named_while_another_process_waited_for_it_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second opens ``.part``; before it has the lock, the first gives the file its name."""
    first = TokenShardWriter(tmp_path, "uint16")
    first.append([1, 2])
    real = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.finish()
        real(fd, how)

    second = TokenShardWriter(tmp_path, "uint16")
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="another process"):
        second.append([3])
    commit(tmp_path, ["shard-00000.crs"], DatasetInfo())
    assert verify(opened(tmp_path)) == []


def test_an_error_in_the_caller_leaves_finished_shards_alone(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenShardWriter(tmp_path, "uint16", shard_bytes=9000) as writer:
            for tokens in documents()[:40]:
                writer.append(tokens)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    left = list(content(tmp_path))
    assert left
    assert all(name.endswith(".crs") for name in left)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
def test_a_full_disk_is_said_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, undisturbed: dict[str, dict[str, bytes]]
) -> None:
    with tmpfs(tmp_path / "disk", "4m") as place:
        full = build(place / "set", "tokens")
        assert full.returncode == 1
        assert "no space is left to write" in full.stderr
        assert "Free some space, then run the same build again" in full.stderr
        left = content(place / "set")
        assert left
        assert all(data == undisturbed["tokens"][name] for name, data in left.items()), "no .part takes up room"
        subprocess.run(["mount", "-o", "remount,size=16m", place], check=True)
        done = build(place / "set", "tokens")
        assert done.returncode == 0, done.stderr
        assert not done.stdout.startswith("from 0 ")
        assert content(place / "set") == undisturbed["tokens"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_fails_is_said(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with TokenShardWriter(tmp_path, "uint16") as writer:
        writer.append([1])
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with pytest.raises(DataError, match=r"cannot be written: Input/output error. .*run the same build again"):
                writer.finish()
    assert content(tmp_path) == {}


def test_a_shard_file_says_what_it_holds(tmp_path: Path) -> None:
    from closeranks.data.shards.shard_format import ShardHeader

    file = ShardFile(tmp_path / "a.crs", ShardHeader("tokens", "uint16", 4096))
    file.append(b"\1\0\2\0")
    assert (file.num_items, file.num_bytes) == (1, 4 + 16)
    file.abort()
    assert content(tmp_path) == {}
