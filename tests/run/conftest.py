from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from closeranks.core.system.environment import set_world
from closeranks.core.world import World


@pytest.fixture
def alone() -> Iterator[None]:
    """A silent world of one; whatever a session does, it leaves no group and the collector as it was."""
    set_world(World(launcher="testing"))
    torch.set_num_threads(1)
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    yield
    set_world(None)
    left = dist.is_initialized(), gc.isenabled(), gc.get_freeze_count() <= frozen
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()
    assert left == (False, True, True), "a group, a stopped collector or frozen objects were left behind"
