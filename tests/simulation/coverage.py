"""States and transitions of the product's machines that a search has visited.

The machines are watched from outside: for as long as `watching` is open, each call of an event's
method notes (state before, event, state after).  `transitions.txt` keeps what was ever seen; a
search says what of it it missed, and what it saw for the first time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from bookie.files.index import LedgerState
from bookie.storage.reads import Reads
from bookie.storage.status import StorageStatus
from bookie.storage.writes import Writes
from bookie.upkeep.rounds import Upkeep
from dlcore.base.errors import DLError
from dlcore.ledger.reading.range_read import ReadLane
from dlcore.ledger.recovering.recovery import LedgerRecovery, RecoveryState
from dlcore.ledger.writing.appender import LedgerAppender
from dlcore.log.writing.append import LogAppender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KNOWN_FILE = Path(__file__).with_name("transitions.txt")
_LISTED_MAX = 40


class Transition(NamedTuple):
    """One step of one machine."""

    machine: str
    before: str
    event: str
    after: str

    def __str__(self) -> str:
        return " | ".join(self)


class _Machine(NamedTuple):
    kind: type[Any]
    state_of: Callable[[Any], str]
    events: tuple[str, ...]


def _appender(machine: LedgerAppender) -> str:
    who = "recovery" if machine._is_recovery else "writer"
    return f"{who} {machine.state.name}{'' if machine.window.is_idle else ', pending'}"


def _recovery(machine: LedgerRecovery) -> str:
    state = machine.state.name.lower().replace("_", " ")
    if machine.state is RecoveryState.FENCING:
        return f"{state} with errors" if machine._fences.errors else state
    current = machine._reads.open.get(machine._next_entry)
    if machine.state is RecoveryState.READING and current is not None and current.unknown:
        return f"{state}, some unknown"
    return state


def _lane(machine: ReadLane) -> str:
    if machine.is_done:
        return "done"
    return f"streams {len(machine.streams)}, failed {len(machine._answers)}"


def _status(machine: StorageStatus) -> str:
    return f"{machine.state.value}, closing" if machine.is_closed else machine.state.value


def _storage(machine: Writes | Reads | Upkeep) -> str:
    return _status(machine._status)


def _ledger(machine: LedgerState) -> str:
    fence = "fenced" if machine.is_fence_durable else "fencing" if machine.fenced else "open"
    return f"{fence}, deleted" if machine.is_deleted else fence


def _log_appender(machine: LogAppender[Any]) -> str:
    parts = [
        word
        for word, holds in (
            ("closing", machine.log.closing is not None),
            ("overtaken", machine.log.must_recover),
            ("in flight", machine.transmitter.has_in_flight),
            ("ending", bool(machine._ends)),
        )
        if holds
    ]
    return " ".join([machine.state.name.lower(), *parts])


MACHINES = (
    _Machine(
        LedgerAppender,
        _appender,
        ("handle",),
    ),
    _Machine(
        LedgerRecovery,
        _recovery,
        ("handle",),
    ),
    _Machine(ReadLane, _lane, ("read_on", "received", "failed", "silent")),
    _Machine(Writes, _storage, ("add_entry", "write_lac", "fence", "repair_entry")),
    _Machine(
        Reads,
        _storage,
        ("read_lac", "read_entry", "read_chunk", "follow_chunk", "list_entries"),
    ),
    _Machine(Upkeep, _storage, ("collect_garbage", "compact", "scrub")),
    _Machine(StorageStatus, _status, ("note_failed", "_update_state")),
    _Machine(
        LogAppender,
        _log_appender,
        (
            "handle",
            "end_with",
        ),
    ),
    _Machine(LedgerState, _ledger, ("accepts", "note_entry", "note_lac", "note_sealed")),
)


@contextlib.contextmanager
def watching() -> Iterator[Counter[Transition]]:
    """Count transitions until closed."""
    seen: Counter[Transition] = Counter()
    with contextlib.ExitStack() as patches:
        for machine in MACHINES:
            for event in machine.events:
                patches.enter_context(
                    patch.object(machine.kind, event, _watched(machine, event, seen))
                )
        yield seen


def _watched(machine: _Machine, event: str, seen: Counter[Transition]) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(machine.kind, event)
    name, state_of = machine.kind.__name__, machine.state_of

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = state_of(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            happened = _event_name(event, args, kwargs)
            seen[Transition(name, before, happened, state_of(self))] += 1

    return watched


def _event_name(event: str, values: tuple[Any, ...], arguments: dict[str, Any]) -> str:
    if event == "handle":
        (value,) = values
        error = getattr(value, "error", None)
        name = value.name if isinstance(value, Enum) else type(value).__name__
        return name if error is None else f"{name}({type(error).__name__})"
    if isinstance(error := arguments.get("error"), DLError):
        return f"{event}({type(error).__name__})"
    flags = [flag for flag in ("fence", "is_recovery") if arguments.get(flag)]
    return f"{event}({flags[0]})" if flags else event


def read_known() -> set[Transition]:
    """Return every transition that was ever seen."""
    if not KNOWN_FILE.exists():
        return set()
    lines = KNOWN_FILE.read_text(encoding="utf-8").splitlines()
    return {Transition(*line.split(" | ")) for line in lines}


def write_known(transitions: Iterable[Transition]) -> None:
    """Keep what was seen."""
    text = "".join(f"{each}\n" for each in sorted(set(transitions)))
    KNOWN_FILE.write_text(text, encoding="utf-8")


def report(seen: Counter[Transition], known: set[Transition]) -> list[str]:
    """Return the coverage of each machine, and what of the known was not seen."""
    lines = ["coverage of machines (seen of known):"]
    for machine in MACHINES:
        name = machine.kind.__name__
        mine = {each for each in seen if each.machine == name}
        all_known = {each for each in known if each.machine == name} | mine
        states = [
            {each.before for each in some} | {each.after for each in some}
            for some in (mine, all_known)
        ]
        lines.append(
            f"  {name:<15} states {len(states[0]):>3} of {len(states[1]):>3}, "
            f"transitions {len(mine):>4} of {len(all_known):>4}"
        )
    missed = sorted(known - seen.keys())
    fresh = sorted(seen.keys() - known)
    for what, transitions in (
        ("never seen in this run", missed),
        ("seen for the first time", fresh),
    ):
        if transitions:
            lines.append(f"{len(transitions)} transitions {what}:")
            lines += [f"  {each}" for each in transitions[:_LISTED_MAX]]
            if len(transitions) > _LISTED_MAX:
                lines.append(f"  … and {len(transitions) - _LISTED_MAX} more")
    return lines
