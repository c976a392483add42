"""The error tree: what programs rely on when they catch, compare codes and retry."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from dlcore.base import errors
from dlcore.base.errors import DLError, OwnershipAcquireFailedError

CLASSES: list[type[DLError]] = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, DLError)
]
ABSTRACT_CODES = {"DLError", "LogError"}


def drawn_tree() -> dict[str, str]:
    """Return parent by child as the module's docstring draws them."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^( {4}[│├└─ ]*)(\w+Error)\b", line)
        if match is None:
            continue
        depth = (len(match[1]) - 4) // 4
        path[depth:] = [match[2]]
        if depth:
            parents[match[2]] = path[depth - 1]
    return parents


def test_the_tree_is_as_drawn() -> None:
    """The docstring is the documentation: it shows every class, and no other."""
    assert drawn_tree() == {
        cls.__name__: cls.__mro__[1].__name__ for cls in CLASSES if cls is not DLError
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_named_explained_and_travels(cls: type[DLError]) -> None:
    """Errors cross process borders in Spark, so they survive pickling."""
    assert issubclass(cls, DLError)
    assert cls.__name__.endswith("Error")
    assert cls.__doc__
    assert cls.code >= 300
    error = cls("what was wrong")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what was wrong"


def test_codes_are_distinct() -> None:
    """A program that compares codes can tell errors apart."""
    codes = [cls.code for cls in CLASSES if cls.__name__ not in ABSTRACT_CODES]
    assert len(codes) == len(set(codes))


def test_only_errors_that_may_pass_by_themselves_are_retriable() -> None:
    """The author of a new error must decide about it here."""
    assert {cls.__name__ for cls in CLASSES if cls.retriable} == {
        "BookieOverloadedError",
        "BookieUnavailableError",
        "LedgerReadError",
        "LedgerRecoveryError",
        "LogElsewhereError",
        "LogNotReadyError",
        "MetadataConnectionError",
        "MetadataSessionExpiredError",
        "NotEnoughBookiesError",
        "ObjectStoreError",
        "OverCapacityError",
        "ProxyUnavailableError",
        "ReaderIdleError",
        "ReaderStalledError",
    }


def test_a_refused_owner_learns_who_owns() -> None:
    """The owner's name is also there for programs."""
    assert OwnershipAcquireFailedError("taken", owner="host:1").owner == "host:1"
