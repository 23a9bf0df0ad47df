"""Which settings does the agent take from a job?

Invariant: the defaults reach nothing outside this host; another address must be asked for.
"""

from __future__ import annotations

from pydantic import Field

from closeranks.core.config.table import ConfigTable


class AgentConfig(ConfigTable):
    """How workers of this host are started, watched and ended."""

    grace_s: float = Field(default=30.0, ge=0.0)
    """How long a run may take after SIGTERM to finish its step and save, before its workers are killed."""
    interrupt_s: float = Field(default=1.5, ge=0.0)
    """The same after Ctrl-C. A second Ctrl-C kills at once."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the store that workers use for rendezvous; 0: any free port."""
    host: str = "127.0.0.1"
    """Address that the store and the workers bind to."""
