from __future__ import annotations

from typing import Any

import pytest
import torch

from closeranks.core.errors import BadRecordError, DataError, UserError
from closeranks.data.config import ChecksConfig
from closeranks.data.loading.sample_checks import SampleChecks, parse_field
from tests.data import doubles

DOUBLES = doubles.__name__
NAN, INF = float("nan"), float("inf")


def checks(finite: bool = False, **rules: Any) -> SampleChecks:
    return SampleChecks.of(ChecksConfig(**rules), finite=finite)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_found_by_row(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(4, 3, 2, dtype=dtype)
    x[1, 2, 0] = bad
    y = torch.tensor([0.0, 0.0, 0.0, bad])
    assert checks(True).find_bad_rows({"x": x, "y": y, "id": torch.arange(4)}, 4) == {
        1: "'x' holds NaN or infinity",
        3: "'y' holds NaN or infinity",
    }
    assert checks(False).find_bad_rows({"x": x}, 4) == {}


def test_large_values_whose_sum_overflows_are_fine() -> None:
    x = torch.full((2, 8), 3e38)
    assert checks(True).find_bad_rows({"x": x, "h": torch.full((2, 8), 6e4, dtype=torch.float16)}, 2) == {}


def test_tensors_without_elements_and_other_leaves_are_fine() -> None:
    batch = {"x": torch.empty(2, 0), "n": torch.arange(2), "text": ["a", "b"]}
    assert checks(True, ranges={"x": (0, 1)}).find_bad_rows(batch, 2) == {}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64, torch.float32, torch.bfloat16])
def test_ranges_hold_both_ends(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 4], [5, 10], [3, 11]]).to(dtype)
    assert checks(ranges={"x": (0, 10)}).find_bad_rows({"x": x}, 3) == {2: "'x' holds 11, not 0 to 10"}
    assert checks(ranges={"x": (1, 11)}).find_bad_rows({"x": x}, 3) == {0: "'x' holds 0, not 1 to 11"}
    assert checks(ranges={"x": (0, 11)}).find_bad_rows({"x": x}, 3) == {}


def test_nan_is_in_no_range() -> None:
    found = checks(ranges={"x": (0, 10)}).find_bad_rows({"x": torch.tensor([1.0, NAN])}, 2)
    assert found == {1: "'x' holds nan, not 0 to 10"}


def test_lengths_of_tensors_and_of_lists() -> None:
    rules = checks(lengths={"x": (1, 3), "text": (2, 3)})
    batch = {"x": torch.zeros(3, 2), "text": ["ab", "abcd", "abc"]}
    assert rules.find_bad_rows(batch, 3) == {1: "'text' has length 4, not 2 to 3"}
    assert rules.find_bad_rows({**batch, "x": torch.zeros(3, 4)}, 3) == dict.fromkeys(
        range(3), "'x' has length 4, not 1 to 3"
    )


def test_a_schema_is_dtype_and_shape() -> None:
    rules = checks(fields={"image": "uint8[28,?]", "label": "int64[]"})
    good = {"image": torch.zeros(2, 28, 5, dtype=torch.uint8), "label": torch.zeros(2, dtype=torch.int64)}
    assert rules.find_bad_rows(good, 2) == {}
    assert rules.find_bad_rows({**good, "image": torch.zeros(2, 27, 5)}, 2) == dict.fromkeys(
        range(2), "'image' is float32[27,5], not uint8[28,?]"
    )
    assert rules.find_bad_rows({**good, "label": [1, 2]}, 2) == dict.fromkeys(range(2), "'label' is not a tensor")


@pytest.mark.parametrize(
    ("table", "rule"),
    [("ranges", (0, 1)), ("lengths", (1, 3)), ("fields", "float32[]")],
    ids=["range", "length", "field"],
)
def test_a_rule_for_what_no_sample_has_is_a_mistake_in_the_job(table: str, rule: object) -> None:
    rules = checks(**{table: {"q": rule}})
    sentence = rf"data\.checks\.{table}\.q: there is no tensor 'q' in the batches\. Known: image, text\."
    with pytest.raises(DataError, match=sentence) as caught:
        rules.find_bad_rows({"image": torch.zeros(2), "text": ["a", "b"]}, 2)
    assert not isinstance(caught.value, BadRecordError)  # which data.on_bad could skip


def test_a_range_of_what_is_no_tensor() -> None:
    assert checks(ranges={"x": (0, 1)}).find_bad_rows({"x": ["a"]}, 1) == {0: "'x' is not a tensor"}


def test_a_schema_knows_both_names_of_a_dtype() -> None:
    assert str(parse_field("x", " float [ 3 , ? ]")) == "float32[3,?]"


@pytest.mark.parametrize("text", ["uint8", "uint8[", "uint8[3;4]", "uint8[3 4]", "uint8[,]", "uint8[??]"])
def test_a_schema_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"data.checks.fields.x = 'uint8"):
        checks(fields={"x": text})


def test_mistakes_in_rules_are_told() -> None:
    with pytest.raises(UserError, match=r"no dtype 'flat32'.*float32"):
        checks(fields={"x": "flat32[3]"})
    with pytest.raises(UserError, match=r"data.checks.ranges.x = \[3, 1\] allows nothing"):
        checks(ranges={"x": (3, 1)})
    with pytest.raises(UserError, match="has no 'big_valves'"):
        checks(hooks=(f"{DOUBLES}:big_valves",))
    with pytest.raises(UserError, match="cannot be called"):
        checks(hooks=(f"{DOUBLES}:NOT_A_FUNCTION",))


def test_hooks_see_one_sample_at_a_time() -> None:
    x = torch.tensor([[14.0, 0.0], [15.0, 0.0], [16.0, 0.0]])
    found = checks(hooks=(f"{DOUBLES}:big_values",)).find_bad_rows({"x": x, "text": list("abc")}, 3)
    assert found == {1: "x is 15", 2: "x is 16"}


def test_a_check_that_breaks_stops_the_run() -> None:
    with pytest.raises(DataError, match=r"the check '.*:breaking' of data.checks.hooks raised KeyError: .*doubles.py"):
        checks(hooks=(f"{DOUBLES}:breaking",)).find_bad_rows({"x": torch.zeros(1)}, 1)
    with pytest.raises(DataError, match="returned False, neither a reason nor None"):
        checks(hooks=(f"{DOUBLES}:wordless",)).find_bad_rows({"x": torch.zeros(1)}, 1)


def test_the_first_reason_counts() -> None:
    rules = checks(True, ranges={"x": (0, 10)})
    assert rules.find_bad_rows({"x": torch.tensor([NAN, 11.0])}, 2) == {
        0: "'x' holds NaN or infinity",
        1: "'x' holds 11, not 0 to 10",
    }
