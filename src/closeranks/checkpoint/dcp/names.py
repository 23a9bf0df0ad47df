"""Maps between the names of torch's DCP and the sections and keys of a checkpoint.

DCP has a flat list of names, a checkpoint has sections and keys:

    model.layers.0.weight                        section model,     key layers.0.weight
    optimizer.state.layers.0.weight.exp_avg      section optimizer, key layers.0.weight/exp_avg
    anything else                                section other,     key as it is

The prefixes are the paths of model and optimizer in the state dict that is saved or loaded (``{"model": ...,
"optimizer": ...}``); others can be configured (``app.model``), and an empty one means that the state dict is the
model's own. Invariant: a saved name is found again under the same prefixes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

StatePath = tuple[str | int, ...]
"""The path of a value in a nested state dict."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    section: str
    key: str


@dataclass(frozen=True, slots=True)
class Names:
    """Where model and optimizer lie in a state dict."""

    model: str = "model"
    """Path of the model's state dict; empty: the state dict is the model's own."""
    optimizer: str = "optimizer"
    """Path of the optimizer's state dict, as ``get_optimizer_state_dict`` returns it."""

    def tensor_key(self, name: str) -> TensorKey:
        """Section and key of what DCP calls ``name``."""
        state_prefix = f"{self.optimizer}.state."
        parameter, _, what = name.removeprefix(state_prefix).rpartition(".")
        # A slash in the name would be ambiguous: a slash joins parameter and state.
        if name.startswith(state_prefix) and parameter and what and "/" not in name:
            return TensorKey("optimizer", f"{parameter}/{what}")
        if not self.model:
            return TensorKey("model", name)
        prefix = f"{self.model}."
        is_model = name.startswith(prefix) and name != prefix
        return TensorKey("model", name.removeprefix(prefix)) if is_model else TensorKey("other", name)

    def path(self, tensor_key: TensorKey) -> StatePath | None:
        """Its path in a nested state dict; None if a bare model state dict has no place for it."""
        if tensor_key.section == "model":
            return (*_parts(self.model), tensor_key.key)
        if tensor_key.section == "optimizer":
            parameter, _, what = tensor_key.key.rpartition("/")
            return (*_parts(self.optimizer), "state", *((parameter, what) if parameter else (what,)))
        return (tensor_key.key,) if self.model else None

    def name(self, tensor_key: TensorKey) -> str | None:
        """Its name in DCP; None if a bare model state dict has no place for it."""
        path = self.path(tensor_key)
        return None if path is None else ".".join(map(str, path))

    def encode(self) -> dict[str, str]:
        return {"model": self.model, "optimizer": self.optimizer}

    @classmethod
    def decode(cls, values: Mapping[str, str]) -> Names:
        return cls(values["model"], values["optimizer"])


def _parts(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.split(".")) if prefix else ()
