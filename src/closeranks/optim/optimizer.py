"""The optimizer: applies a step's gradients to the weights that this rank holds.

Invariant: an update happens completely or not at all, by a flag on the device that the host does not read; a step that
is not taken leaves weights, moments and counters unchanged, bit for bit. Rates and decay are decided on the whole
model, so a shard of a matrix is treated like the matrix. State is keyed by parameter names. A parameter without a
gradient on any rank keeps weight, moments and counter, as with torch's optimizers in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece
from closeranks.core.protocols import ParameterShard
from closeranks.optim import layerwise  # noqa: F401  registers lars and lamb
from closeranks.optim.algorithms import ALGORITHMS, Total
from closeranks.optim.config import OptimConfig
from closeranks.optim.groups import GroupAssignment, ParameterFacts, assign
from closeranks.optim.lr_schedule import lr_factor


def parameter_facts(module: nn.Module) -> tuple[ParameterFacts, ...]:
    """Each parameter once, under its first name, with its other names if it is tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(ParameterFacts(first, tuple(p.shape), tuple(more)) for p, (first, *more) in names.items())


def freeze(module: nn.Module, config: OptimConfig) -> GroupAssignment:
    """Decide how each parameter of a whole model is treated, and turn off the gradients of frozen ones.

    Call before anything is sharded or relies on ``requires_grad``: patterns and decay are about whole parameters.
    """
    assignment = assign(parameter_facts(module), config)
    for name in assignment.frozen:
        module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        fix = "Loosen the frozen patterns in optim.groups." if assignment.frozen else "Give it trainable parameters."
        raise ModelError("the model has no parameter left to train", fix)
    return assignment


def whole_parameters(module: nn.Module) -> tuple[ParameterShard, ...]:
    """The trainable parameters of a module that one rank holds whole, as parameter shards."""
    named = module.named_parameters()
    return tuple(ParameterShard(p, Piece.whole(name, tuple(p.shape))) for name, p in named if p.requires_grad)


class Optimizer:
    """Updates the parameter shards that this rank holds: whole parameters or parts of them, possibly none.

    ``frozen_from``: the step from which adamw's second moments are frozen, [Note: frozen moments]. ``total`` sums over
    all ranks; None where each holds its parameters whole, or there is one rank.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        assignment: GroupAssignment,
        config: OptimConfig,
        *,
        num_steps: int,
        frozen_from: int | None = None,
        total: Total | None = None,
    ) -> None:
        self.rate_scale = 1.0
        """What every rate is multiplied by, until it is set again."""
        self._frozen_from = frozen_from
        self._config = config
        self._num_steps = num_steps
        self._shards = tuple(shards)
        self._by_name: dict[str, list[ParameterShard]] = {}
        for shard in shards:
            self._by_name.setdefault(shard.piece.name, []).append(shard)
        algorithm = ALGORITHMS[config.name](_param_groups(shards, assignment), config)
        self._optimizer: Any = algorithm.optimizer
        for shard in shards:
            self._optimizer.state[shard.tensor] = algorithm.init_state(shard.tensor)
        if algorithm.bind is not None:
            algorithm.bind(shards, [name for group in assignment.groups for name in group.names], total)
        self.restored = algorithm.on_restored or (lambda: None)
        """To be called after the tensors from ``state_tensors`` were overwritten (a restored state)."""
        self.can_gate = algorithm.bind is None
        """Whether shards can be updated one by one: not where all ranks sum norms in the middle of an update."""
        # The kernels take their gradient scale in float32, too imprecise for float64 parameters.
        self._fuses_scaling = all(shard.tensor.dtype != torch.float64 for shard in shards)

    def lr(self, step: int) -> float:
        """The learning rate of a step, before the groups' own factors."""
        return self._config.lr * lr_factor(self._config.schedule, step, self._num_steps)

    def step(
        self,
        step: int,
        gradients: Sequence[Tensor],
        factor: Tensor,
        ok: Tensor,
        *,
        unused: Collection[str] = (),
        gates: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Update with ``factor`` times the gradients where ``ok`` is 1; change nothing where it is 0. No host sync.

        ``gradients`` are the shards' own ``.grad``, or the flat tensors of which those are views; their values are
        undefined afterwards. Where the kernel can scale as it reads, scaling costs no pass of its own. ``unused`` names
        parameters that are not updated, ``gates`` those for which only the device knows: a flag each, 1 where the
        parameter is updated.
        """
        rate = self.lr(step) * self.rate_scale
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        if self._frozen_from is not None:
            self._optimizer.is_frozen = step >= self._frozen_from
        self._optimizer.found_inf = 1.0 - ok.to(torch.float32)
        if self._fuses_scaling:
            self._optimizer.grad_scale = factor.to(torch.float32).reciprocal()
        else:
            scale_gradients(gradients, factor)
        for name in unused:
            for shard in self._by_name.get(name, ()):
                shard.tensor.grad = None
        if gates:
            self._step_gated(gates)
        else:
            self._optimizer.step()

    def _step_gated(self, gates: Mapping[str, Tensor]) -> None:
        """First all but the gated parameters, then each of those under its own flag."""
        groups, found_inf = self._optimizer.param_groups, self._optimizer.found_inf
        whole = [group["params"] for group in groups]
        gated = {shard.tensor for name in gates for shard in self._by_name.get(name, ())}
        try:
            for group, tensors in zip(groups, whole, strict=True):
                group["params"] = [tensor for tensor in tensors if tensor not in gated]
            self._optimizer.step()
            for name, flag in gates.items():
                own = {shard.tensor for shard in self._by_name.get(name, ())}
                for group, tensors in zip(groups, whole, strict=True):
                    group["params"] = [tensor for tensor in tensors if tensor in own]
                self._optimizer.found_inf = torch.maximum(found_inf, 1.0 - flag.to(torch.float32))
                self._optimizer.step()
        finally:
            for group, tensors in zip(groups, whole, strict=True):
                group["params"] = tensors

    def state_tensors(self) -> Iterator[tuple[ParameterShard, str, Tensor]]:
        """All state tensors, each with its parameter shard and its key.

        A tensor has the shape of its shard, or is a 0-dim counter, which is the same for all shards of a parameter.
        """
        for shard in self._shards:
            for key, tensor in self._optimizer.state[shard.tensor].items():
                yield shard, key, tensor


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place, one kernel for all tensors of a type."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))


def _param_groups(shards: Sequence[ParameterShard], assignment: GroupAssignment) -> list[dict[str, Any]]:
    """One for each group of the assignment, in its order; empty ones stay, since torch wants at least one."""
    number = {name: index for index, group in enumerate(assignment.groups) for name in group.names}
    groups: list[dict[str, Any]] = [
        {"params": [], "lr_scale": group.lr_scale, "weight_decay": group.weight_decay} for group in assignment.groups
    ]
    for shard in shards:
        groups[number[shard.piece.name]]["params"].append(shard.tensor)
    return groups
