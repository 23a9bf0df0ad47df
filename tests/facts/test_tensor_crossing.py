"""The warning about tensor ranks on several hosts."""

from __future__ import annotations

import pytest

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import tensor_axis_warning


@pytest.mark.parametrize(
    ("tensor", "hosts", "inside"),
    [
        (1, [0, 1, 2, 3], 0),
        (2, [0, 0, 1, 1], 0),
        (4, [0, 0, 0, 0], 0),
        (4, [0, 0, 1, 1], 2),
        (2, [0, 1, 2, 3], 1),
        (6, [0, 0, 0, 1, 1, 1], 3),
        (4, [0, 0, 0, 1, 1, 1, 1, 1], 1),
    ],
)
def test_names_a_size_that_stays_on_a_host(tensor: int, hosts: list[int], inside: int) -> None:
    told = tensor_axis_warning(Layout(len(hosts) // tensor, tensor=tensor), hosts)
    assert bool(told) == bool(inside)
    assert not inside or f"Use layout.tensor = {inside} on hosts of" in told
