from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.formats.spans import spans


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_every_number_is_in_one_span_of_its_container(sizes: list[int], data: st.DataObject) -> None:
    firsts = np.cumsum([0, *sizes])
    asked = st.lists(st.integers(0, sum(sizes) - 1), max_size=20) if sum(sizes) else st.just([])
    numbers = np.asarray(data.draw(asked), np.int64)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    found = np.full(len(numbers), -1)
    containers = []
    for span in spans(firsts, numbers):
        containers.append(span.container)
        found[span.positions] = firsts[span.container] + span.inside
        assert (owner[found[span.positions]] == span.container).all()
        assert (np.diff(span.inside) >= 0).all()
    assert found.tolist() == numbers.tolist()
    assert containers == sorted(set(containers))
