"""Point-to-point messages between pipeline ranks: hidden states forward, their gradients backward.

Messages across one stage boundary arrive in the order they were sent. The first hidden state of a kind (the
callbacks' ``signature``) is preceded by a header with its metadata; from then on both ends know it. The metadata also
says whether the sender needs a gradient, so that both ends agree on what is not sent: an output that needs no gradient
gets none. Invariant: a buffer lives until its message is complete, and the number of sends in flight is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.phases import phase
from closeranks.core.traffic import count_sent
from closeranks.parallel.process_group import RankGroup

Direction = Literal["forward", "backward"]

RECEIVE, SEND = "pipeline.receive", "pipeline.send"
MAX_SENDS_IN_FLIGHT = 8
"""Sends in flight before the oldest is waited for: enough to hide the latency of one, few enough to bound memory."""

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MOST_DIMS = 8
_HEADER = 3 + _MOST_DIMS


@dataclass(frozen=True, slots=True)
class HiddenStateMeta:
    """Metadata of the hidden states at a stage boundary, and whether their sender needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> HiddenStateMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def encode(self) -> list[int]:
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_DIMS:
            what = f"a stage gave a {self.dtype} tensor of shape {list(self.shape)}, which stages cannot send"
            raise ModelError(what, f"Use one of {', '.join(map(str, _DTYPES))} and at most {_MOST_DIMS} dims.")
        dims = [*self.shape, *[0] * (_MOST_DIMS - len(self.shape))]
        return [_DTYPES.index(self.dtype), int(self.wants_gradient), len(self.shape), *dims]

    @classmethod
    def decode(cls, numbers: list[int]) -> HiddenStateMeta:
        kind, wants_gradient, num_dims, *dims = numbers
        return cls(tuple(dims[:num_dims]), _DTYPES[kind], bool(wants_gradient))


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Identifies a message: a hidden state from stage ``boundary`` to the next one, or its gradient back."""

    direction: Direction
    boundary: int
    micro: int

    @property
    def tag(self) -> int:
        """Distinguishes messages in flight where the backend supports tags (Gloo; NCCL matches by order alone).
        Headers have smaller tags."""
        return 1 << 30 | self.micro << 13 | self.boundary << 1 | (self.direction == "backward")


@dataclass(slots=True)
class _Message:
    work: dist.Work
    tensor: Tensor
    wants_gradient: bool = False


@dataclass(slots=True)
class P2PChannel:
    """One rank's messages along the pipeline axis. ``peer`` is a rank of that axis.

    Call sequence, by the executor. Forward: the sender calls ``send_meta`` with the metadata of what it then ``send``s;
    the receiver calls ``receive_meta``, ``post_receive`` and later ``wait_receive``. Backward: both know the metadata
    already. Then ``wait_all``.
    """

    group: RankGroup
    device: torch.device
    _metas: dict[tuple[int, Hashable], HiddenStateMeta] = field(default_factory=dict, init=False)
    _in_flight: deque[_Message] = field(default_factory=deque, init=False)
    _posted: dict[MessageKey, _Message] = field(default_factory=dict, init=False)

    def open(self) -> None:
        """A collective: NCCL initializes a group in the first call that all its ranks make, not in a message."""
        self.group.sum(torch.zeros(1, device=self.device))

    def send_meta(self, boundary: int, signature: Hashable, meta: HiddenStateMeta, peer: int) -> None:
        """Send the metadata the first time; later it must be the same."""
        known = self._metas.setdefault((boundary, signature), meta)
        if known is meta:
            header = torch.tensor(meta.encode(), dtype=torch.int64, device=self.device)
            self._track(self._start(dist.isend, header, peer, boundary))
        elif known != meta:
            what = f"stage {boundary} gave {meta} for a micro-batch of the same shapes as one that gave {known}"
            fix = "A stage's output may depend only on the shapes of its micro-batch; freeze before the first step."
            raise ModelError(what, fix)

    def receive_meta(self, boundary: int, signature: Hashable, peer: int) -> HiddenStateMeta:
        """Metadata of what the previous stage sends. Waits for the header the first time (also on CUDA: the host
        waits)."""
        key = (boundary, signature)
        if key not in self._metas:
            message = self._start(dist.irecv, self._empty((_HEADER,), torch.int64), peer, boundary)
            with phase(RECEIVE):
                message.work.wait()
            self._metas[key] = HiddenStateMeta.decode(message.tensor.tolist())
        return self._metas[key]

    def send(self, key: MessageKey, tensor: Tensor, peer: int) -> None:
        self._track(self._start(dist.isend, tensor.detach().contiguous(), peer, key.tag))

    def post_receive(self, key: MessageKey, meta: HiddenStateMeta, peer: int) -> None:
        """Post the receive."""
        message = self._start(dist.irecv, self._empty(meta.shape, meta.dtype), peer, key.tag)
        message.wants_gradient = meta.wants_gradient
        self._posted[key] = message

    def wait_receive(self, key: MessageKey) -> Tensor:
        """Wait for a posted receive (on CUDA the stream waits, not the host); returns a leaf of autograd."""
        message = self._posted.pop(key)
        with phase(RECEIVE):
            message.work.wait()
        return message.tensor.requires_grad_(message.wants_gradient)

    def wait_all(self) -> None:
        """Wait for all sends in flight."""
        with phase(SEND):
            while self._in_flight:
                self._in_flight.popleft().work.wait()

    def _track(self, message: _Message) -> None:
        self._in_flight.append(message)
        with phase(SEND):
            while len(self._in_flight) > MAX_SENDS_IN_FLIGHT:
                self._in_flight.popleft().work.wait()

    def _start(self, act: object, tensor: Tensor, peer: int, tag: int) -> _Message:
        op = dist.P2POp(act, tensor, group=self.group.process_group, tag=tag, group_peer=peer)  # type: ignore[arg-type]
        if act is dist.isend:
            count_sent(SEND, tensor.nbytes)
        (work,) = dist.batch_isend_irecv([op])
        return _Message(work, tensor)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)
