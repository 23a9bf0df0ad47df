from closeranks.facts.pipeline.actions import Action
from closeranks.facts.pipeline.zero_bubble import insert_weight_gradients, peak_held


def order(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def text(rows: tuple[tuple[Action, ...], ...]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def test_weights_are_computed_while_a_rank_waits() -> None:
    """Rank 0 waits for each input gradient of rank 1, which has something more urgent to do all along."""
    filled = insert_weight_gradients([order("0F0 0F1 0F2 0I0 0I1 0I2"), order("1F0 1I0 1F1 1I1 1F2 1I2")], num_stages=2)
    assert text(filled) == ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]


def test_a_whole_backward_waits_for_the_weights_before_it() -> None:
    filled = insert_weight_gradients([order("0F0 0F1 0I0 0B1")], num_stages=1)
    assert text(filled) == ["0F0 0F1 0I0 0W0 0B1"]


def test_a_rank_without_room_computes_weights_first() -> None:
    filled = insert_weight_gradients([order("0F0 0I0 0F1 0I1 0F2 0I2")], num_stages=1)
    assert text(filled) == ["0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"]


def test_whole_backwards_stay_as_they_are() -> None:
    given = order("0F0 0F1 0B0 0B1")
    assert insert_weight_gradients([given], num_stages=1) == (tuple(given),)


def test_orders_that_block_each_other_lose_nothing() -> None:
    filled = insert_weight_gradients([order("0I0 0F0")], num_stages=1)
    assert text(filled) == ["0I0 0F0"]


def test_peak_counts_from_forward_to_release() -> None:
    assert peak_held(order("0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3")) == 3
    assert peak_held(order("0F0 0I0 0F1 0I1 0W0 0W1")) == 2
    assert peak_held(order("0F0 0I0 0F1 0I1 0W0 0W1"), released_by="BI") == 1
