"""Classifies errors of the user's code while samples are read: is one sample bad, or the data as a whole unreadable?

Invariant: only the error of a single sample may be skipped; data that cannot be reached never looks like a bad sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from closeranks.core.errors import BadRecordError, DataError
from closeranks.core.tracebacks import describe_error


def sample_error(named: str, error: Exception, fix: str) -> DataError:
    """The error to raise for an error of the user's code; ``named`` says what was being read, and from where."""
    what = f"{named} raised {describe_error(error)}"
    if _is_out_of_reach(error):
        return DataError(what, "Check that the files it needs are there and can be read.")
    return BadRecordError(what, fix)


def _is_out_of_reach(error: Exception) -> bool:
    """Image libraries raise a bare ``OSError`` without an errno for a damaged image: that one is the sample's."""
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError)
    is_of_image = type(error) is OSError or type(error).__module__.startswith("PIL")
    return error.errno is not None or not is_of_image


def name_some_samples(indices: Sequence[int], limit: int = 8) -> str:
    """``sample 3``, or ``one of samples 3, 5 and 70 more``."""
    shown = ", ".join(map(str, indices[:limit]))
    more = f" and {len(indices) - limit} more" if len(indices) > limit else ""
    return f"sample {shown}" if len(indices) == 1 else f"one of samples {shown}{more}"
