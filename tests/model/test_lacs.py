"""Goal: followers see no entry too early, and each entry at last.

Method: visit every interleaving of small scopes; and put bugs back, each of which must be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from dlcore.ledger.reading.follow import LedgerFollow, Pushed, Signal, Tick
from dlcore.ledger.writing.appender import (
    AddWindow,
    LacAccepted,
    LacFailed,
    LacPublication,
    LedgerAppender,
    SendLac,
)
from tests.model.bookie import Bookie
from tests.model.exploring import STATES_MAX, prove, scopes, search
from tests.model.lacs import LARGE, SMALL, Model, Scope
from tests.simulation.mutants_writing import followers_pass_over_gaps

if TYPE_CHECKING:
    from collections.abc import Callable

ONE, LOSSY, CRASH, FOLLOWED = SMALL.values()
TWO = LARGE["two entries"]


@pytest.mark.parametrize("scope", scopes(SMALL, LARGE))
def test_no_interleaving_breaks_a_promise(scope: Scope) -> None:
    """Every state of the scope is visited."""
    prove(Model(scope))


_publish = LacPublication.publish
_note_accepted = LacPublication.note_accepted
_note_failed = LacPublication.note_failed
_spread = LacPublication.spread
_append = LedgerAppender.handle
_window_confirm = AddWindow.confirm


def _the_pushed_entry_is_published(self: LacPublication, lac: int, *about: Any) -> Any:
    return _publish(self, lac + 1, *about)


def _one_copy_confirms(self: AddWindow) -> Any:
    with patch.object(self, "_ack_quorum_size", 1):
        return _window_confirm(self)


def _messages_do_not_wait(self: LacPublication, lac: int, members: Any, bookies: Any) -> Any:
    sent_to = tuple(bookies)
    _publish(self, lac, members, sent_to)
    return [SendLac(each, lac) for each in sent_to if self.accepted.get(each, -1) < lac]


def _nothing_newer_follows(self: LacPublication, bookie: Any, lac: int) -> Any:
    _note_accepted(self, bookie, lac)
    return []


def _failures_end_it(self: LacPublication, bookie: Any) -> Any:
    _note_failed(self, bookie)
    return []


def _nothing_is_spread(self: LacPublication, *about: Any) -> Any:
    _spread(self, *about)
    return []


def _one_bookie_is_enough(self: LacPublication, lac: int, members: Any) -> Any:
    knows = any(self.accepted.get(each, -1) >= lac for each in members)
    return set() if knows else set(range(len(members)))


def _a_failure_is_an_acceptance(self: LedgerAppender, event: Any) -> Any:
    if isinstance(event, LacFailed):
        event = LacAccepted(event.bookie, self.window.last_add_confirmed)
    return _append(self, event)


def _answers_are_early(self: Bookie, request: Any, **_: Any) -> Any:
    if self.state.note_lac(request.data):
        self.records.append(request.data)
    return [request._replace(kind="lac accepted")]


_handle = LedgerFollow.handle


def _one_more_is_confirmed(self: LedgerFollow, event: Any) -> Any:
    if isinstance(event, Pushed):
        event = event._replace(last_add_confirmed=event.last_add_confirmed + 1)
    return _handle(self, event)


def _no_failure_is_noticed(self: LedgerFollow, event: Any) -> Any:
    # A silence alone would do: all members are asked then.
    is_ignored = event is Signal.STREAM_ENDED or isinstance(event, Tick)
    return [] if is_ignored else _handle(self, event)


def _of_publication(name: str, mutant: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: patch.object(LacPublication, name, mutant)


MUTANTS: dict[str, tuple[Callable[[], Any], Scope, str]] = {
    "a LAC is beyond the confirmed entries": (
        _of_publication("publish", _the_pushed_entry_is_published),
        ONE,
        "NoDirtyLac",
    ),
    "one copy confirms an entry": (
        lambda: patch.object(AddWindow, "confirm", _one_copy_confirms),
        ONE,
        "NoDirtyLac",
    ),
    "messages do not wait for each other": (
        _of_publication("publish", _messages_do_not_wait),
        ONE,
        "OneMessageAtATime",
    ),
    "a newer LAC does not follow": (
        _of_publication("note_accepted", _nothing_newer_follows),
        TWO,
        "EveryMemberLearnsTheLac",
    ),
    "a failed message is not repeated": (
        _of_publication("note_failed", _failures_end_it),
        LOSSY,
        "EveryMemberLearnsTheLac",
    ),
    "no LAC is spread": (
        _of_publication("spread", _nothing_is_spread),
        ONE,
        "EveryMemberLearnsTheLac",
    ),
    "one bookie is enough": (
        _of_publication("unaware", _one_bookie_is_enough),
        ONE,
        "PublishedIsSeen",
    ),
    "a failure is taken for an acceptance": (
        lambda: patch.object(LedgerAppender, "handle", _a_failure_is_an_acceptance),
        LOSSY,
        "PublishedIsSeen",
    ),
    "a bookie accepts a LAC before it is durable": (
        lambda: patch.object(Bookie, "_lac", _answers_are_early),
        CRASH,
        "PublishedIsSeen",
    ),
    "a follower passes over gaps": (followers_pass_over_gaps, FOLLOWED, "the machine says"),
    "a follower takes one more entry for confirmed": (
        lambda: patch.object(LedgerFollow, "handle", _one_more_is_confirmed),
        FOLLOWED,
        "EntriesStay",
    ),
    "a follower notices no failure": (
        lambda: patch.object(LedgerFollow, "handle", _no_failure_is_noticed),
        LARGE["one entry, a follower whose stream ends"],
        "FollowersGetAll",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bugs_are_found(name: str) -> None:
    """By the promise that each of them breaks."""
    put_back, scope, promise = MUTANTS[name]
    with put_back():
        result = search(Model(scope), states_max=STATES_MAX)
    assert result.violation.startswith(promise), str(result)
