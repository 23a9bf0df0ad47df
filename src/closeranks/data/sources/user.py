"""How does a dataset of the user's own become a source?

Anything with a length and items will do. Invariant: a batch is a dict of tensors, whatever a sample looked like; an
error in the user's code names the sample and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from closeranks.core.blame import describe
from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.protocols import Batch, Source
from closeranks.core.registry import load_object
from closeranks.data.config import UserDataConfig
from closeranks.data.sources.faults import fault, name_any_of
from closeranks.data.sources.registry import SOURCES, Split
from closeranks.data.stores import Ints
from closeranks.data.timing import stage


class MapSource:
    """A map-style dataset: samples that are dicts, pairs ``(x, y)``, or single tensors (bare or ``(x,)``).

    The loader reads it from a background thread, so a sample should follow from its index alone: what a dataset draws
    from a global random generator does not repeat from run to run.
    """

    def __init__(self, dataset: Any, identity: str = "") -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            what = f"{type(dataset).__name__} is no map-style dataset: it has no length or no items"
            raise DataError(what, "Give an object with __len__ and __getitem__; a stream must be stored first.")
        if len(dataset) == 0:
            raise DataError("the dataset is empty", "Give it at least one sample.")
        self._dataset = dataset
        kind = type(dataset)
        self.identity = identity or f"{kind.__module__}.{kind.__qualname__} ({len(dataset)} samples)"

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Ints) -> Batch:
        samples = self._samples([int(index) for index in indices])
        with stage("collate"):
            return _named(default_collate(samples), samples[0], self.identity)

    def _samples(self, indices: list[int]) -> list[Any]:
        """Through ``__getitems__`` where the dataset has it (one call per batch), as torch's own loader does."""
        if hasattr(self._dataset, "__getitems__"):
            return list(self._asked(self._dataset.__getitems__, indices, name_any_of(indices)))
        return [self._asked(self._dataset.__getitem__, index, f"sample {index}") for index in indices]

    def _asked(self, ask: Callable[[Any], Any], which: Any, named: str) -> Any:
        try:
            return ask(which)
        except CloseranksError:
            raise
        except Exception as error:
            raise fault(
                f"{named} of {self.identity}", error, "Mend the dataset, or remove the sample from it."
            ) from error


def _named(collated: Any, sample: Any, identity: str) -> Batch:
    if isinstance(sample, Mapping):
        return dict(collated)
    if isinstance(sample, (tuple, list)) and len(sample) in (1, 2):
        return dict(zip("xy", collated, strict=False))
    if isinstance(collated, Tensor):
        return {"x": collated}
    what = f"a sample of {identity} is of type {type(sample).__name__}, which cannot be named"
    raise DataError(what, "Return a dict of tensors, a pair (x, y), or one tensor.")


def as_source(data: Any, identity: str = "") -> Source:
    """Any dataset as a source; an object that already reads batches is used as it is."""
    if isinstance(data, Source):
        if len(data) == 0:
            raise DataError(f"{data.identity or 'the dataset'} is empty", "Give it at least one sample.")
        return data
    return MapSource(data, identity)


@SOURCES.register("user")
def open_user(config: UserDataConfig, split: Split, seed: int) -> Source | None:
    if split == "train":
        return _build(config.name, config.args, "data.name")
    return _build(config.eval, {**config.args, **config.eval_args}, "data.eval") if config.eval else None


def _build(path: str, args: Mapping[str, Any], place: str) -> Source:
    factory = load_object(path, place=place)
    if not callable(factory):
        return as_source(factory, path)
    try:
        data = factory(**args)
    except CloseranksError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        what = f"{place} = '{path}': calling it with ({given}) raised {describe(error)}"
        raise DataError(what, "Mend the factory, or the arguments in data.args.") from error
    if data is None:
        raise DataError(f"{place} = '{path}' returned None", "Let the factory return its dataset.")
    return as_source(data, path)
