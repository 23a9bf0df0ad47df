from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.core.registry import Registry, did_you_mean, is_import_path, load_object


def test_a_near_name_is_offered_else_all() -> None:
    assert did_you_mean("adam", ["sgd", "adamw"]) == "Did you mean 'adamw'?"
    assert did_you_mean("zzz", ["sgd", "adamw"]) == "Known: adamw, sgd."


@given(st.text(max_size=10), st.lists(st.text(min_size=1, max_size=6), max_size=4))
def test_a_hint_is_always_a_sentence(name: str, known: list[str]) -> None:
    assert did_you_mean(name, known).endswith(("?", "."))


def test_a_registry_answers_an_unknown_name_with_the_nearest() -> None:
    registry: Registry[type] = Registry("model")

    @registry.register("llama")
    class Llama: ...

    assert registry["llama"] is Llama
    assert list(registry) == ["llama"]
    with pytest.raises(UserError) as caught:
        registry["lama"]
    assert str(caught.value) == "there is no model 'lama'. Did you mean 'llama'?"
    assert caught.value.__cause__ is None


def test_a_name_is_registered_once() -> None:
    registry: Registry[int] = Registry("model")
    registry.register("a")(1)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        registry.register("a")(2)
    assert registry["a"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.b:c", True), ("a:c", True), ("a:c.d", True), ("llama", False), (":c", False), ("a:", False), ("", False)],
)
def test_a_dotted_name_has_a_module_and_an_attribute(name: str, expected: bool) -> None:
    assert is_import_path(name) is expected


def test_an_object_is_imported_by_its_path() -> None:
    assert load_object("pathlib:Path", place="model.name") is Path
    assert load_object("pathlib:Path.cwd", place="model.name") == Path.cwd


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's on the path, which the tests fill; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("users_module", "users_package", "users_package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "users_module.py"


def message(path: str) -> str:
    with pytest.raises(UserError) as caught:
        load_object(path, place="model.name")
    return str(caught.value)


def test_a_missing_module_says_where_it_is_looked_for() -> None:
    text = message("no_such_module_here:make")
    assert text.startswith("model.name = 'no_such_module_here:make': there is no module 'no_such_module_here'.")
    assert "Run from the folder that holds it" in text


def test_a_missing_part_of_a_package_is_the_one_named(module: Path) -> None:
    package = module.parent / "users_package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert "there is no module 'users_package.inner'" in message("users_package.inner:make")


def test_a_module_that_needs_another_names_that_one(module: Path) -> None:
    module.write_text("import no_such_dependency\n")
    text = message("users_module:make")
    assert (
        text
        == "model.name = 'users_module:make': importing it needs 'no_such_dependency'. Install 'no_such_dependency'."
    )


def test_a_module_that_raises_names_the_exception(module: Path) -> None:
    module.write_text("1 / 0\n")
    text = message("users_module:make")
    assert text == "model.name = 'users_module:make': importing it raised ZeroDivisionError: division by zero."


def test_a_missing_attribute_offers_the_nearest(module: Path) -> None:
    module.write_text("def make_model(): ...\n")
    text = message("users_module:make_modle")
    assert (
        text == "model.name = 'users_module:make_modle': 'users_module' has no 'make_modle'. Did you mean 'make_model'?"
    )


def test_private_names_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("users_module")
    vars(fake).update({"_make": 1, "build": 2})
    monkeypatch.setitem(sys.modules, "users_module", fake)
    assert message("users_module:make").endswith("Known: build.")
