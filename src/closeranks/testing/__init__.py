"""Test your own distributed code the way closeranks tests its own: ``from closeranks.testing import run_world``."""

from closeranks.testing.world import Failure, WorldError, run_world

__all__ = ["Failure", "WorldError", "run_world"]
