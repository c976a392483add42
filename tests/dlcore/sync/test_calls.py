"""Every generated call reaches the async method of its name, with all that it was given."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.sync.log_calls import LogCalls
from dlcore.sync.namespace_calls import NamespaceCalls
from dlcore.sync.reader_calls import ReaderCalls
from dlcore.sync.staging_calls import StagedAppendCalls, StagingWriterCalls
from dlcore.sync.writer_calls import WriterCalls

if TYPE_CHECKING:
    from collections.abc import Coroutine

KINDS = (LogCalls, NamespaceCalls, StagedAppendCalls, StagingWriterCalls)
CALLS = [
    (kind, name)
    for kind in KINDS
    for name, value in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") and value.__module__.endswith("_calls")
]
"""Each generated method, inherited ones too."""


class Answer:
    """The result of an async method: a coroutine, an async iterator, or a value of the loop."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Answer:
        raise StopAsyncIteration

    def tell(self) -> int:
        """Be a reader of a stream."""
        return 0

    async def aclose(self) -> None:
        """Be an object that is closed."""


class Twin:
    """An async object whose methods note what they are given."""

    def __init__(self, name: str, parameters: inspect.Signature) -> None:
        self._name, self._parameters = name, parameters
        self.answer: Answer | None = None

    def __getattr__(self, name: str) -> Any:
        assert name == self._name

        def method(*arguments: Any, **named: Any) -> Any:
            bound = self._parameters.bind(None, *arguments, **named).arguments
            self.answer = Answer({key: value for key, value in bound.items() if key != "self"})
            return self.answer

        return method


class Calls:
    """The parts of `Blocking` that generated calls use, without a loop."""

    is_inherited = False

    def call(self, coroutine: Coroutine[Any, Any, Any] | Answer) -> Any:
        """Be a portal: an answer is its own result, and a coroutine is run to its end."""
        if isinstance(coroutine, Answer):
            return coroutine
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        return ended.value.value


@pytest.mark.parametrize(("kind", "name"), CALLS, ids=[f"{k.__name__}.{n}" for k, n in CALLS])
def test_a_call_passes_all_on(kind: type[Any], name: str) -> None:
    """By name and by place, as the async method takes it; a result with a twin is wrapped."""
    method = getattr(kind, name)
    signature = inspect.signature(method)
    twin = Twin(name, signature)
    calls = object.__new__(kind)
    calls._portal = Calls()
    for attribute in ("_manager", "_namespace", "_writer", "_append"):
        setattr(calls, attribute, twin)
    assert repr(calls) == repr(twin)
    given: dict[str, Any] = {}
    positional: list[Any] = []
    for each in list(signature.parameters.values())[1:]:
        if each.kind is each.VAR_KEYWORD:
            given[each.name] = {"changed": object()}
        elif each.kind is each.KEYWORD_ONLY:
            given[each.name] = object()
        else:
            positional.append(object())
    named = {key: value for key, value in given.items() if not isinstance(value, dict)}
    rest = next((value for value in given.values() if isinstance(value, dict)), {})
    found = getattr(calls, name)(*positional, **named, **rest)
    if inspect.isgenerator(found):
        assert list(found) == []
    assert twin.answer is not None
    wanted = signature.bind(None, *positional, **named, **rest).arguments
    assert twin.answer.arguments == {key: value for key, value in wanted.items() if key != "self"}


@pytest.mark.parametrize(
    ("kind", "attribute"), [(ReaderCalls, "_reader"), (WriterCalls, "_writer")]
)
def test_attributes_without_a_call_are_those_of_the_async_one(
    kind: type[Any], attribute: str
) -> None:
    """A reader's or writer's text and properties; nothing is asked of the loop's thread."""
    names = [name for name, value in vars(kind).items() if isinstance(value, property)]
    assert names
    twin = SimpleNamespace(**{name: object() for name in names})
    calls = object.__new__(kind)
    setattr(calls, attribute, twin)
    assert repr(calls) == repr(twin)
    assert {name: getattr(calls, name) for name in names} == vars(twin)
