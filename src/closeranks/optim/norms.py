"""How large are the gradients together?

Invariant: the answer stays on the device (no host sync), and a single value that is not finite makes it not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_PIECE = 1 << 16


def norm_squared(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of all squares as a 0-dim float64 tensor on the gradients' device.

    One norm per piece, in float32 at least (half precision would overflow), then added in float64: the number and the
    size of the tensors cost no precision.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):  # in order: the sum below must repeat
        pieces = [piece for g in gradients if g.dtype == dtype for piece in _pieces(g)]
        norms += torch._foreach_norm(pieces, 2.0, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _pieces(gradient: Tensor) -> Iterable[Tensor]:
    """The CPU's norm keeps one float32 sum per lane: 0.3% off for 25 million values, 1e-6 in pieces, at the same cost.

    CUDA's norm cuts its tensors itself.
    """
    return gradient.reshape(-1).split(_PIECE) if gradient.device.type == "cpu" else (gradient,)
