"""Under which name does torch's DCP know a tensor of a checkpoint?

DCP knows a flat list of names, a checkpoint knows sections and keys:

    model.layers.0.weight                        section model,     key layers.0.weight
    optimizer.state.layers.0.weight.exp_avg      section optimizer, key layers.0.weight/exp_avg
    anything else                                section other,     key as it is

The prefixes are the places of the two in the state dict that is saved or loaded (``{"model": ..., "optimizer": ...}``)
and can be others (``app.model``); an empty one stands for a bare state dict of the model. Invariant: a name that was
saved is found again under the same prefixes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Where a value lies in a nested state dict."""


@dataclass(frozen=True, slots=True)
class Place:
    section: str
    key: str


@dataclass(frozen=True, slots=True)
class Names:
    """Where model and optimizer lie in a state dict."""

    model: str = "model"
    """Of the model's state dict; empty: the state dict is the model's own."""
    optimizer: str = "optimizer"
    """Of the optimizer's, as ``get_optimizer_state_dict`` gives it."""

    def place(self, name: str) -> Place:
        """Where a checkpoint keeps what DCP calls ``name``."""
        memory = f"{self.optimizer}.state."
        parameter, _, what = name.removeprefix(memory).rpartition(".")
        # A slash could not be told from the one that joins the two.
        if name.startswith(memory) and parameter and what and "/" not in name:
            return Place("optimizer", f"{parameter}/{what}")
        if not self.model:
            return Place("model", name)
        prefix = f"{self.model}."
        is_model = name.startswith(prefix) and name != prefix
        return Place("model", name.removeprefix(prefix)) if is_model else Place("other", name)

    def path(self, place: Place) -> Path | None:
        """Where it lies in a nested state dict; None where a bare one has no room for it."""
        if place.section == "model":
            return (*_parts(self.model), place.key)
        if place.section == "optimizer":
            parameter, _, what = place.key.rpartition("/")
            return (*_parts(self.optimizer), "state", *((parameter, what) if parameter else (what,)))
        return (place.key,) if self.model else None

    def name(self, place: Place) -> str | None:
        """What DCP calls it; None where a bare state dict has no room for it."""
        path = self.path(place)
        return None if path is None else ".".join(map(str, path))

    def encode(self) -> dict[str, str]:
        return {"model": self.model, "optimizer": self.optimizer}

    @classmethod
    def decode(cls, values: Mapping[str, str]) -> Names:
        return cls(values["model"], values["optimizer"])


def _parts(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.split(".")) if prefix else ()
