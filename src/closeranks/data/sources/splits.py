"""Selects the files and samples of the training or the evaluation part of stored data.

Invariant: both parts are determined by the job and the data alone, and share no sample.
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
    """The files that a split is read from; None if the job holds out nothing for evaluation."""
    if split == "eval" and not config.eval_path and config.eval_fraction == 0.0:
        return None
    path = config.eval_path if split == "eval" and config.eval_path else config.path
    if not path:
        raise DataError("data.path is empty", "Name a file or folder, or the URL of one.")
    return open_files(path, cache=config.cache, cache_bytes=config.cache_bytes)


def index_location(config: StoredConfig) -> IndexLocation:
    return IndexLocation(config.index, config.cache)


def name_of(config: StoredConfig, files: Files) -> str:
    """A short name for messages and identities; independent of where the data is stored."""
    return f"{config.name} '{PurePosixPath(files.url.rstrip('/')).name or files.url}'"


def samples_of(config: StoredConfig, split: Split, num_samples: int, name: str) -> range:
    """All samples if the split has files of its own; otherwise the head for training and the tail for evaluation."""
    if config.eval_path or config.eval_fraction == 0.0:
        return range(num_samples)
    cut = num_samples - num_held_out(num_samples, config.eval_fraction, name)
    return range(cut) if split == "train" else range(cut, num_samples)


def samples_per_block(block: int, per_sample: int) -> int:
    """Samples that are stored together if ``block`` items are; 0 if all orders cost the same."""
    return max(1, block // per_sample) if block else 0


def close(store: Records | Tokens, files: Files) -> None:
    """Release what a store keeps open, and the files."""
    store.close()
    files.close()
