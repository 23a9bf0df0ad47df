"""Which files, and which of their samples, make up the training or the evaluation part of stored data?

Invariant: both parts follow from the job and the data alone, and share no sample.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TypeAlias

from closeranks.core.errors import DataError
from closeranks.data.config import RecordsConfig, TokensConfig
from closeranks.data.dataset_protocol import Records, Tokens
from closeranks.data.files.open import open_files
from closeranks.data.files.protocol import Files
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.sources.registry import Split, num_held_out

StoredConfig: TypeAlias = TokensConfig | RecordsConfig


def files_of(config: StoredConfig, split: Split) -> Files | None:
    """The files a split is read from; None where the job keeps nothing for evaluation."""
    if split == "eval" and not config.eval_path and config.eval_fraction == 0.0:
        return None
    path = config.eval_path if split == "eval" and config.eval_path else config.path
    if not path:
        raise DataError("data.path is empty", "Name a file or folder, or the URL of one.")
    return open_files(path, cache=config.cache, cache_bytes=config.cache_bytes)


def index_location(config: StoredConfig) -> IndexLocation:
    return IndexLocation(config.index, config.cache)


def name_of(config: StoredConfig, files: Files) -> str:
    """Short, for messages and identities: where the data lies is not what it is."""
    return f"{config.name} '{PurePosixPath(files.url.rstrip('/')).name or files.url}'"


def samples_of(config: StoredConfig, split: Split, num_samples: int, name: str) -> range:
    """All samples of a split that has files of its own, else the head for training and the tail for evaluation."""
    if config.eval_path or config.eval_fraction == 0.0:
        return range(num_samples)
    cut = num_samples - num_held_out(num_samples, config.eval_fraction, name)
    return range(cut) if split == "train" else range(cut, num_samples)


def samples_per_block(block: int, per_sample: int) -> int:
    """Samples that lie together where ``block`` items do; 0 where any order costs the same."""
    return max(1, block // per_sample) if block else 0


def close(store: Records | Tokens, files: Files) -> None:
    """Let go of what a store keeps open, and of the files."""
    store.close()
    files.close()
