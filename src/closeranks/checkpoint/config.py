"""What can a job say about saving and resuming? The table ``[checkpoint]``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from closeranks.core.config.table import ConfigTable

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")


def seconds_of(text: str) -> float:
    """``"90s"``, ``"10min"`` or ``"3h"`` in seconds."""
    match = _SPAN.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ValueError(f"'{text}' is no span of time: write it like 90s, 10min or 3h")
    return float(match[1]) * _SECONDS[match[2]]


def _check_every(value: int | str) -> int | str:
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a number of steps cannot be negative")
        return value
    if value != "auto":
        seconds_of(value)
    return value


def _check_span(value: str) -> str:
    if value:
        seconds_of(value)
    return value


class CheckpointConfig(ConfigTable):
    """How the state of a run outlives it."""

    save: bool = True
    """Save the whole state: as often as ``every`` says, at the end, and when the run is asked to stop early."""
    every: Annotated[int | str, AfterValidator(_check_every)] = "auto"
    """Steps between checkpoints (500), time between them ("10min"), or "auto": weighed from what a save costs and how
    often runs like this fail. 0: at the end only."""
    folder: str = ""
    """Where checkpoints lie: a folder or an fsspec URL (s3://bucket/run); empty: checkpoints/ in the run folder."""
    remote: str = ""
    """A second, durable place for them, a folder or an fsspec URL; empty: none."""
    remote_every: int = Field(default=1, ge=1)
    """Every how manyth checkpoint goes to the second place too; the one at the end always does."""
    keep_last: int = Field(default=3, ge=2)
    """How many of the newest checkpoints stay; the newest certified one always does."""
    keep_every: int = Field(default=0, ge=0)
    """Keep for good those whose step is a multiple of this; 0: none."""
    keep_best: int = Field(default=0, ge=0)
    """How many of the best by evaluated loss stay beside the newest."""
    full_every: int = Field(default=10, ge=1)
    """Every how manyth checkpoint repeats also what did not change (frozen weights), instead of referring to an earlier
    one's bytes."""
    read_back: bool = True
    """Read every file back from the medium before a checkpoint counts."""
    nice: int = Field(default=19, ge=0, le=19)
    """How far the writing process steps back for training: 19 takes only what nobody else wants."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long rank 0 waits for the parts of all ranks before a save counts as failed."""
    mtbf: Annotated[str, AfterValidator(_check_span)] = ""
    """For "auto": how long such a run lives between failures ("3h"); empty: estimated from this run's own history."""
    resume: str = ""
    """Continue from this run folder, checkpoint or URL, under any layout; "auto": from this run's own folder if it has
    a checkpoint, else start anew; empty: start anew."""
    weights: str = ""
    """Start step 0 from these weights: a checkpoint, a Hugging Face folder, a torch DCP folder or a .pt file."""
