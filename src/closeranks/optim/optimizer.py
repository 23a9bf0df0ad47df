"""How does a step change the weights?

Invariant: all of an update happens or none of it, by a flag on the device that the host does not read; a step that is
not taken leaves weights, moments and counters as they were, bit for bit. State is known by parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from closeranks.core.errors import CheckpointError, ModelError
from closeranks.optim.algorithms import ALGORITHMS
from closeranks.optim.config import OptimConfig
from closeranks.optim.groups import Assignment, ParameterFacts, assign
from closeranks.optim.schedule import lr_factor


def parameter_facts(module: nn.Module) -> tuple[ParameterFacts, ...]:
    """Each parameter once, under its first name, with the other names of a tied one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(ParameterFacts(first, tuple(p.shape), tuple(more)) for p, (first, *more) in names.items())


def freeze(module: nn.Module, config: OptimConfig) -> tuple[str, ...]:
    """Turn off the gradients of frozen parameters and name them. Call before anything plans on gradients."""
    assignment = assign(parameter_facts(module), config)
    for name in assignment.frozen:
        module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        fix = "Loosen the frozen patterns in optim.groups." if assignment.frozen else "Give it trainable parameters."
        raise ModelError("the model has no parameter left to train", fix)
    return assignment.frozen


class Optimizer:
    """The update of every trainable parameter of a module."""

    def __init__(self, module: nn.Module, config: OptimConfig, *, num_steps: int) -> None:
        self._config = config
        self._num_steps = num_steps
        assignment = assign(parameter_facts(module), config)
        self._parameters = _trained(module, assignment)
        groups = [
            {"params": params, "lr_scale": group.lr_scale, "weight_decay": group.weight_decay}
            for group in assignment.groups
            if (params := [self._parameters[name] for name in group.names if name in self._parameters])
        ]
        algorithm = ALGORITHMS[config.name](groups, config)
        self._optimizer: Any = algorithm.optimizer
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = algorithm.memory(parameter)
        # The kernels take their gradient scale in float32, too coarse for float64 parameters.
        self._folds = all(parameter.dtype != torch.float64 for parameter in self._parameters.values())

    def lr(self, step: int) -> float:
        """The learning rate of a step, before the groups' own factors."""
        return self._config.lr * lr_factor(self._config.schedule, step, self._num_steps)

    def step(self, step: int, gradients: Sequence[Tensor], factor: Tensor, ok: Tensor) -> None:
        """Update with ``factor`` times the gradients where ``ok`` is 1; change nothing where it is 0. No host sync.

        ``gradients`` are the parameters' own ``.grad``, or the flat tensors those are views of; afterwards they hold
        no meaning. Where the kernel can scale as it reads, ``gradients`` are not touched by a pass of their own.
        """
        rate = self.lr(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._optimizer.found_inf = 1.0 - ok.to(torch.float32)
        if self._folds:
            self._optimizer.grad_scale = factor.to(torch.float32).reciprocal()
        else:
            scale_gradients(gradients, factor)
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """The rule's name and, by parameter name, what it remembers."""
        memory = {name: dict(self._optimizer.state[parameter]) for name, parameter in self._parameters.items()}
        return {"algorithm": self._config.name, "parameters": memory}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state into place; refuses one of another rule or of other parameters."""
        if state.get("algorithm") != self._config.name:
            what = f"the saved optimizer is '{state.get('algorithm')}', the job's is '{self._config.name}'"
            raise CheckpointError(what, "Set optim.name back, or start a new run from the weights alone.")
        saved: Mapping[str, Mapping[str, Tensor]] = state["parameters"]
        _check_names(set(saved), set(self._parameters))
        pairs = [
            (f"{name} ({key})", target, saved[name].get(key))
            for name, parameter in self._parameters.items()
            for key, target in self._optimizer.state[parameter].items()
        ]
        for place, target, value in pairs:
            _check_alike(place, target, value)
        for _, target, value in pairs:
            target.copy_(value)


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place, one kernel for all tensors of a type."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))


def _trained(module: nn.Module, assignment: Assignment) -> dict[str, nn.Parameter]:
    """By name, in the module's order: what is neither frozen by the job nor by the module itself."""
    frozen = set(assignment.frozen)
    return {name: p for name, p in module.named_parameters() if p.requires_grad and name not in frozen}


def _check_names(saved: set[str], wanted: set[str]) -> None:
    odd = sorted(saved ^ wanted)
    if odd:
        where = "only the saved optimizer" if odd[0] in saved else "only this model"
        more = f", and {len(odd) - 1} more differ" if len(odd) > 1 else ""
        what = f"{where} has the trainable parameter '{odd[0]}'{more}"
        raise CheckpointError(what, "Use the model and the frozen groups of the saved run, or start a new one.")


def _check_alike(place: str, target: Tensor, value: Tensor | None) -> None:
    if value is None:
        raise CheckpointError(f"the saved optimizer has no {place}", "Use the optimizer settings of the saved run.")
    if value.shape != target.shape or value.dtype != target.dtype:
        kinds = f"{value.dtype} {tuple(value.shape)}, not {target.dtype} {tuple(target.shape)}"
        raise CheckpointError(f"the saved {place} is {kinds}", "Use the model and the precision of the saved run.")
