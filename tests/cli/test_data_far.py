"""Training from a store that misbehaves: what is learned is what a local disk gives, or the run says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.events import StepDone
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import TokenShardWriter
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import Done, closeranks
from tests.cli.test_data_runs import job
from tests.data.files.test_remote import gets, upload
from tests.storage import servers
from tests.storage.proxy import Rule, Standing
from tests.storage.test_conformance import put
from tests.storage.test_s3_faults import opened

NUM_SHARDS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    tokens = np.random.default_rng(0).integers(0, 256, 6 * 3000).astype(np.uint8)
    with TokenShardWriter(folder, dtype="uint8", vocab_size=256, shard_bytes=3000) as writer:
        for part in np.array_split(tokens, NUM_SHARDS):
            writer.append(part)
        writer.finish_and_commit(DatasetInfo(vocab_size=256))
    assert len(list(folder.glob("*.crs"))) == NUM_SHARDS
    return folder


def go(folder: Path, path: str, *settings: str, env: dict[str, str] | None = None, num_workers: int = 2) -> Done:
    folder.mkdir(exist_ok=True)
    data = f'[data]\nname = "tokens"\npath = "{path}"\nseq_len = 16\nshuffle = "blocks"\nlog_samples = true'
    return closeranks(
        *("train", job(folder, data), "-n", num_workers, "checkpoint.save=false", *settings),
        cwd=folder,
        env=env,
        timeout_s=300,
    )


def losses(folder: Path) -> list[float]:
    lines = read_events(folder / "run" / "metrics" / "rank-00000.jsonl")
    return [event.loss for _, event in lines if isinstance(event, StepDone)]


def access(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET}
    return {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}


@contextmanager
def stored(moto: servers.Server, corpus: Path, name: str) -> Iterator[str]:
    prefix = f"{servers.BUCKET}/{name}"
    upload(moto, prefix, {path.name: path.read_bytes() for path in corpus.iterdir() if path.is_file()})
    yield prefix


@pytest.mark.world
def test_errors_and_lost_connections_change_nothing(
    tmp_path: Path, corpus: Path, moto: servers.Server, proxied: Standing
) -> None:
    near = go(tmp_path / "near", str(corpus))
    assert near.code == 0, near.err
    rules = [
        Rule("GET", "shard-", times=2, status=503),
        Rule("GET", "shard-", times=2, status=500, code="InternalError"),
        Rule("GET", "shard-", times=2, cut_answer_after_bytes=700),
        Rule("GET", "shard-", times=3, delay_s=0.2),
    ]
    with stored(moto, corpus, tmp_path.name) as prefix, proxied(moto.endpoint, *rules) as proxy:
        cache = f"data.cache={tmp_path / 'cache'}"
        far = go(tmp_path / "far", f"s3://{prefix}", cache, env=access(proxy.endpoint))
        assert far.code == 0, far.err
        assert all(rule.num_applied == rule.times for rule in rules)
        asked = gets(proxy)
    assert losses(tmp_path / "far") == losses(tmp_path / "near")
    failed = sum(rule.times for rule in rules if not rule.delay_s)
    # One download a shard for both ranks, and one more for each that was answered badly.
    assert sum(count for name, count in asked.items() if name.startswith("shard-")) == NUM_SHARDS + failed
    assert far.left_behind == []


@pytest.mark.world
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param("missing", ("shard-00003.crs",), marks=pytest.mark.slow),
        pytest.param("short", ("shard-00003.crs",), marks=pytest.mark.slow),
        ("flipped", ("shard-00003.crs", "checksum", "data.on_bad")),
        ("full", ("the cache may take", "data.cache_bytes")),
    ],
)
def test_what_cannot_be_read_is_named_on_a_run(
    tmp_path: Path, corpus: Path, moto: servers.Server, harm: str, words: tuple[str, ...]
) -> None:
    with stored(moto, corpus, f"{tmp_path.name}-{harm}") as prefix:
        storage, name = opened(moto.endpoint, prefix), "shard-00003.crs"
        content = (corpus / name).read_bytes()
        settings = [f"data.cache={tmp_path / 'cache'}"]
        if harm == "missing":
            storage.remove(name)
        elif harm == "short":
            put(storage, name, content[:-9], step=1 << 20)
        elif harm == "flipped":
            changed = bytearray(content)
            changed[len(changed) // 2] ^= 4
            put(storage, name, bytes(changed), step=1 << 20)
        else:
            settings.append(f"data.cache_bytes={len(content) - 1}")
        done = go(tmp_path / "run", f"s3://{prefix}", *settings, env=access(moto.endpoint))
    assert done.code == 2, done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert done.left_behind == []
    assert os.listdir(tmp_path / "run" / "run" / "metrics")


@pytest.mark.slow
def test_a_copy_that_was_damaged_in_the_cache_is_fetched_again(
    tmp_path: Path, corpus: Path, moto: servers.Server
) -> None:
    """By both runs it is read whole: what lies in the store is sound, so nothing is skipped and nothing stops."""
    cache = tmp_path / "cache"
    settings = [f"data.cache={cache}", "data.on_bad=skip", "data.max_bad=0"]
    with stored(moto, corpus, tmp_path.name) as prefix:
        runs = [tmp_path / "first", tmp_path / "second"]
        for run in runs:
            done = go(run, f"s3://{prefix}", *settings, env=access(moto.endpoint), num_workers=1)
            assert done.code == 0, done.err
            for path in cache.glob("file-*"):
                content = bytearray(path.read_bytes())
                content[5000] ^= 1
                path.write_bytes(content)
    assert losses(runs[0]) == losses(runs[1])
