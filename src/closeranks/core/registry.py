"""Resolves a name in a job to a built-in object or to one of the user's.

``Registry`` holds what a room offers under short names; ``load_object`` imports ``package.module:attribute``.
Invariant: an unknown name raises an error that suggests the nearest known one, never a bare KeyError.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from closeranks.core.errors import UserError

T = TypeVar("T")
_NAME_CHARS = 200


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to append to an error: the nearest known name, or all of them when none is near."""
    names = sorted(known)
    near = closest_match(name, names)
    return f"Did you mean '{near}'?" if near else f"Known: {', '.join(names)}."


def closest_match(name: str, known: Sequence[str]) -> str:
    """The known name that was probably meant; empty if none is near. Fast for any input."""
    if len(name) > _NAME_CHARS:
        return ""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.6)), "")


class Registry(Generic[T]):
    """Names of one kind of object (models, sources, optimizers), registered by a decorator beside each object."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self._kind} '{name}' is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise UserError(f"there is no {self._kind} '{name}'", did_you_mean(name, self._entries)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def is_import_path(name: str) -> bool:
    """Whether a name points into the user's own code (``package.module:attribute``)."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def load_object(path: str, *, place: str) -> Any:
    """Import ``package.module:attribute``; ``place`` is the job key that named it, for the error."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing == module_name or module_name.startswith(f"{missing}."):
            fix = "Run from the folder that holds it, or install it; the job file's own folder is searched too."
            raise UserError(f"{place} = '{path}': there is no module '{missing}'", fix) from None
        raise UserError(f"{place} = '{path}': importing it needs '{missing}'", f"Install '{missing}'.") from error
    except Exception as error:
        raise UserError(f"{place} = '{path}': importing it raised {type(error).__name__}: {error}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in vars(target) if not name.startswith("_")]
            raise UserError(f"{place} = '{path}': '{module_name}' has no '{part}'", did_you_mean(part, public))
        target = getattr(target, part)
    return target
