"""Runs a user's module as a sequence of pipeline units, with the user's own loss unchanged.

``model.stages`` names the units. The loss is called with a proxy for the module: on a pipeline's first stage it catches
the module's input, on the last it returns what the units computed, without a pipeline it runs them all. Invariant: the
three see the same numbers, random ones included; a loss or module that does not fit this scheme raises a one-sentence
error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Batch, Loss
from closeranks.core.registry import did_you_mean
from closeranks.models.losses import kind_of
from closeranks.models.unit_rng import seed_unit, unit_rng

LossFunction = Callable[[Any, Batch], "Tensor | Loss"]
LossCheck = Callable[["partial[Any]", Batch], Loss]
"""Calls a loss on a batch, checks what it returned, and reports mistakes with the user's line."""


class UserPipelineSpec:
    """A user's modules as pipeline units (``core.protocols.PipelineSpec``). ``units`` and ``costs`` are known once it
    is built."""

    def __init__(self, stages: Sequence[str], loss: LossFunction, loss_name: str, check_loss: LossCheck) -> None:
        self._stages = tuple(stages)
        self._loss, self._loss_name, self._check_loss = loss, loss_name, check_loss
        self._is_checked = False
        self.units: tuple[str, ...] = ()
        self.costs: tuple[float, ...] = ()

    def resolve(self, module: nn.Module) -> None:
        """Find the units in the built module; the cost of a unit is its number of parameters."""
        self.units = expand_patterns(self._stages, [name for name, _ in module.named_modules() if name])
        counts = [sum(p.numel() for p in module.get_submodule(unit).parameters()) for unit in self.units]
        self.costs = tuple(float(max(count, 1)) for count in counts)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not any(name.startswith(f"{unit}.") for unit in self.units):
                what = f"parameter '{name}' {list(parameter.shape)} is in none of the modules that model.stages names"
                raise ModelError(what, "Move it into one of them, or name the module that holds it.")

    def first_input(self, module: nn.Module, batch: Batch) -> Tensor:
        try:
            self._check_loss(partial(self._loss, ModuleProxy(module, self._loss_name, _catch, units=self.units)), batch)
        except _Caught as caught:
            return caught.input
        raise self._never_called()

    def shared_inputs(self, module: nn.Module, batch: Batch) -> None:
        """None: a user's units read the previous unit's output and nothing else."""

    def run_unit(self, module: nn.Module, number: int, hidden: Tensor, shared: None = None) -> Tensor:
        with unit_rng(number):
            output = module.get_submodule(self.units[number])(hidden)
        if not isinstance(output, Tensor):
            what = f"the stage '{self.units[number]}' returned {kind_of(output)}, but stages pass on one tensor"
            raise ModelError(what, "Make each module of model.stages take and return one tensor.")
        return output

    def loss_from_output(self, module: nn.Module, output: Tensor, batch: Batch) -> Loss:
        proxy = ModuleProxy(module, self._loss_name, lambda _: self._after_units(output), units=self.units)
        return self._through(proxy, batch)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """First input, all units, then the loss: what a run without a pipeline calls."""
        return self._through(ModuleProxy(module, self._loss_name, partial(self._run_units, module)), batch)

    def _through(self, proxy: ModuleProxy, batch: Batch) -> Loss:
        loss = self._check_loss(partial(self._loss, proxy), batch)
        if not proxy.is_called:
            raise self._never_called()
        return loss

    def _run_units(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Run all units in place of the module's own forward; hooks on the module still run."""
        if not self._is_checked:
            self._check_units(module, hidden)
            self._is_checked = True
        with _forward_replaced(module, partial(self._units, module)):
            output: Tensor = module(hidden)
        return self._after_units(output)

    def _units(self, module: nn.Module, hidden: Tensor) -> Tensor:
        for number in range(len(self.units)):
            hidden = self.run_unit(module, number, hidden)
        return hidden

    def _after_units(self, output: Tensor) -> Tensor:
        """Makes the random numbers that a loss draws after the module the same, whether the units ran here or not."""
        seed_unit(torch.default_generator.initial_seed(), len(self.units))
        return output

    def _check_units(self, module: nn.Module, hidden: Tensor) -> None:
        """Check that the units in sequence compute the same as the module's own forward.

        Costs two forwards, once. Skipped where a rank holds shards only: each forward would add collectives.
        """
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            return
        with _undisturbed(module):
            own, ours = module(hidden), self._units(module, hidden)
        if not isinstance(own, Tensor) or own.shape != ours.shape:
            found = list(own.shape) if isinstance(own, Tensor) else kind_of(own)
            self._refuse(f"gives {found} and the stages in a row {list(ours.shape)}")
        elif not torch.allclose(own, ours, rtol=1e-3, atol=1e-3 * float(own.abs().max()), equal_nan=True):
            self._refuse("and the stages in a row give different numbers")

    def _refuse(self, what: str) -> Never:
        fix = "Let model.stages name all that forward does, in order: move what happens between modules into one."
        raise ModelError(f"the module's own forward {what}", fix)

    def _never_called(self) -> ModelError:
        what = f"{self._loss_name} never called the module, but with model.stages its output is what stages pass on"
        return ModelError(what, "Call it once, as module(x), and compute the loss from what it returns.")


def expand_patterns(stages: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """Module names, with patterns replaced by what they match, in the module's order; ``*`` does not match dots."""
    units: list[str] = []
    for stage in stages:
        found = [name for name in modules if _matches(name, stage)]
        if not found:
            raise ModelError(f"model.stages names '{stage}', and the model has no such module", _hint(stage, modules))
        units.extend(found)
    for unit in units:
        around = next((other for other in units if unit.startswith(f"{other}.")), None)
        if around is not None:
            what = f"model.stages names '{unit}', which is a part of '{around}' that it names too"
            raise ModelError(what, "Name modules that do not contain one another.")
    return tuple(units)


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _hint(stage: str, modules: Sequence[str]) -> str:
    depth = stage.count(".")
    near = [name for name in modules if name.count(".") == depth] or modules
    return did_you_mean(stage, {re.sub(r"\b\d+\b", "*", name) for name in near} if "*" in stage else near)


class _Caught(BaseException):
    """Raised to end a loss when it calls the module; a user's ``except Exception`` does not catch it."""

    def __init__(self, input: Tensor) -> None:
        self.input = input


def _catch(input: Tensor) -> Never:
    raise _Caught(input)


_OF_THE_WHOLE = frozenset(
    {
        *("parameters", "named_parameters", "get_parameter", "buffers", "named_buffers", "state_dict"),
        *("modules", "named_modules", "get_submodule", "children", "named_children", "apply"),
    }
)
"""Methods of a module that on a stage would cover its own units alone."""


def _is_held(stage: nn.Module, unit: str) -> bool:
    """Whether the stage has the unit; units of other stages are None."""
    part: nn.Module | None = stage
    for name in unit.split("."):
        part = part._modules.get(name) if part is not None else None
    return part is not None


class ModuleProxy:
    """The proxy that a loss gets for the module: it handles one call with one tensor and forwards everything else.

    ``units``: the units of the whole model, where ``module`` is a stage. A loss term over the weights that a stage
    happens to hold would silently train another model, so reading them is refused. Not detected: a method of the module
    that reads its own parameters; and on the tensor axis, where shards are plain parameters, a loss that reads them.
    """

    def __init__(
        self, module: nn.Module, loss_name: str, call: Callable[[Tensor], Tensor], *, units: Sequence[str] = ()
    ) -> None:
        self._module, self._loss_name, self._call, self._units_of_model = module, loss_name, call, units
        self.is_called = False

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        if self.is_called:
            self._refuse("twice")
        if len(arguments) != 1 or named or not isinstance(arguments[0], Tensor):
            given = [kind_of(value) for value in arguments] + [f"{key}=" for key in named]
            self._refuse(f"with ({', '.join(given)})")
        self.is_called = True
        return self._call(arguments[0])

    def __getattr__(self, name: str) -> Any:
        below = [unit for unit in self._units_of_model if unit.partition(".")[0] == name]
        if (self._units_of_model and name in _OF_THE_WHOLE) or not all(_is_held(self._module, unit) for unit in below):
            what = f"{self._loss_name} read '{name}' of the module, of which a pipeline stage holds only a part"
            raise ModelError(what, "Put a term on weights into optim.weight_decay, or use pipeline=1.")
        return getattr(self._module, name)

    def _refuse(self, how: str) -> Never:
        what = f"{self._loss_name} called the module {how}, but with model.stages it is called once with one tensor"
        raise ModelError(what, "Call it as module(x), or remove model.stages and train without a pipeline.")


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces forward for one call, so that after training the module is the user's own again."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation without side effects: no graph, no compilation, no change of running statistics or random state."""
    modes = [(part, part.training) for part in module.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # set_stance would import the compiler, which takes seconds where it is not in use.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), eager:
            yield
    finally:
        for part, is_training in modes:
            part.training = is_training
