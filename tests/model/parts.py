"""Parts of a model as values: copied before every step, compared by content, stepped only once.

A part is any object with `take(event) -> outputs`.  The machines inside it are the project's own;
as they are pure, one step from one content always gives the same, so each step is run once and
remembered.  That makes a search over global states cheap: they are tuples of numbers of contents.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dlcore.base.config import LogConfig
from dlcore.metadata.attempts import Attempts
from dlcore.metadata.paths import NamespacePaths

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

_ATOMS = (
    *(int, str, bytes, float, type(None), Enum, BaseException, memoryview, random.Random),
    *(LogConfig, NamespacePaths),
)


class Part(Protocol):
    """One of the things that a global state consists of."""

    def take(self, event: Any) -> Sequence[Any]:
        """Change by `event`; return what that sends out."""
        ...


class Parts:
    """Every content that some part ever had, by number, and every step between them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._contents: list[Any] = []
        self._steps: dict[tuple[int, Hashable], tuple[int, tuple[Any, ...]]] = {}

    def number(self, part: Part) -> int:
        """Return the number of the part's content."""
        key = freeze(part)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._contents)
            self._contents.append(part)
        return number

    def content(self, number: int) -> Any:
        """Return the content, not to be changed."""
        return self._contents[number]

    def step(self, number: int, event: Hashable) -> tuple[int, tuple[Any, ...]]:
        """Return the number of the content after `event`, and what the event sends out."""
        key = (number, event)
        known = self._steps.get(key)
        if known is None:
            part = clone(self._contents[number])
            outputs = tuple(part.take(event))
            known = self._steps[key] = (self.number(part), outputs)
        return known

    def taken(self) -> Iterable[tuple[tuple[int, Hashable], tuple[int, tuple[Any, ...]]]]:
        """Return every step taken: (content, event), (content after it, what it sent out)."""
        return self._steps.items()

    @property
    def count(self) -> int:
        """How many contents there are."""
        return len(self._contents)


def clone(value: Any) -> Any:
    """Return a copy that shares only what never changes."""
    return _cloner(type(value))(value)  # type: ignore[arg-type]  # a class is hashable


@cache
def _cloner(kind: type[object]) -> Callable[[Any], Any]:
    """Return what clones values of one type: to ask for that of each costs more than to clone."""
    if issubclass(kind, (*_ATOMS, tuple, frozenset)) or _is_frozen(kind):
        return _itself
    if issubclass(kind, dict):
        return lambda value: {key: clone(each) for key, each in value.items()}
    if issubclass(kind, list | deque):
        return lambda value: kind(map(clone, value))
    if issubclass(kind, set):
        return set
    return _with_own_fields


def _itself(value: Any) -> Any:
    return value


def _with_own_fields(value: Any) -> Any:
    copied = copy.copy(value)
    for name in _names(value):
        setattr(copied, name, clone(getattr(value, name)))
    return copied


def freeze(value: Any) -> Hashable:
    """Return the content as a hashable value; errors count by their type alone.

    How often a transaction was tried does not count: without it a search would never end.
    """
    return _freezer(type(value))(value)  # type: ignore[arg-type]


@cache
def _freezer(
    kind: type[Any],
) -> Callable[[Any], Hashable]:
    """Return what freezes values of one type."""
    if issubclass(kind, BaseException | Attempts):
        return lambda _: kind.__name__
    if issubclass(kind, memoryview):
        return bytes
    if issubclass(kind, _ATOMS):
        return _itself
    if issubclass(kind, dict):
        return lambda value: frozenset((freeze(k), freeze(v)) for k, v in value.items())
    if issubclass(kind, list | tuple | deque):
        return lambda value: tuple(map(freeze, value))
    if issubclass(kind, set | frozenset):
        return lambda value: frozenset(map(freeze, value))
    if hasattr(kind, "typecode"):  # an array
        return tuple
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
        return lambda value: (kind, *(freeze(getattr(value, name)) for name in names))
    return lambda value: (kind, *((name, freeze(getattr(value, name))) for name in _names(value)))


def _is_frozen(kind: type[object]) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _names(value: Any) -> Sequence[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if hasattr(value, "__dict__"):
        return list(vars(value))
    return [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
