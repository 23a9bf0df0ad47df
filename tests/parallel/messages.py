"""What an exchange sends, counted on its way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from closeranks.parallel.pipeline.p2p import MessageKey, P2PChannel

_FIRST_TAG = MessageKey("forward", 0, 0).tag


@dataclass
class Traffic:
    """One way, headers aside."""

    num_sent: int = 0
    sent_bytes: int = 0


@dataclass
class Messages:
    num_headers: int = 0
    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)

    def count(self, tensor: Tensor, tag: int) -> None:
        if tag < _FIRST_TAG:
            self.num_headers += 1
            return
        way = self.backward if tag & 1 else self.forward
        way.num_sent += 1
        way.sent_bytes += tensor.nbytes


@contextmanager
def counted() -> Iterator[Messages]:
    """Of all exchanges of this process, until it is left."""
    found, start = Messages(), P2PChannel._start

    def starting(self: P2PChannel, act: object, tensor: Tensor, peer: int, tag: int) -> Any:
        if act is dist.isend:
            found.count(tensor, tag)
        return start(self, act, tensor, peer, tag)

    with mock.patch.object(P2PChannel, "_start", starting):
        yield found
