from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from closeranks.telemetry.out_of_memory import MemoryUse, TensorSize, advice, explain

GIB = 1 << 30
USE = MemoryUse(
    device="NVIDIA H200",
    in_use_bytes=100 * GIB,
    total_bytes=139 * GIB,
    requested_bytes=40 * GIB,
    parameters_bytes=6 * GIB,
    gradients_bytes=6 * GIB,
    optimizer_bytes=12 * GIB,
    largest=tuple(TensorSize(f"layer.{n}", n * GIB) for n in range(6)),
    is_float32=True,
)


def test_the_message_says_what_took_the_memory_and_what_to_change() -> None:
    assert explain(USE).splitlines() == [
        "NVIDIA H200 ran out of memory (139.0 GiB in all) when 40.0 GiB more was requested. "
        "This process held 100.0 GiB of it:",
        "  parameters                     6.0 GiB",
        "  gradients                      6.0 GiB",
        "  optimizer state               12.0 GiB",
        "  activations, buffers, other   76.0 GiB",
        "Largest parameters: layer.5 (5.0 GiB), layer.4 (4.0 GiB), layer.3 (3.0 GiB), layer.2 (2.0 GiB).",
        "To fit, most effective first:",
        "  - halve train.micro_batch: activations halve with it, while train.global_batch and the learning rate stay",
        '  - train.precision = "bf16": activations take about half',
        '  - train.recompute = "full": a block keeps only its inputs, and is computed twice',
        "  - shorten data.seq_len: activations shrink with it",
        "  - layout.zero = 3 on several workers: each keeps its share of parameters, gradients and optimizer state",
    ]


def test_a_model_that_is_too_large_is_told_to_spread_or_to_shrink_first() -> None:
    changes = advice(replace(USE, in_use_bytes=25 * GIB, is_float32=False))
    assert changes[0].startswith("layout.zero = 3 on several workers")
    assert changes[1].startswith("choose a smaller model.preset")
    assert changes[2].startswith('optim.name = "sgd"')
    assert not any("bf16" in change for change in changes)


@given(st.integers(0, GIB), st.integers(0, GIB))
def test_parts_add_up(in_use: int, parameters: int) -> None:
    use = replace(USE, in_use_bytes=in_use, parameters_bytes=parameters)
    assert use.rest_bytes >= 0
    assert use.state_bytes + use.rest_bytes == max(in_use, use.state_bytes)
