"""Turns the table ``[model]`` of a job into a model spec.

Invariant: no module is built and no weight is initialized here; the run does that when it knows device and layout.
"""

from __future__ import annotations

from closeranks.core.protocols import ModelSpec
from closeranks.core.registry import is_import_path
from closeranks.models import digits, pairs, user  # noqa: F401  each registers its spec in the registry
from closeranks.models.config import ModelConfig
from closeranks.models.llama import spec as llama  # noqa: F401
from closeranks.models.recommender import spec as recommender  # noqa: F401
from closeranks.models.registry import MODELS


def spec_for(config: ModelConfig, *, seq_len: int) -> ModelSpec:
    """The spec of a job's model. ``seq_len`` is the data's; 0 where samples are not sequences."""
    return MODELS["user" if is_import_path(config.name) else config.name](config, seq_len=seq_len)
