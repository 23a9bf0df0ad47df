"""The products that are measured are those of a step: forward and backward, whole and split."""

from __future__ import annotations

from closeranks.facts.shapes.llama import PRESETS
from closeranks.lab.calibrate.shapes import AttentionPlace, JobShapes, ProductShape, attention_of, products_of

JOB = JobShapes(PRESETS["tiny"], seq_len=64, micro_batch=3)


def test_a_jobs_products_come_first_forward_and_backward() -> None:
    shapes = products_of("cpu", [JOB])
    tokens, dim, ffn = 3 * 64, 128, 256
    for shape in (ProductShape(tokens, dim, ffn), ProductShape(tokens, ffn, dim), ProductShape(ffn, dim, tokens)):
        assert shapes.index(shape) < shapes.index(ProductShape(1024, 4096, 4096)), "the grid comes after the job"
    assert ProductShape(tokens, dim, ffn // 2) in shapes, "split over the tensor axis"
    assert ProductShape(2 * tokens, dim, ffn) in shapes, "a larger micro-batch"
    assert len(set(shapes)) == len(shapes)


def test_without_a_job_there_is_the_grid_smallest_first() -> None:
    shapes = products_of("cpu", [])
    assert list(shapes) == sorted(shapes, key=lambda shape: shape.flops)
    assert len(shapes) > 40


def test_attention_of_a_job() -> None:
    places = attention_of("cpu", [JOB])
    assert AttentionPlace(3, 16, 8, 64, 8) in places
    assert AttentionPlace(3, 8, 4, 64, 8) in places, "split over the tensor axis"
    assert len(attention_of("gpu", [])) < len(attention_of("gpu", [JOB]))
