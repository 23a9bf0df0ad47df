"""What can a job say about saving and resuming? The table ``[checkpoint]``."""

from __future__ import annotations

from closeranks.core.config.table import Table


class CheckpointConfig(Table):
    """How the state of a run outlives it."""

    save: bool = True
    """Save the whole state at the end, and when the run is asked to stop early."""
    resume: str = ""
    """Continue from this run folder, or from the state file or folder in it, under any layout; empty: start anew."""
