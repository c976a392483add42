"""The entrances of a proxy: the methods of Flight, and the actions of DoAction.

A method is declared with its body, its answer and its errors, as an action is.
`tests.flight_document` makes the table of docs/proxy.md from `METHODS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base import errors
from dlcore.base.access.entrances import Entrance
from dlcore.base.access.rights import Right
from dlcore.flight.actions import ACTIONS
from dlcore.flight.put import Numbered, PutTarget, Staged, StagingTarget
from dlcore.flight.replies import LogInfo, PartInfo, PutReply, StagingReply
from dlcore.flight.sending import Passed
from dlcore.flight.tickets import Ticket

if TYPE_CHECKING:
    import msgspec

    from dlcore.flight.actions import Action

_CALLERS = "every caller that can connect: a user, a certificate, anonymous"
_COST = "one request of at most `message_bytes_max`, and one lookup of names by id"
_AUDITED = (Right.MANAGE.value, Right.TRUNCATE.value)


class Part(NamedTuple):
    """A part of a body or an answer; with `fields` it is, or has as metadata, an object in JSON."""

    text: str
    fields: type[msgspec.Struct] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Entrance):
    """One method of Flight."""

    body: tuple[Part, ...]
    """The messages of a client."""
    answer: tuple[Part, ...]
    """The messages of the proxy."""
    errors: tuple[type[errors.DLError], ...] = ()
    """The errors of its own; every method may also fail as `COMMON_ERRORS`."""


COMMON_ERRORS = (
    errors.ConfigurationError,
    errors.UnauthenticatedError,
    errors.AccessDeniedError,
    errors.LogNotReadyError,
    errors.MetadataConnectionError,
)
_PLANNING_ERRORS = (
    errors.InvalidLogNameError,
    errors.LogNotFoundError,
    errors.SchemaMismatchError,
    errors.AlreadyTruncatedError,
    errors.LedgerReadError,
)
_RANGE = (Part("the name of a log as a path, or a ticket as a command", Ticket),)


def _method(
    name: str,
    resource: str,
    right: str,
    body: tuple[Part, ...],
    answer: tuple[Part, ...],
    *kinds: type[errors.DLError],
    cost: str = _COST,
) -> Method:
    return Method(
        name=name,
        resource=resource,
        right=right,
        callers=_CALLERS,
        cost=cost,
        body=body,
        answer=answer,
        errors=kinds,
    )


METHODS = (
    _method(
        "Handshake",
        "the caller's token",
        "none",
        (Part("a token in the place of a password"),),
        (Part("the header `authorization` of further calls"),),
        cost="one message and one check of a signature",
    ),
    _method(
        "DoGet",
        "the log of the ticket",
        "read on the log",
        (Part("a ticket", Ticket),),
        (Part("the schema"), Part("batches of rows, each with", Passed)),
        *_PLANNING_ERRORS,
        errors.EncryptionKeyError,
        errors.ReaderStalledError,
    ),
    _method(
        "GetFlightInfo",
        "the log of the descriptor",
        "describe on the log",
        _RANGE,
        (
            Part("the schema, and facts about the range", LogInfo),
            Part("endpoints with tickets of its parts, each with", PartInfo),
        ),
        *_PLANNING_ERRORS,
    ),
    _method(
        "GetSchema",
        "the log of the descriptor",
        "describe on the log",
        _RANGE,
        (Part("the schema"),),
        *_PLANNING_ERRORS,
    ),
    _method(
        "ListFlights",
        "the namespace",
        "describe on each log; others are left out",
        (Part("the beginning of the wanted names"),),
        (Part("logs with their schemas"),),
    ),
    _method(
        "DoPut",
        "the log of the first message, or those of staged batches",
        "append on each log",
        (
            Part("with the schema: the name of a log as a path, or a command", PutTarget),
            Part("or the command that stages", StagingTarget),
            Part("batches of rows; those of a producer with", Numbered),
            Part("staged ones with", Staged),
        ),
        (Part("replies", PutReply), Part("to a stream that stages", StagingReply)),
        errors.InvalidLogNameError,
        errors.SchemaMismatchError,
        errors.LogRecordTooLongError,
        errors.LogNotFoundError,
        errors.LogRenamedError,
        errors.LogModeError,
        errors.EncryptionKeyError,
        errors.EndOfStreamError,
        errors.TransactionIdOutOfOrderError,
        errors.SequenceGapError,
        errors.ProducerFencedError,
        errors.ConditionFailedError,
        errors.OverCapacityError,
        errors.LogElsewhereError,
        errors.OwnershipAcquireFailedError,
        errors.WriteError,
        cost="one message of at most `message_bytes_max`",
    ),
    _method(
        "DoAction",
        "that of the action",
        "that of the action",
        (Part("the body of the [action](proxy-actions.md#actions)"),),
        (Part("its answer"),),
        errors.UnknownActionError,
    ),
    _method(
        "ListActions",
        "the table of actions",
        "none",
        (Part("nothing"),),
        (Part("the actions with their bodies"),),
    ),
)
"""The methods, in the order of the documentation."""


def _row(action: Action[Any, Any]) -> Entrance:
    needs = action.needs.text
    return Entrance(
        name=f"DoAction/{action.name}",
        resource="the logs of the request" if "log" in needs else "this proxy or the namespace",
        right=needs,
        callers=_CALLERS,
        cost=_COST,
        logged="calls and denials" if any(each in needs for each in _AUDITED) else "denials",
    )


ENTRANCES = (*METHODS, *map(_row, ACTIONS))
"""All entrances of a proxy, beside gRPC's health service, which every caller may ask."""
