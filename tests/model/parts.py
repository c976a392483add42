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
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_ATOMS = (int, str, bytes, float, type(None), Enum, BaseException, memoryview, random.Random)


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
    if isinstance(value, _ATOMS) or _is_frozen(value):
        return value
    if isinstance(value, dict):
        return {key: clone(each) for key, each in value.items()}
    if isinstance(value, list | deque):
        return type(value)(map(clone, value))
    if isinstance(value, tuple | frozenset):
        return value
    if isinstance(value, set):
        return set(value)
    copied = copy.copy(value)
    for name in _names(value):
        setattr(copied, name, clone(getattr(value, name)))
    return copied


def freeze(value: Any) -> Hashable:
    """Return the content as a hashable value; errors count by their type alone."""
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, dict):
        return tuple(sorted(((freeze(k), freeze(v)) for k, v in value.items()), key=repr))
    if isinstance(value, list | tuple | deque):
        return tuple(map(freeze, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(freeze, value))
    if hasattr(value, "typecode"):  # an array
        return tuple(value)
    if is_dataclass(value):
        return (type(value), *(freeze(getattr(value, each.name)) for each in fields(value)))
    return (type(value), *((name, freeze(getattr(value, name))) for name in _names(value)))


def _is_frozen(value: Any) -> bool:
    if isinstance(value, msgspec.Struct):
        return value.__struct_config__.frozen
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _names(value: Any) -> Sequence[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if hasattr(value, "__dict__"):
        return list(vars(value))
    return [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
