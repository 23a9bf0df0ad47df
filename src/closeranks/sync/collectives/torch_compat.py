"""Two collectives under whichever name the installed torch has for them.

torch 2.13 renamed them and warns about the old names; we support versions before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_Collective = Callable[..., Any]

all_gather_flat: _Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather: the slices of all ranks, concatenated into one flat tensor."""
reduce_scatter_flat: _Collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce-scatter: the sum of a flat tensor over ranks, of which each rank gets its slice."""
