"""Makes a source of the user's own dataset.

Anything with a length and items can be used; a collate function makes one batch of a list of samples, as in torch's
DataLoader. Invariant: a batch is a dict of tensors, whatever form the samples have; an error in the user's code names
the sample and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import default_collate

from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.protocols import Batch, DataSource
from closeranks.core.registry import load_object
from closeranks.core.tracebacks import describe_error
from closeranks.data.config import UserDataConfig
from closeranks.data.dataset_protocol import Ints
from closeranks.data.loading.sample_reader import name_samples
from closeranks.data.sources.registry import SOURCES, Split
from closeranks.data.sources.sample_errors import name_some_samples, sample_error
from closeranks.data.timing import stage

Collate: TypeAlias = Callable[[list[Any]], Any]
_SHAPES_SHOWN = 6


class MapSource:
    """A map-style dataset: samples that are dicts, pairs ``(x, y)``, or single tensors (bare or ``(x,)``).

    The loader reads it from a background thread, so a sample should depend on its index alone: what a dataset draws
    from a global random generator is not reproducible from run to run. ``collate`` gets the list of a micro-batch's
    samples and returns a dict of tensors, a pair ``(x, y)`` or one tensor, with a row for each sample.
    """

    def __init__(self, dataset: Any, identity: str = "", collate: Collate | None = None) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            what = f"{type(dataset).__name__} is not a map-style dataset: it has no __len__ or no __getitem__"
            raise DataError(what, "Give an object with __len__ and __getitem__; a stream must be stored first.")
        if len(dataset) == 0:
            raise DataError("the dataset is empty", "Give it at least one sample.")
        self._dataset, self._collate = dataset, collate
        kind = type(dataset)
        self.identity = identity or f"{kind.__module__}.{kind.__qualname__} ({len(dataset)} samples)"

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Ints) -> Batch:
        samples = self._samples([int(index) for index in indices])
        with stage("collate"):
            if self._collate is not None:
                named = f"collating {name_samples(indices)} of {self.identity}"
                collated = self._asked(self._collate, samples, named)
                return _named(collated, collated, f"what collate returned for {self.identity}")
            try:
                collated = default_collate(samples)
            except RuntimeError as error:
                if not (unlike := shape_mismatch(samples)):
                    raise
                raise self._unequal(indices, unlike) from error
            return _named(collated, samples[0], f"a sample of {self.identity}")

    def _unequal(self, indices: Ints, unlike: str) -> DataError:
        what = f"{name_samples(indices)} of {self.identity} do not stack into one micro-batch of "
        what += f"{len(indices)}: {unlike}"
        fix = "Give collate=, a function that pads a list of samples into one batch (data.collate in a job file), or "
        return DataError(what, f"{fix}make them equal in the dataset; train.micro_batch = 1 takes them one by one.")

    def _samples(self, indices: list[int]) -> list[Any]:
        """Through ``__getitems__`` where the dataset has it (one call per batch), as torch's own loader does."""
        if callable(getattr(self._dataset, "__getitems__", None)):
            named = f"{name_some_samples(indices)} of {self.identity}"
            return list(self._asked(self._dataset.__getitems__, indices, named))
        return [self._asked(self._dataset.__getitem__, i, f"sample {i} of {self.identity}") for i in indices]

    def _asked(self, ask: Callable[[Any], Any], which: Any, named: str) -> Any:
        try:
            return ask(which)
        except CloseranksError:
            raise
        except Exception as error:
            raise sample_error(named, error, "Fix the dataset, or remove the sample from it.") from error


def shape_mismatch(samples: Sequence[Any]) -> str:
    """Which field of the samples has which shapes, in words; empty if all are equal."""
    for name, values in _fields(samples):
        shapes = list(dict.fromkeys(_shape(value) for value in values))
        if len(shapes) > 1:
            is_flat = all(len(shape) == 1 for shape in shapes)
            shown = ", ".join(str(shape[0] if is_flat else shape) for shape in shapes[:_SHAPES_SHOWN])
            more = ", ..." if len(shapes) > _SHAPES_SHOWN else ""
            return f"{name} has {'lengths' if is_flat else 'shapes'} {shown}{more}"
    return ""


def _fields(samples: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    first = samples[0]
    if isinstance(first, Mapping):
        yield from ((f"'{key}'", [one[key] for one in samples if key in one]) for key in first)
    elif isinstance(first, (tuple, list)) and len(first) in (1, 2) and not _is_number(first[0]):
        yield from ((f"'{name}'", [one[at] for one in samples if at < len(one)]) for at, name in enumerate("xy"))
    else:
        yield "'x'", list(samples)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _shape(value: Any) -> tuple[int, ...]:
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (list, tuple)) else ()


def _named(collated: Any, sample: Any, what: str) -> Batch:
    if isinstance(sample, Mapping) and isinstance(collated, Mapping):
        return dict(collated)
    if isinstance(sample, (tuple, list)) and len(sample) in (1, 2):
        return dict(zip("xy", collated, strict=False))
    if isinstance(collated, Tensor):
        return {"x": collated}
    what = f"{what} is of type {type(sample).__name__}, which cannot be named"
    raise DataError(what, "Return a dict of tensors, a pair (x, y), or one tensor.")


def as_source(data: Any, identity: str = "", collate: Any = None) -> DataSource:
    """Any dataset as a source; an object that already reads batches is used as it is."""
    if collate is not None and not callable(collate):  # a job file may name anything
        what = f"collate is of type {type(collate).__name__}, which cannot be called"
        raise DataError(what, "Give a function that makes a batch of a list of samples.")
    if isinstance(data, DataSource):
        if collate is not None:
            what = f"collate is given, but {data.identity or 'the dataset'} reads whole batches itself"
            raise DataError(what, "Leave collate out, or pad in its read().")
        if len(data) == 0:
            raise DataError(f"{data.identity or 'the dataset'} is empty", "Give it at least one sample.")
        return data
    return MapSource(data, identity, collate)


@SOURCES.register("user")
def open_user(config: UserDataConfig, split: Split, seed: int) -> DataSource | None:
    collate = load_object(config.collate, place="data.collate") if config.collate else None
    if split == "train":
        return _build(config.name, config.args, "data.name", collate)
    args = {**config.args, **config.eval_args}
    return _build(config.eval, args, "data.eval", collate) if config.eval else None


def _build(path: str, args: Mapping[str, Any], place: str, collate: Collate | None) -> DataSource:
    factory = load_object(path, place=place)
    if not callable(factory):
        return as_source(factory, path, collate)
    try:
        data = factory(**args)
    except CloseranksError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        what = f"{place} = '{path}': calling it with ({given}) raised {describe_error(error)}"
        raise DataError(what, "Fix the factory, or the arguments in data.args.") from error
    if data is None:
        raise DataError(f"{place} = '{path}' returned None", "Let the factory return its dataset.")
    return as_source(data, path, collate)
