"""Many layouts to try: every way to split ranks by powers of two."""

from __future__ import annotations

from itertools import product

from closeranks.facts.layout import Layout


def layouts_of_powers(num_ranks: int) -> list[Layout]:
    """Tensor, pipeline and context are powers of two, data is what is left, each under every stage of ZeRO."""
    powers = [1 << place for place in range(num_ranks.bit_length()) if num_ranks % (1 << place) == 0]
    return [
        Layout(data=num_ranks // (t * p * c), zero=zero, tensor=t, pipeline=p, context=c)
        for t, p, c, zero in product(powers, powers, powers, range(4))
        if num_ranks % (t * p * c) == 0
    ]
