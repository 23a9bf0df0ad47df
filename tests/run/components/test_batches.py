"""What is said of samples that a step leaves out."""

from __future__ import annotations

from closeranks.data.loading.quarantine import BadSample
from closeranks.run.components.batches import describe_skipped


def bad(count: int) -> list[BadSample]:
    return [BadSample(number, "'a', byte 0", "torn") for number in range(count)]


def test_few_are_told_one_by_one() -> None:
    assert describe_skipped(bad(3)) == [f"sample {number} is skipped: torn ('a', byte 0)" for number in range(3)]
    assert describe_skipped([]) == []


def test_a_damaged_block_does_not_flood_the_console() -> None:
    said = describe_skipped(bad(39))
    assert said[:3] == describe_skipped(bad(3))
    assert said[3:] == ["and 36 more samples are skipped at this step"]
    assert describe_skipped(bad(4))[3:] == ["and 1 more sample is skipped at this step"]
