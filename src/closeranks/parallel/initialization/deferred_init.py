"""Deferred initialization: runs a user's model factory without allocating the model that it builds.

The factory runs on fake tensors (without data), and every operation that creates or changes one is recorded; ``replay``
then computes any single parameter. The values are those of the factory run for real after ``torch.manual_seed(seed)``,
bit for bit, so that a sharded layout starts from the same model as an unsharded one. Where Python code reads a value
(``.item()``, a list, a condition), it is computed on the spot. Invariant: what cannot be recorded faithfully raises
``NotRecordable``, and the caller builds the module whole instead; nothing is guessed.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from closeranks.core.tracebacks import one_line_error
from closeranks.parallel.initialization.op_replay import OpReplay, OpTrace, RecordedOp, RngDraw, StorageView
from closeranks.parallel.initialization.tied_tensors import named_tensors, shared_storage, to_meta

_aten = torch.ops.aten
_FROM_OUTSIDE = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default}
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_OVERWRITING = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
_OVERWRITING |= {"fill_", "zero_", "copy_"}
"""In-place operations that do not read the previous value of their target."""


class NotRecordable(Exception):
    """Says why a factory could not be recorded: a signal to the caller, never an error of the run."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A factory's module without data, and the recording that computes each of its parameters and buffers."""

    module: nn.Module
    program: OpTrace
    views: dict[str, StorageView]
    replay: OpReplay

    def value(self, name: str) -> Tensor:
        return self.replay.value(self.views[name])

    @property
    def fingerprint(self) -> int:
        """Equal where two ranks recorded the same operations: a factory may use numpy's random numbers, the clock or
        its rank. Never 0."""
        digest = blake2b(digest_size=7)
        for part in (self.views, self.program.instructions, self.program.num_bytes):
            digest.update(repr(part).encode())
        for storage, data in self.program.constants.items():
            digest.update(str(storage).encode() + data.numpy().data)
        for draw in self.program.draws:
            digest.update(draw.start.numpy().data if isinstance(draw.start, Tensor) else str(draw.start).encode())
        return int.from_bytes(digest.digest(), "little") + 1


def record(factory: Callable[[], nn.Module], seed: int) -> Recording:
    """Run the factory without data; raises ``NotRecordable`` where its parameters cannot be computed one by one.

    Cost: a fraction of a millisecond per operation of the factory, and whatever data it brings from outside of torch.
    """
    with _outer_randomness_kept():
        torch.manual_seed(seed)
        recorder = _Recorder(seed)
        try:
            with recorder.fake, recorder, warnings.catch_warnings():
                # Deep-copying a module reads data pointers; a fake tensor has none, and is copied correctly anyway.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                module = factory()
        except NotRecordable:
            raise
        except Exception as error:  # anything may fail on fake tensors; the whole build shows real errors
            raise NotRecordable(one_line_error(_root(error))) from error
        views = {name: recorder.registered(name, tensor) for name, tensor in named_tensors(module)}
        if shared := shared_storage(module):
            raise NotRecordable(f"'{shared[0]}' and '{shared[1]}' share memory without being one parameter")
        recorder.fill_plain_attributes(module, views.values())
        to_meta(module)
        recorder.check_nothing_escaped()
    return Recording(module, recorder.program, views, recorder.replay)


class _NoData(FakeTensorMode):
    """The fake tensor mode of one recording."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The memo would hold a weak reference to each tensor, and torch refuses to convert a parameter that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> _NoData:
        """Not copied: modules may be deep-copied while they are built, and the copies' tensors stay in this mode."""
        return self


class _Recorder(TorchDispatchMode):
    """Intercepts every operation before the fake tensor mode does, and records it."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = _NoData()
        self.program = OpTrace(seed)
        self.replay = OpReplay(self.program)
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # an address identifies a storage only while the storage is alive
        self._states: dict[bytes, int] = {_state(): -1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_OUTSIDE:
            return self._constant(args[0])
        if func is _aten._local_scalar_dense.default:
            with unset_fake_temporarily():
                return self._value(args[0]).item()
        written = list(_written(func, args, kwargs))
        if not all(isinstance(tensor, FakeTensor) for tensor in written):
            raise NotRecordable(f"{func} changes a tensor that existed before")
        args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
        given = tree_map_only(Tensor, self._view, (args, kwargs))
        result = self._execute(func, args, kwargs)
        self._write_down(func, given, [self._view(tensor) for tensor in written], result)
        return result

    def registered(self, name: str, tensor: Tensor) -> StorageView:
        """The view behind a parameter or buffer."""
        if not isinstance(tensor, FakeTensor):
            raise NotRecordable(f"'{name}' existed before the factory ran")
        if is_lazy(tensor):
            raise NotRecordable(f"'{name}' has no shape yet")
        return self._view(tensor)

    def fill_plain_attributes(self, module: nn.Module, views: Iterable[StorageView]) -> None:
        """Compute the tensors that a module holds as ordinary attributes now, since nothing shards them. Those that
        share memory with a parameter or buffer get no values, and ``check_nothing_escaped`` finds them."""
        taken = {view.storage for view in views}

        def filled(leaf: Tensor) -> Tensor:
            return leaf if self._view(leaf).storage in taken else self._value(leaf)

        for part in module.modules():
            for name, value in list(vars(part).items()):
                is_plain = name not in ("_parameters", "_buffers", "_modules")
                if is_plain and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
                    object.__setattr__(part, name, tree_map_only(FakeTensor, filled, value))

    def check_nothing_escaped(self) -> None:
        """Refuse fake tensors that survive in a closure, a cache or a list: the training step would use them."""
        self._kept.clear()
        gc.collect()
        if any(type(found) is FakeTensor and found.fake_mode is self.fake for found in gc.get_objects()):
            raise NotRecordable("the factory keeps a tensor where it cannot be found")

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except _NEEDS_VALUES:
            if any(argument.alias_info is not None for argument in func._schema.arguments):
                raise
            with unset_fake_temporarily():
                real_args, real_kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
                result = func(*real_args, **real_kwargs)
            return tree_map_only(Tensor, self.fake.from_tensor, result)

    def _write_down(self, func: Any, given: tuple[Any, Any], written: list[StorageView], result: Any) -> None:
        made = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result)]
        fresh = {tensor.untyped_storage()._cdata for tensor in made if tensor is not None} - self._numbers.keys()
        outputs = tuple(None if tensor is None else self._view(tensor, may_be_new=True) for tensor in made)
        if torch.Tag.inplace_view in func.tags or not (fresh or written):
            return
        args, kwargs = given
        is_blind = func._opname in _OVERWRITING
        read = tree_leaves((args[1:] if is_blind else args, kwargs))
        reads = frozenset(leaf.storage for leaf in read if isinstance(leaf, StorageView))
        writes = frozenset(view.storage for view in written) | {self._numbers[key] for key in fresh}
        is_lost = is_blind and args[0].storage not in reads and self._is_all_of_it(args[0])
        overwrites = args[0].storage if is_lost else None
        draw = self._draw(func, kwargs)
        self.program.add(RecordedOp(func, tuple(args), kwargs, reads, writes, outputs, overwrites, draw))

    def _draw(self, func: Any, kwargs: dict[str, Any]) -> int | None:
        """The number of this draw. The real generator advances by one number per draw, so that code which saves and
        restores its state, or reseeds it, is followed: each state identifies the draw that precedes it."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        if kwargs.get("generator") is not None:
            raise NotRecordable("the factory uses a random generator of its own")
        number, state = len(self.program.draws), _state()
        start = self._states.get(state)
        unknown = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self.program.draws.append(RngDraw(len(self.program.instructions), unknown if start is None else start))
        with unset_fake_temporarily():
            torch.rand(())
        self._states[_state()] = number
        return number

    def _view(self, tensor: Tensor, may_be_new: bool = False) -> StorageView:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            raise NotRecordable(f"the factory makes a {tensor.layout} tensor on {tensor.device}")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            if not may_be_new:
                raise NotRecordable("the factory loads tensors in a way that cannot be followed")
            self._kept.append(storage)
            self._numbers[storage._cdata] = len(self._numbers)
            self.program.num_bytes[len(self._numbers) - 1] = storage.nbytes()
        number = self._numbers[storage._cdata]
        if storage.nbytes() != self.program.num_bytes[number]:
            raise NotRecordable("the factory resizes a tensor")
        return StorageView(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _is_all_of_it(self, view: StorageView) -> bool:
        num_values = int(np.prod(view.size, dtype=np.int64))
        return num_values * view.dtype.itemsize == self.program.num_bytes[view.storage]

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)

    def _constant(self, real: Tensor) -> Tensor:
        """A fake tensor for data that comes from outside of torch; a copy of the data is kept."""
        if isinstance(real, FakeTensor):
            return real
        with unset_fake_temporarily():
            data = torch.empty(0, dtype=torch.uint8).set_(real.detach().untyped_storage()).clone()
        stand_in = self.fake.from_tensor(real)
        number = self._view(stand_in, may_be_new=True).storage
        with unset_fake_temporarily():
            if not torch.equal(self.program.constants.setdefault(number, data), data):
                raise NotRecordable("the factory changes data outside of torch after torch has read it")
        return stand_in

    def _value(self, tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            return self.replay.value(self._view(tensor)) if isinstance(tensor, FakeTensor) else tensor


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation changes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _state() -> bytes:
    with unset_fake_temporarily():
        return torch.get_rng_state().numpy().tobytes()


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _outer_randomness_kept() -> Iterator[None]:
    """Restore the random state of Python and numpy: a factory that cannot be recorded runs again, and must then draw
    the same numbers."""
    python, outer = random.getstate(), np.random.get_state()
    try:
        yield
    except NotRecordable:
        random.setstate(python)
        np.random.set_state(outer)
        raise
