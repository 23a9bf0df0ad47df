"""The value that tracing a module gives: totals, and what a micro-batch makes of it."""

from __future__ import annotations

import pytest

from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit

LINEAR = Product(m=10, n=4, k=3)


@pytest.mark.parametrize(
    ("product", "grown"),
    [
        (LINEAR, Product(50, 4, 3)),
        (Product(3, 4, 10, grows="k"), Product(3, 4, 50, grows="k")),
        (Product(7, 7, 2, count=6, is_batched=True), Product(7, 7, 2, count=30, is_batched=True)),
    ],
    ids=["output", "gradient of a weight", "attention"],
)
def test_a_micro_batch_grows_one_dim_of_a_product_or_their_number(product: Product, grown: Product) -> None:
    assert product.for_samples(5) == grown
    assert grown.flops == 5 * product.flops


def test_a_trace_adds_up_its_units() -> None:
    block = TracedUnit(
        "blocks.0", 12, (LINEAR,), (LINEAR, LINEAR), attention_flops=100.0, saved_activation_bytes=8.0, is_block=True
    )
    trace = ModuleTrace((TracedUnit("embed", 20), block, TracedUnit("", 0)))
    assert trace.num_params == 32
    assert trace.flops_per_sample == 3 * 2 * 10 * 4 * 3 + 3 * 100.0
    assert trace.saved_activation_bytes == 8.0
    assert list(trace.blocks) == [block]
