"""What is a table of a job file? The base of every room's config model.

Invariant: a key nobody knows is a problem, never ignored; a loaded table does not change.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table of the job. The docstring under each field is its help in ``--explain`` and in the JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
