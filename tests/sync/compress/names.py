"""Every compressor that a job can name, so that a new one is tried where all are."""

from __future__ import annotations

from typing import get_args

from closeranks.sync.config import CompressConfig

COMPRESSORS: tuple[str, ...] = tuple(get_args(CompressConfig.model_fields["name"].annotation))[1:]
"""All names but "none"."""
