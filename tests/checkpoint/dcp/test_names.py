"""Where does a checkpoint keep what DCP knows by a flat name?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.dcp.names import Names, TensorKey

WORDS = st.text(alphabet="abm0._/", min_size=1, max_size=12)
NAMES = st.one_of(WORDS, WORDS.map("model.{}".format), WORDS.map("optimizer.state.{}".format))
PREFIXES = st.sampled_from([Names(), Names(""), Names("app.model", "app.optim"), Names("", "optim")])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.0.weight", TensorKey("model", "layers.0.weight")),
        ("optimizer.state.layers.0.weight.exp_avg", TensorKey("optimizer", "layers.0.weight/exp_avg")),
        ("optimizer.state.0.step", TensorKey("optimizer", "0/step")),
        ("optimizer.state.odd", TensorKey("other", "optimizer.state.odd")),
        ("loss_scale", TensorKey("other", "loss_scale")),
        ("models.0", TensorKey("other", "models.0")),
    ],
)
def test_a_name_has_a_place(name: str, place: TensorKey) -> None:
    assert Names().tensor_key(name) == place
    assert Names().name(place) == name


def test_prefixes_are_those_of_the_state_dict() -> None:
    names = Names("app.model", "app.optim")
    assert names.tensor_key("app.optim.state.w.exp_avg") == TensorKey("optimizer", "w/exp_avg")
    assert names.path(TensorKey("optimizer", "w/exp_avg")) == ("app", "optim", "state", "w", "exp_avg")
    assert Names("").tensor_key("w") == TensorKey("model", "w")
    assert Names("").name(TensorKey("other", "loss_scale")) is None


@given(PREFIXES, NAMES)
def test_what_was_saved_is_found_under_its_name(names: Names, name: str) -> None:
    assert names.name(names.tensor_key(name)) == name


@given(PREFIXES, st.lists(NAMES, unique=True, max_size=20))
def test_two_names_never_share_a_place(names: Names, several: list[str]) -> None:
    assert len({names.tensor_key(name) for name in several}) == len(several)


@given(PREFIXES)
def test_prefixes_survive_the_tree(names: Names) -> None:
    assert Names.decode(names.encode()) == names
