"""What must survive a run? The state tree, gathered from the parts and given back to them.

Invariant: everything a resumed run needs to repeat an uninterrupted one bit for bit is in this one tree: weights and
buffers, optimizer, loss scale, the cursor into the sample order, the seed that keys all randomness, and the identity of
the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from closeranks import __version__
from closeranks.core.errors import CheckpointError
from closeranks.run.parts import Parts


def collect_state(parts: Parts, step: int) -> dict[str, Any]:
    return {
        "model": dict(_tensors(parts.module)),
        "optimizer": parts.optimizer.state(),
        "loss_scale": parts.loss_scale.state(),
        "progress": {"step": step, "position": parts.schedule.position(step)},
        "identity": _identity(parts),
        "config": parts.job.model_dump(mode="json"),
        "versions": {"closeranks": __version__, "torch": torch.__version__},
    }


def restore_state(parts: Parts, tree: Mapping[str, Any]) -> int:
    """Put a saved tree back into the parts; returns the number of finished steps."""
    _refuse_foreign(parts, tree["identity"])
    load_model(parts.module, tree["model"])
    parts.optimizer.load_state(tree["optimizer"])
    parts.loss_scale.load_state(tree["loss_scale"])
    step: int = tree["progress"]["step"]
    if tree["progress"]["position"] != parts.schedule.position(step):
        what = f"the saved run ended inside a step, at sample {tree['progress']['position']}: going on would skip some"
        raise CheckpointError(what, "Resume with the same train.epochs, or train by steps.")
    if step >= parts.schedule.num_steps:
        what = f"nothing is left to do: the state is at step {step} of {parts.schedule.num_steps}"
        raise CheckpointError(what, f"Set train.steps to more than {step}.")
    return step


def load_model(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights and buffers into a module of the same shape."""
    own = dict(_tensors(module))
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())
        raise CheckpointError(
            f"the saved model is another one: {len(odd)} tensors do not match, such as '{odd[0]}'",
            "Resume with the model the state was saved from.",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != saved[name].shape:
                what = (
                    f"'{name}' has shape {tuple(tensor.shape)} here and {tuple(saved[name].shape)} in the saved state"
                )
                raise CheckpointError(what, "Resume with the model the state was saved from.")
            tensor.copy_(saved[name])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter once (tied ones under their first name) and every persistent buffer."""
    parameters = dict(module.named_parameters())
    yield from parameters.items()
    buffers = {name for name, _ in module.named_buffers()}
    yield from ((name, tensor) for name, tensor in module.state_dict().items() if name in buffers)


def _identity(parts: Parts) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run."""
    return {
        "data": parts.source.identity,
        "num_samples": len(parts.source),
        "seed": parts.job.run.seed,
        "global_batch": parts.job.train.global_batch,
        "precision": parts.job.train.precision,
    }


_KEYS = {"seed": "run.seed", "global_batch": "train.global_batch", "precision": "train.precision"}


def _refuse_foreign(parts: Parts, saved: Mapping[str, Any]) -> None:
    for key, value in _identity(parts).items():
        if saved.get(key) != value:
            place = _KEYS.get(key, "data")
            what = f"the state was saved with another {place}: {saved.get(key)!r}, not {value!r}"
            raise CheckpointError(what, f"Set {place} back, or start anew without checkpoint.resume.")
