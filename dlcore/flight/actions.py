"""The actions of DoAction: for each its name, its two messages, its errors, and what it does.

A client sends an action of this table, and a proxy has a handler for each: neither writes a name or
a message by itself.  `tests.flight_document` makes the table of docs/proxy-actions.md from it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from dlcore.base import errors
from dlcore.base.access.rights import Right
from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError
from dlcore.flight import answers, planning, requests
from dlcore.flight.needs import NOTHING, Need, Needs, on_log, on_logs, on_namespace
from dlcore.flight.requests import MALFORMED
from dlcore.log.metadata.commits import AppendRun, SharedStaging
from dlcore.log.metadata.segment import StagedExtent

if TYPE_CHECKING:
    from collections.abc import Sequence


_UNPACKED_MAX = 1000
"""Above this number extents are sent packed."""
UNPACKED_BYTES_MAX = 64 * MIB
"""Most bytes of unpacked extents: more than any transaction of the metadata store holds."""


class AppendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An append, with the arguments of `Namespace.begin_append`, and its staged extents."""

    identity: str
    version: int
    token: str
    extents: list[StagedExtent] = []
    packed: bytes = b""
    """Further extents, as a list in JSON compressed by zlib, if they exceed a message."""
    shared: SharedStaging | None = None
    run: AppendRun | None = None
    lock_timeout_s: float | None = None
    strict: bool = False
    after: int | None = None
    replaces: list[str] = []

    def with_extents(self, extents: Sequence[StagedExtent]) -> AppendRequest:
        """Return the request with these extents, of any number."""
        if len(extents) <= _UNPACKED_MAX:
            return msgspec.structs.replace(self, extents=list(extents))
        return msgspec.structs.replace(self, packed=zlib.compress(msgspec.json.encode(extents)))

    def all_extents(self) -> list[StagedExtent]:
        """Return all extents.  Raises: ConfigurationError: `packed` is invalid."""
        if not self.packed:
            return self.extents
        unpacking = zlib.decompressobj()
        try:
            # Bounded: some KiB of a client could otherwise unpack to all the memory of the proxy.
            text = unpacking.decompress(self.packed, UNPACKED_BYTES_MAX)
            if not unpacking.eof:
                raise ConfigurationError(
                    f"packed: expected complete zlib data of at most {UNPACKED_BYTES_MAX} bytes"
                )
            return self.extents + msgspec.json.decode(text, type=list[StagedExtent])
        except (zlib.error, *MALFORMED) as error:
            raise ConfigurationError(
                f"packed: expected a list of extents, as JSON by zlib in base64: {error}"
            ) from error


_Request = TypeVar("_Request", bound=msgspec.Struct)
_Answer = TypeVar("_Answer", bound=msgspec.Struct)

ANSWER_S = 30.0
"""A client gives up a call after this time, and asks another proxy."""
LONG_ANSWER_S = 120.0
"""The same for calls that may wait for a lock, for records being written, or for many logs."""
DRAIN_ANSWER_S = 600.0
"""The same for a drain, which waits for all logs of a proxy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action(Generic[_Request, _Answer]):
    """One action.

    Attributes:
        name: its type in Flight's messages.
        request: the body, as JSON.
        answer: the result, as JSON.
        needs: the rights that it needs.
        text: what it does; clients list the first sentence.
        details: further sentences, for the documentation.
        errors: the errors of its own; every action may also fail as `COMMON_ERRORS`.
        answer_s: after this long a client gives an attempt up, in seconds.
    """

    name: str
    request: type[_Request]
    answer: type[_Answer]
    needs: Needs
    text: str
    details: str = ""
    errors: tuple[type[errors.DLError], ...] = ()
    answer_s: float = ANSWER_S


COMMON_ERRORS = (
    errors.ConfigurationError,
    errors.UnknownActionError,
    errors.LogNotReadyError,
    errors.MetadataConnectionError,
)
_RELEASES = "The proxy releases the log first; UNAVAILABLE names another proxy that owns it."


def _of_append(request: AppendRequest) -> list[Need]:
    logs = {each.log: each.log_id for each in request.all_extents()}
    appended = [Need(Right.APPEND, log, log_id) for log, log_id in logs.items()]
    return appended + [Need(Right.TRUNCATE, log) for log in request.replaces]


def _of_rename(request: requests.RenameRequest) -> tuple[Need, ...]:
    return (
        Need(Right.MANAGE, request.log, request.log_id),
        Need(Right.MANAGE, request.new_name),
    )


def _of_fork(request: requests.ForkRequest) -> tuple[Need, ...]:
    return (Need(Right.READ, request.log), Need(Right.MANAGE, request.new_name))


def _of_settings(request: requests.SettingsRequest) -> tuple[Need]:
    right = Right.MANAGE if request.changes else Right.DESCRIBE
    return (Need(right, request.log, request.log_id),)


def _of_stream(request: requests.StreamRequest) -> tuple[Need]:
    right = Right.APPEND if request.flush else Right.DESCRIBE
    return (Need(right, request.log, request.log_id),)


def _of_places(request: planning.PlacesRequest) -> list[Need]:
    return [Need(Right.DESCRIBE, each.log, each.log_id) for each in request.searches]


_OF_APPEND = Needs("append on each log, truncate on replaced ones", _of_append)
_OF_RENAME = Needs("manage on the log and on its new name", _of_rename)
_OF_FORK = Needs("read on the log, manage on the fork's name", _of_fork)
_OF_SETTINGS = Needs("describe on the log, manage with `changes`", _of_settings)
_OF_STREAM = Needs("describe on the log, append with `flush`", _of_stream)
_OF_PLACES = Needs("describe on each log", _of_places)

CREATE = Action(
    name="create",
    request=requests.CreateRequest,
    answer=answers.NoAnswer,
    needs=on_log(Right.MANAGE),
    text="Create a log; with `schema`, an Arrow schema message in base64, a typed one.",
    details="`log_id` is a unique id; repeated with the same id the action succeeds.",
    errors=(errors.LogExistsError, errors.InvalidLogNameError),
)
MERGE_SCHEMA = Action(
    name="merge_schema",
    request=requests.SchemaRequest,
    answer=answers.NoAnswer,
    needs=on_log(Right.MANAGE),
    text="Add columns to a typed log, or widen their types.",
    errors=(errors.LogNotFoundError, errors.SchemaMismatchError),
)
COMMIT_APPEND = Action(
    name="commit_append",
    request=AppendRequest,
    answer=answers.CommittedAppend,
    needs=_OF_APPEND,
    text="Append staged records to their logs, all or nothing, once.",
    details="See [atomic appends](proxy-producers.md#atomic-appends).",
    errors=(
        errors.AppendAbortedError,
        errors.AppendMismatchError,
        errors.AppendSupersededError,
        errors.DuplicateAppendError,
        errors.EndOfStreamError,
        errors.LogNotFoundError,
        errors.OwnershipAcquireFailedError,
        errors.TransactionIdOutOfOrderError,
        errors.TransactionTooLargeError,
    ),
    answer_s=LONG_ANSWER_S,
)
ABORT_APPEND = Action(
    name="abort_append",
    request=AppendRequest,
    answer=answers.NoAnswer,
    needs=_OF_APPEND,
    text="Drop staged records, unless they were committed.",
    answer_s=LONG_ANSWER_S,
)
DELETE = Action(
    name="delete",
    request=requests.ChangeRequest,
    answer=answers.NoAnswer,
    needs=on_log(Right.MANAGE),
    text="Delete a log and its data.",
    details=_RELEASES,
    errors=(
        errors.LogNotFoundError,
        errors.LogRenamedError,
        errors.LogElsewhereError,
        errors.OwnershipAcquireFailedError,
    ),
    answer_s=LONG_ANSWER_S,
)
RENAME = Action(
    name="rename",
    request=requests.RenameRequest,
    answer=answers.NoAnswer,
    needs=_OF_RENAME,
    text="Give a log another name.",
    details=_RELEASES,
    errors=(*DELETE.errors, errors.LogExistsError, errors.InvalidLogNameError),
    answer_s=LONG_ANSWER_S,
)
FORK = Action(
    name="fork",
    request=requests.ForkRequest,
    answer=answers.ForkedLog,
    needs=_OF_FORK,
    text="Make a log that begins with the records that another one has in objects.",
    details="`new_log_id` is a unique id; repeated with the same id the action succeeds.",
    errors=(errors.LogNotFoundError, errors.LogExistsError, errors.InvalidLogNameError),
    answer_s=LONG_ANSWER_S,
)
SEAL = Action(
    name="seal",
    request=requests.ChangeRequest,
    answer=answers.NoAnswer,
    needs=on_log(Right.MANAGE),
    text="Seal a log: no record can follow.",
    details=_RELEASES,
    errors=(*DELETE.errors, errors.EndOfStreamError),
    answer_s=LONG_ANSWER_S,
)
SETTINGS = Action(
    name="settings",
    request=requests.SettingsRequest,
    answer=answers.SettingsOfLog,
    needs=_OF_SETTINGS,
    text="Return the settings of a log, after changing those in `changes`; null unsets one.",
    errors=(errors.LogNotFoundError,),
)
TRUNCATE = Action(
    name="truncate",
    request=requests.TruncateRequest,
    answer=answers.TruncatedLog,
    needs=on_log(Right.TRUNCATE),
    text="Drop the records of a log below a position, a transaction id or a time.",
    errors=(errors.LogNotFoundError, errors.LedgerReadError),
    answer_s=LONG_ANSWER_S,
)
STREAM_END = Action(
    name="stream_end",
    request=requests.StreamRequest,
    answer=answers.StreamEnd,
    needs=_OF_STREAM,
    text="Return where the bytes of a stream end.",
    details="With `flush` the owner first makes all accepted records durable.",
    errors=(errors.LogNotFoundError, errors.LogElsewhereError, errors.LogModeError),
    answer_s=LONG_ANSWER_S,
)
OWNER = Action(
    name="owner",
    request=requests.LogRequest,
    answer=answers.LogOwner,
    needs=on_log(Right.DESCRIBE),
    text="Return which proxy owns a log, or should own it, and the log's id.",
    details="`log_id` is null if there is no such log.",
    errors=(errors.InvalidLogNameError,),
)
LOGS = Action(
    name="logs",
    request=requests.NoRequest,
    answer=answers.OwnedLogs,
    needs=on_namespace(Right.DESCRIBE),
    text="List the logs that this proxy owns.",
)
RELEASE = Action(
    name="release",
    request=requests.LogRequest,
    answer=answers.ReleasedLog,
    needs=on_log(Right.MANAGE),
    text="Release a log.",
    details="A direct writer can acquire it then.",
    errors=(errors.InvalidLogNameError,),
    answer_s=LONG_ANSWER_S,
)
DRAIN = Action(
    name="drain",
    request=requests.NoRequest,
    answer=answers.NoAnswer,
    needs=on_namespace(Right.MANAGE),
    text="Release all logs, and acquire none until `undrain`.",
    details="The answer comes once this proxy owns no log.",
    answer_s=DRAIN_ANSWER_S,
)
UNDRAIN = Action(
    name="undrain",
    request=requests.NoRequest,
    answer=answers.NoAnswer,
    needs=on_namespace(Right.MANAGE),
    text="Acquire logs again after a drain.",
    details="A proxy that was not drained stays as it is.",
)
PRODUCER_INIT = Action(
    name="producer_init",
    request=requests.ProducerRequest,
    answer=answers.BegunProducer,
    needs=on_log(Right.APPEND),
    text="Begin an incarnation of a producer, which fences earlier ones.",
    details="The answer has the fields of `ready` for a new incarnation.",
    errors=(
        errors.LogNotFoundError,
        errors.LogElsewhereError,
        errors.LogModeError,
        errors.EndOfStreamError,
        errors.WriteError,
    ),
)
POSITIONS = Action(
    name="positions",
    request=planning.PositionsRequest,
    answer=answers.LogPositions,
    needs=on_log(Right.DESCRIBE),
    text="Return where a log begins and ends, and where some of its records are.",
    details=(
        "`at` has up to 1,000 positions, in the form of tickets. A record that is yet to come has "
        "the place of the end."
    ),
    errors=(errors.LogNotFoundError, errors.InvalidLogNameError, errors.LedgerReadError),
)
SUBSCRIPTIONS = Action(
    name="subscriptions",
    request=requests.SubscriptionsRequest,
    answer=answers.Subscriptions,
    needs=on_log(Right.DESCRIBE),
    text="Return the positions that a log stores for subscribers, or for one.",
    errors=(errors.LogNotFoundError,),
)
MOVE_SUBSCRIPTION = Action(
    name="move_subscription",
    request=requests.MoveRequest,
    answer=answers.MovedSubscription,
    needs=on_log(Right.READ),
    text="Store a subscriber's position, if its state is still the one of `mark`.",
    details=(
        "`mark` comes from an earlier answer, null for a new subscriber; `token` is the client's "
        "own name for this reader. Repeated, the action has the same answer. With `waits` it waits "
        "for a reader that holds the subscriber's lock."
    ),
    errors=(
        errors.LogNotFoundError,
        errors.SubscriptionMovedError,
        errors.OwnershipAcquireFailedError,
        errors.OverCapacityError,
    ),
    answer_s=LONG_ANSWER_S,
)
DELETE_SUBSCRIPTION = Action(
    name="delete_subscription",
    request=requests.ForgetRequest,
    answer=answers.NoAnswer,
    needs=on_log(Right.READ),
    text="Delete a subscriber's position, if its state is still the one of `mark`.",
    details="A subscriber without a position is no error.",
    errors=(
        errors.LogNotFoundError,
        errors.SubscriptionMovedError,
        errors.OwnershipAcquireFailedError,
    ),
)
ACCESS_RULES = Action(
    name="access_rules",
    request=requests.RulesRequest,
    answer=answers.AccessRules,
    needs=on_namespace(Right.MANAGE),
    text="Return the rules of access, after removing those in `remove` and adding those in `add`.",
    details="A rule to remove that is not there is no error: the action may be repeated.",
)
HEALTH = Action(
    name="health",
    request=requests.NoRequest,
    answer=answers.ProxyHealth,
    needs=NOTHING,
    text="Return whether this proxy acquires logs, how many it owns, and its state of balance.",
    details=(
        "`degraded` is there only while the proxy has no connection to the metadata store, and "
        "says for how long. `expires_at_ms` is there with TLS: when the first certificate of its "
        "port expires. `clock_ms` is its clock. Both are in epoch milliseconds."
    ),
)
PROXIES = Action(
    name="proxies",
    request=requests.NoRequest,
    answer=answers.LivingProxies,
    needs=NOTHING,
    text="List the locations of the live proxies.",
)
SNAPSHOTS = Action(
    name="snapshots",
    request=planning.SnapshotsRequest,
    answer=answers.LogSnapshots,
    needs=on_logs(Right.DESCRIBE),
    text="Return what logs hold, for planners of reads of this release.",
    errors=(errors.InvalidLogNameError, errors.LedgerReadError),
    answer_s=LONG_ANSWER_S,
)
SCHEMAS = Action(
    name="schemas",
    request=planning.SchemasRequest,
    answer=answers.LogSchemas,
    needs=on_logs(Right.DESCRIBE),
    text=(
        "Return the columns of logs, for planners of this release; with `for_write` also which are "
        "sealed."
    ),
    errors=(errors.InvalidLogNameError,),
    answer_s=LONG_ANSWER_S,
)
PLACES = Action(
    name="places",
    request=planning.PlacesRequest,
    answer=answers.FoundPlaces,
    needs=_OF_PLACES,
    text="Find records of logs, for planners of reads of this release.",
    errors=(errors.LogNotFoundError,),
    answer_s=LONG_ANSWER_S,
)

ACTIONS: tuple[Action[Any, Any], ...] = (
    CREATE, MERGE_SCHEMA, DELETE, RENAME, FORK, SEAL, SETTINGS, TRUNCATE, STREAM_END,
    OWNER, LOGS, RELEASE, DRAIN, UNDRAIN, HEALTH, PROXIES, ACCESS_RULES,
    PRODUCER_INIT, COMMIT_APPEND, ABORT_APPEND,
    POSITIONS, SUBSCRIPTIONS, MOVE_SUBSCRIPTION, DELETE_SUBSCRIPTION,
    SNAPSHOTS, SCHEMAS, PLACES,
)  # fmt: skip
"""All actions, in the order of the documentation."""


def described(action: Action[Any, Any]) -> str:
    """Return what an action does, and the fields of its body; those with defaults in brackets."""
    body = msgspec.structs.fields(action.request)
    names = (each.name if each.required else f"[{each.name}]" for each in body)
    return f"{action.text} Body: {{{', '.join(names)}}}."
