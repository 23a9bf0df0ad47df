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
        raise ValueError(f"'{text}' is not a duration: write it like 90s, 10min or 3h")
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
    """How the state of a run is saved, and what a run starts from."""

    save: bool = True
    """Save the whole state: as often as ``every`` says, at the end, and when the run is asked to stop early."""
    every: Annotated[int | str, AfterValidator(_check_every)] = "auto"
    """Steps between checkpoints (500), time between them ("10min"), or "auto": computed from the cost of a save and how
    often runs like this fail. 0: at the end only."""
    folder: str = ""
    """Where checkpoints go: a folder or an fsspec URL (s3://bucket/run); empty: checkpoints/ in the run folder."""
    remote: str = ""
    """A second, durable location for checkpoints: a folder or an fsspec URL; empty: none."""
    remote_every: int = Field(default=1, ge=1)
    """Save every Nth checkpoint to the second location too; the final one always is."""
    keep_last: int = Field(default=3, ge=2)
    """Number of newest checkpoints to keep; the newest certified one is always kept."""
    keep_every: int = Field(default=0, ge=0)
    """Never remove checkpoints whose step is a multiple of this; 0: none."""
    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the lowest evaluation loss to keep besides the newest."""
    full_every: int = Field(default=10, ge=1)
    """Every Nth checkpoint also stores what did not change (frozen weights), instead of referring to an earlier
    one's bytes."""
    read_back: bool = True
    """Read every file back from storage before a checkpoint becomes valid."""
    nice: int = Field(default=19, ge=0, le=19)
    """Niceness of the writer process: 19 uses only CPU time that nothing else needs."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long rank 0 waits for the parts of all ranks before a save counts as failed."""
    mtbf: Annotated[str, AfterValidator(_check_span)] = ""
    """For "auto": the mean time between failures of such a run ("3h"); empty: estimated from this run's own history."""
    resume: str = ""
    """Continue from this run folder, checkpoint or URL, under any layout; "auto": from this run's own folder if it has
    a checkpoint, else start from scratch; empty: start from scratch."""
    weights: str = ""
    """Start step 0 from these weights: a checkpoint, a Hugging Face folder, a torch DCP folder or a .pt file."""
