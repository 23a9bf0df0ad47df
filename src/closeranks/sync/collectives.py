"""Which of torch's names do two collectives go by?

torch 2.13 renamed them and warns of the old names; both are in the range we support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_Collective = Callable[..., Any]

gather_flat: _Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Slices of all ranks, one after the other, into one flat tensor."""
reduce_flat: _Collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The sum over ranks of one flat tensor, to each rank its slice."""
