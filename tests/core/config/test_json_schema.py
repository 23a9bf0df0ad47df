from __future__ import annotations

import json
import operator
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from closeranks.core.config.json_schema import json_schema
from closeranks.core.config.toml.writer import dump_toml
from tests.core.config.toml.test_writer import JOBS

from .job_shapes import Job

SCHEMA = json_schema(Job)
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minItems": operator.ge,
    "maxItems": operator.le,
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


def is_valid(value: Any, node: Any, root: dict[str, Any]) -> bool:
    """The part of JSON Schema that our schemas use; an unknown keyword is an error, so that none goes unchecked."""
    if node is True or node is False:
        return bool(node)
    return all(_holds(keyword, operand, value, node, root) for keyword, operand in node.items())


def _holds(keyword: str, operand: Any, value: Any, node: dict[str, Any], root: dict[str, Any]) -> bool:
    is_table, is_array = isinstance(value, dict), isinstance(value, list)
    match keyword:
        case "$ref":
            return is_valid(value, root["$defs"][operand.removeprefix("#/$defs/")], root)
        case "type":
            is_right = isinstance(value, _TYPES[operand])
            return is_right and (operand == "boolean" or not isinstance(value, bool))
        case "properties":
            return not is_table or all(is_valid(value[key], operand[key], root) for key in operand if key in value)
        case "additionalProperties":
            extra = [key for key in value if key not in node.get("properties", {})] if is_table else []
            return all(is_valid(value[key], operand, root) for key in extra)
        case "required":
            return not is_table or all(key in value for key in operand)
        case "items":
            return not is_array or all(is_valid(item, operand, root) for item in value)
        case "prefixItems":
            return not is_array or all(is_valid(*pair, root) for pair in zip(value, operand, strict=False))
        case "anyOf":
            return any(is_valid(value, member, root) for member in operand)
        case "not":
            return not is_valid(value, operand, root)
        case "enum":
            return value in operand
        case "const":
            return bool(value == operand)
        case "minItems" | "maxItems":
            return not is_array or _BOUNDS[keyword](len(value), operand)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return not isinstance(value, int | float) or _BOUNDS[keyword](value, operand)
        case "title" | "description" | "default" | "$schema" | "$defs":
            return True
        case _:
            raise AssertionError(f"unknown keyword {keyword}")


@given(JOBS)
def test_every_job_that_loads_is_valid(job: Job) -> None:
    assert is_valid(tomllib.loads(dump_toml(job)), SCHEMA, SCHEMA)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nsteps = 1", True),
        ("", False),
        ("[train]\nsteps = 'x'", False),
        ("[train]\nsteps = 0", False),
        ("[train]\nsteps = 1\nstepz = 1", False),
        ("[train]\nsteps = 1\nprecision = 'half'", False),
        ("[train]\nsteps = 1\n[model]\npreset = '8b'", True),
        ("[train]\nsteps = 1\n[model]\nchannels = [1]", False),
        ("[train]\nsteps = 1\n[model]\nname = 'digits'\nchannels = [1]", True),
        ("[train]\nsteps = 1\n[model]\nname = 'digits'\nargs = {}", False),
        ("[train]\nsteps = 1\n[model]\nname = 'my.module:make'\nargs = {x = 1}", True),
        ("[train]\nsteps = 1\n[model]\nargs = {x = 1}", False),
        ("[train]\nsteps = 1\n[optim]\nbetas = [1]", False),
        ("[train]\nsteps = 1\n[[optim.groups]]\nlr_scale = 1", False),
        ("[train]\nsteps = 1\n[nobody]", False),
    ],
)
def test_an_editor_sees_what_loading_would_see(text: str, expected: bool) -> None:
    assert is_valid(tomllib.loads(text), SCHEMA, SCHEMA) is expected


def test_the_schema_says_what_it_is() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["title"] == "Job"
    assert SCHEMA["description"] == "One training run."
    assert SCHEMA["$defs"]["TrainConfig"]["properties"]["steps"]["description"] == "Optimizer steps to take."
    assert SCHEMA["properties"]["train"]["description"] == "How long and how large."


def test_the_schema_is_strict_json_without_null() -> None:
    text = json.dumps(SCHEMA, allow_nan=False)
    assert "null" not in text
    assert not re.search(r'"title": "[A-Z][a-z]+ [A-Z]', text)
    references = set(re.findall(r'"#/\$defs/(\w+)"', text))
    assert references <= set(SCHEMA["$defs"])
