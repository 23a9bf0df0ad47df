"""The model spec of a user's own torch module.

A factory builds the module and a callable computes its loss. Invariant: a mistake in either raises a one-sentence error
that names the callable, what it did and the line of the user's file; other errors (a device that fails, a collective
that breaks) pass through unchanged, because the run recovers from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from closeranks.core.errors import CloseranksError, ModelError
from closeranks.core.protocols import ActivationCollectives, Batch, Loss, PipelineSpec, ShardingRule
from closeranks.core.registry import load_object
from closeranks.core.tracebacks import display_path, one_line_error, user_frame
from closeranks.models.batches import num_samples
from closeranks.models.config import TensorEntry, UserModelConfig
from closeranks.models.losses import as_loss, kind_of
from closeranks.models.registry import MODELS
from closeranks.models.user_pipeline import LossFunction, UserPipelineSpec

# Programming errors. RuntimeError is left out on purpose: out of memory and broken collectives raise it.
_USER_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


class UserSpec:
    """A user's module as a run sees it (``core.protocols.ModelSpec``).

    ``blocks`` and the units of ``pipeline_spec`` are known once it is built.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[..., Any],
        *,
        args: Mapping[str, Any] | None = None,
        loss: LossFunction | None = None,
        loss_name: str = "the loss",
        metrics: tuple[str, ...] = (),
        seq_len: int = 0,
        stages: Sequence[str] = (),
        tensor: Sequence[TensorEntry] = (),
    ) -> None:
        self.name = name
        self.metrics = metrics
        self.builds_on_meta = False
        self.item = "token" if seq_len else "sample"
        self.items_per_sample = seq_len or 1
        self.flops_per_item = 0.0
        self.blocks: tuple[str, ...] = ()
        self.compile_units: tuple[str, ...] = ()
        self.sharding_rules: tuple[ShardingRule, ...] = tuple(entry.sharding_rule() for entry in tensor)
        self.activation_collectives: tuple[ActivationCollectives, ...] = tuple(
            c for entry in tensor if (c := entry.activation_collectives()) is not None
        )
        self._factory = _checked_factory(name, factory)
        self._args = dict(args or {})
        self._loss = loss
        self._loss_name = loss_name if loss is not None else f"the loss of {name}"
        self._pipeline_spec = self._make_pipeline_spec(stages) if stages else None
        self.pipeline_spec: PipelineSpec | None = self._pipeline_spec

    def build(self) -> nn.Module:
        """Call the factory. The caller seeds torch first: all ranks must draw the same weights."""
        try:
            module = self._factory(**self._args)
        except CloseranksError:
            raise
        except Exception as error:
            line = error_line(error, self._factory)
            what = f"the factory {self.name} raised {one_line_error(error)} ({line})"
            raise ModelError(what, "Fix it there, or the keys under [model.args].") from error
        if not isinstance(module, nn.Module):
            what = (
                f"the factory {self.name} ({defined_at(self._factory)}) returned {kind_of(module)}, not a torch module"
            )
            raise ModelError(what, "Return a torch.nn.Module.")
        _refuse_lazy(self.name, module)
        self.blocks = self.compile_units = find_blocks(module)
        if self._pipeline_spec is not None:
            self._pipeline_spec.resolve(module)
        return module

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Nothing to do: the factory has initialized the weights."""

    def init_buffers(self, module: nn.Module) -> None:
        """Nothing to do: the factory has initialized the buffers."""

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        if self._pipeline_spec is not None:
            return self._pipeline_spec.loss(module, batch)
        return self._checked_loss(self._loss_of(module), batch)

    def _checked_loss(self, compute: partial[Any], batch: Batch) -> Loss:
        try:
            result = compute(batch)
        except CloseranksError:
            raise
        except _USER_ERRORS as error:
            line = error_line(error, compute.func)
            found = ", ".join(sorted(batch))
            what = f"{self._loss_name} raised {one_line_error(error)} ({line})"
            raise ModelError(what, f"Fix it there; the batch holds {found}.") from error
        place = f"{self._loss_name} ({defined_at(compute.func)})"
        return as_loss(result, num_samples(batch), self.metrics, place)

    def _make_pipeline_spec(self, stages: Sequence[str]) -> UserPipelineSpec:
        if self._loss is None:
            what = "model.stages needs a separate loss function: no pipeline stage holds the whole module to call"
            raise ModelError(what, "Give model.loss (in Python: loss), a function of (module, batch).")
        return UserPipelineSpec(stages, self._loss, self._loss_name, self._checked_loss)

    def _loss_of(self, module: nn.Module) -> partial[Any]:
        """The user's function, else the module's own ``loss``, else the module itself."""
        if self._loss is not None:
            return partial(self._loss, module)
        if callable(own := getattr(module, "loss", None)) and not isinstance(own, nn.Module):
            return partial(own)
        # Call the module, but report errors at forward: that is the code the user wrote.
        return partial(_Called(module))


def _refuse_lazy(name: str, module: nn.Module) -> None:
    """Refuse lazy parameters: before the first batch gives them a shape they cannot be counted, sharded, reduced or
    saved."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [key for key, tensor in tensors if is_lazy(tensor)]
    if lazy:
        owner = type(module.get_submodule(lazy[0].rpartition(".")[0])).__name__
        more = f" and {len(lazy) - 1} more have" if len(lazy) > 1 else " has"
        what = f"in the model {name}, '{lazy[0]}' ({owner}){more} no shape yet: a lazy module takes it from its "
        what += "first input"
        fix = "Name the size (nn.Linear(in_features, ...)), or run one dummy batch through the model where it is made."
        raise ModelError(what, fix)


class _Called:
    """A module as a plain function of the batch; errors are reported at its ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.__wrapped__ = module.forward

    def __call__(self, batch: Batch) -> Any:
        return self._module(batch)


def _checked_factory(name: str, factory: Any) -> Callable[..., Any]:
    if isinstance(factory, nn.Module):
        fix = "Point to a function or class that builds it, so that every worker builds its own."
        raise ModelError(f"{name} is a module that is already built, not a factory", fix)
    if not callable(factory):
        raise ModelError(f"{name} is {kind_of(factory)}, not a factory", "Point to a function that returns the module.")
    return factory  # type: ignore[no-any-return]  # callable() does not narrow Any


def error_line(error: BaseException, source: Callable[..., Any]) -> str:
    """``file.py:12`` for an error that calling ``source`` raised."""
    frame = user_frame(error)
    return f"{display_path(frame.filename)}:{frame.lineno}" if frame else defined_at(source)


def defined_at(source: Callable[..., Any]) -> str:
    """``file.py:12`` where a callable is defined; its name where that is unknown."""
    code = getattr(inspect.unwrap(source), "__code__", None)
    if code is not None:
        return f"{display_path(code.co_filename)}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1]}"
    except (TypeError, OSError):
        return getattr(source, "__qualname__", repr(source))


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """The children of the first ModuleList or Sequential with more than one element, as the units of compile."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1:
            return tuple(f"{name}.{child}" if name else child for child, _ in part.named_children())
    return ()


@MODELS.register("user")
def user_spec(config: UserModelConfig, *, seq_len: int) -> UserSpec:
    return UserSpec(
        config.name,
        load_object(config.name, place="model.name"),
        args=config.args,
        loss=load_object(config.loss, place="model.loss") if config.loss else None,
        loss_name=f"the loss {config.loss}",
        metrics=config.metrics,
        seq_len=seq_len,
        stages=config.stages,
        tensor=config.tensor,
    )
