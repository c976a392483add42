"""The registration of one bookie: which nodes it has, through lost sessions and changes.

Theory of operation.  The registration is an ephemeral node with the address, the rack and the
disk's space, below the writable or the read-only bookies.  It serves discovery only; safety never
depends on it.  Each look reads both nodes, and one transaction brings them into the wanted state.
Whatever may have changed them, or what is wanted, starts another look.

Invariants:

* A node is replaced only if it is of this incarnation, and in this session of this address.
* The node of an earlier session is made anew, because it would vanish with that session.
* A change of space overwrites the node, so that the bookie stays registered meanwhile.
* A bookie without a cookie is not registered: it was decommissioned.  A store without any cookie
  has lost its data, and is waited for.

Until the first registration a failure, or the node of another bookie, gets some time to pass; after
that a store that fails is asked again without end, and another bookie's node ends this one.  The
driver (`registration_driver.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, assert_never

from bookie.disks.port import DiskSpace
from dlcore.base.errors import ConfigurationError, DLError, MetadataError, NoNodeError
from dlcore.base.features import own_release
from dlcore.base.machines import Machine, State, Transitions
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.port import ANY_VERSION, Check, Create, Delete, Op, Put
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned

RETRY_S = 0.5


class RegistrationState(State):
    """The state of the machine; REFUSED and REMOVED are final."""

    ABSENT = "no registration was asked for, or it was given up"
    LOOKING = "the nodes are read"
    CHANGING = "the nodes are being brought into the wanted state"
    CHECKING = "whether the cluster has the bookie's cookie is looked up"
    KEPT = "the nodes are as wanted"
    RETRYING = "the last look or change failed; another one follows"
    REFUSED = "the name belongs to another bookie, or was decommissioned"
    REMOVING = "the nodes are being removed"
    REMOVED = "nothing is done any more"


_S = RegistrationState
_REMOVED = {_S.REMOVING: "close", _S.REMOVED: "close before it was registered"}
TRANSITIONS = Transitions(
    _S.ABSENT,
    {
        _S.ABSENT: {_S.LOOKING: "register", _S.REMOVED: "close"},
        _S.LOOKING: {
            _S.KEPT: "as wanted",
            _S.LOOKING: "as wanted, may differ again",
            _S.CHANGING: "not as wanted",
            _S.RETRYING: "no answer, or the node of another",
            _S.ABSENT: "patience is over",
            _S.REFUSED: "the node of another",
            **_REMOVED,
        },
        _S.CHANGING: {
            _S.KEPT: "changed",
            _S.LOOKING: "changed, may differ again",
            _S.CHECKING: "a node is missing",
            _S.RETRYING: "no answer",
            _S.ABSENT: "patience is over",
            **_REMOVED,
        },
        _S.CHECKING: {
            _S.RETRYING: "the cookie is there, or none is",
            _S.ABSENT: "patience is over",
            _S.REFUSED: "decommissioned",
            **_REMOVED,
        },
        _S.KEPT: {_S.LOOKING: "may differ", _S.REMOVING: "close"},
        _S.RETRYING: {_S.LOOKING: "later, or may differ", **_REMOVED},
        _S.REFUSED: {_S.REMOVING: "close"},
        _S.REMOVING: {_S.REMOVED: "removed, or left to the session"},
        _S.REMOVED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    MAY_DIFFER = "a node or the session may have changed"
    RETRY_DUE = "the pause of `RetryLater` is over"
    CLOSE = "no answer to an earlier effect comes; remove the registration"


@dataclass(frozen=True, slots=True)
class Register:
    """Event: register for the first time; failures may pass until this time."""

    is_read_only: bool
    until: float


@dataclass(frozen=True, slots=True)
class SetReadOnly:
    """Event: the bookie takes new ledgers, or takes none."""

    is_read_only: bool


@dataclass(frozen=True, slots=True)
class SetSpace:
    """Event: the space on the bookie's disk."""

    space: DiskSpace


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the nodes by path, as read in the session with this token."""

    session: str
    is_held: bool
    nodes: Mapping[str, Versioned]
    now: float


@dataclass(frozen=True, slots=True)
class Applied:
    """Event: the transaction was applied."""


@dataclass(frozen=True, slots=True)
class CookieLooked:
    """Event: whether the bookie's cookie is missing while other bookies have theirs."""

    is_decommissioned: bool
    now: float


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Event: an effect that asks the metadata store failed."""

    error: DLError
    now: float


Event: TypeAlias = (
    Signal | Register | SetReadOnly | SetSpace | Looked | Applied | CookieLooked | CallFailed
)


class Call(enum.Enum):
    """Effects that carry nothing; `CallFailed` may be the answer."""

    LOOK = "read the nodes; answer with `Looked`"
    LOOK_FOR_COOKIE = "answer with `CookieLooked`"


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: apply these in one transaction; answer with `Applied`, or with `CallFailed`."""

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Effect: say `RETRY_DUE` after so many seconds; `error` is the reason."""

    after_s: float
    error: DLError


@dataclass(frozen=True, slots=True)
class RegisterEnded:
    """Effect: answer the caller of `Register`; None for success."""

    error: DLError | None


@dataclass(frozen=True, slots=True)
class Conflict:
    """Effect: the bookie must stop, because of `error`."""

    error: DLError


@dataclass(frozen=True, slots=True)
class RemovalEnded:
    """Effect: answer the caller of `CLOSE`; with an error the nodes go with the session."""

    error: DLError | None


Effect: TypeAlias = Call | Apply | RetryLater | RegisterEnded | Conflict | RemovalEnded


class BookieNodes(NamedTuple):
    """The paths of a bookie's nodes."""

    available: str
    readonly: str
    cookie: str


class Announcement:
    """The value of a registered bookie's node: who it is, where it is, and its space."""

    def __init__(self, bookie: BookieId, *, address: str, control_address: str, rack: str) -> None:
        self.bookie = bookie
        self.address = address
        self.space = DiskSpace(free_bytes=0, total_bytes=0)
        self._control_address = control_address
        self._rack = rack

    def value(self, *, is_read_only: bool, session: str) -> bytes:
        """Return the value for a node that is written in this session."""
        return encode(
            BookieRegistration(
                name=self.bookie.name,
                incarnation=self.bookie.incarnation,
                address=self.address,
                read_only=is_read_only,
                rack=self._rack,
                free_bytes=self.space.free_bytes,
                total_bytes=self.space.total_bytes,
                session=session,
                control_address=self._control_address,
                release=own_release(),
            )
        )

    def require_own(self, other: BookieRegistration, *, is_own_session: bool) -> None:
        """Accept only nodes of this incarnation, and of its own session only its own.

        Raises:
            ConfigurationError: another process has registered the bookie.
        """
        bookie = self.bookie
        if other.incarnation != bookie.incarnation:
            raise ConfigurationError(
                f"bookie {bookie.name!r} is registered as incarnation {other.incarnation} at "
                f"{other.address}, this is {bookie.incarnation}: stop one of the two"
            )
        if is_own_session and other.address != self.address:
            raise ConfigurationError(
                f"bookie {bookie} at {self.address} was registered by another process at "
                f"{other.address}: it runs on a copy of this data folder; stop one of the two"
            )


class Registration(Machine[RegistrationState]):
    """The registration of one bookie.

    Args:
        paths: where the nodes are.
        bookie: its name and incarnation.
        address: where clients reach it.
        control_address: where operators reach it.
        rack: its failure domain.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        paths: NamespacePaths,
        *,
        bookie: BookieId,
        address: str,
        control_address: str,
        rack: str,
    ) -> None:
        self.nodes = BookieNodes(
            paths.bookie_available(bookie.name),
            paths.bookie_readonly(bookie.name),
            paths.cookie(bookie.name),
        )
        self.announced = Announcement(
            bookie, address=address, control_address=control_address, rack=rack
        )
        self.state = RegistrationState.ABSENT
        self._is_read_only = False
        self._until: float | None = None  # failures may pass, until the first registration
        self._may_differ = False  # since the last look began
        self._session = ""  # that of the last look
        self._own_session: str | None = None  # that in which the node was created
        self._missing: NoNodeError | None = None  # while the cookie is looked for

    @property
    def is_registered(self) -> bool:
        """Whether it was registered once, and a conflict would end the bookie."""
        return self._own_session is not None and self._until is None

    def handle(self, event: Event) -> list[Effect]:
        """Take one event."""
        match event:
            case Looked():
                return self._looked(event)
            case Applied():
                return self._applied()
            case CookieLooked():
                return self._cookie_looked(event)
            case CallFailed(error, now):
                return self._call_failed(error, now)
            case Register(is_read_only, until):
                self._is_read_only, self._until = is_read_only, until
                return self._look()
            case SetReadOnly(is_read_only):
                self._is_read_only = is_read_only
                return self._differ()
            case SetSpace(space):
                self.announced.space = space
                return self._differ()
            case Signal():
                return self._on_signal(event)
            case _:
                assert_never(event)

    def _on_signal(self, signal: Signal) -> list[Effect]:
        match signal:
            case Signal.MAY_DIFFER:
                return self._differ()
            case Signal.RETRY_DUE:
                return self._look() if self.state is RegistrationState.RETRYING else []
            case Signal.CLOSE:
                return self._close()
            case _:
                assert_never(signal)

    def _differ(self) -> list[Effect]:
        self._may_differ = True
        # Before the first registration each pause is kept, so that failures do not make a busy
        # loop.
        is_waiting = self.state is RegistrationState.RETRYING and self.is_registered
        return self._look() if is_waiting or self.state is RegistrationState.KEPT else []

    def _look(self) -> list[Effect]:
        self._become(RegistrationState.LOOKING)
        self._may_differ = False
        return [Call.LOOK]

    def _looked(self, seen: Looked) -> list[Effect]:
        """Compare the nodes with what is wanted."""
        self._session = seen.session
        try:
            for path, node in seen.nodes.items():
                other = self._registration(path, node)
                # A node of an earlier session may have another address: the bookie was started
                # elsewhere since.
                is_own_session = self._own_session == self._session
                self.announced.require_own(other, is_own_session=is_own_session)
        except ConfigurationError as error:
            return self._refused(error, seen.now)
        if self.state is RegistrationState.REMOVING:
            return self._remove(seen.nodes)
        # A bookie that an operator holds gets no new ledgers; its storage still accepts adds.
        is_read_only = self._is_read_only or seen.is_held
        wanted = self.nodes.readonly if is_read_only else self.nodes.available
        value = self.announced.value(is_read_only=is_read_only, session=seen.session)
        if seen.session == self._own_session and seen.nodes.keys() == {wanted}:
            node = seen.nodes[wanted]
            if node.value == value:
                return self._settled()
            if self._registration(wanted, node).session == seen.session:
                self._become(RegistrationState.CHANGING)
                return [Apply((Put(wanted, value, node.version),))]
        self._become(RegistrationState.CHANGING)
        deletions = (Delete(path, node.version) for path, node in seen.nodes.items())
        # In the transaction, so that a decommission at the same moment cannot be overlooked.
        check, create = Check(self.nodes.cookie, ANY_VERSION), Create(wanted, value, ephemeral=True)
        return [Apply((check, *deletions, create))]

    def _registration(self, path: str, node: Versioned) -> BookieRegistration:
        return decode(BookieRegistration, node.value, source=path)

    def _applied(self) -> list[Effect]:
        if self.state is RegistrationState.REMOVING:
            return self._removed(None)
        # That of the look: if it was lost since, the next look finds another and makes the node
        # anew.
        self._own_session = self._session
        return self._settled()

    def _settled(self) -> list[Effect]:
        """The nodes are as wanted, unless what is wanted or they themselves changed meanwhile."""
        is_first, self._until = self._until is not None, None
        effects: list[Effect] = [RegisterEnded(None)] if is_first else []
        if self._may_differ:
            return effects + self._look()
        self._become(RegistrationState.KEPT)
        return effects

    def _call_failed(self, error: DLError, now: float) -> list[Effect]:
        if self.state is RegistrationState.REMOVING:
            return self._removed(error)
        # Either the cookie is missing or a node to delete is gone; only a read shows which.
        if self.state is RegistrationState.CHANGING and isinstance(error, NoNodeError):
            self._missing = error
            self._become(RegistrationState.CHECKING)
            return [Call.LOOK_FOR_COOKIE]
        self._missing = None
        # A store that fails may answer later; a value that contradicts this bookie will not change.
        is_final = not isinstance(error, MetadataError)
        return self._refused(error, now) if is_final else self._retry(error, now)

    def _cookie_looked(self, looked: CookieLooked) -> list[Effect]:
        error, self._missing = self._missing, None
        assert error is not None
        if not looked.is_decommissioned:
            return self._retry(error, looked.now)
        # The next start would be refused, and entries added now would be lost.
        return self._refused(
            ConfigurationError(
                f"bookie {self.announced.bookie} has no cookie {self.nodes.cookie} in the cluster: "
                "it was decommissioned, or ZooKeeper lost its data; to start it as a new and empty "
                "bookie, move the content of its folder away"
            ),
            looked.now,
        )

    def _retry(self, error: DLError, now: float) -> list[Effect]:
        if self._until is not None and now >= self._until:
            self._until = None
            self._become(RegistrationState.ABSENT)
            return [RegisterEnded(error)]
        self._become(RegistrationState.RETRYING)
        return [RetryLater(RETRY_S, error)]

    def _refused(self, error: DLError, now: float) -> list[Effect]:
        if self.state is RegistrationState.REMOVING:
            return self._removed(error)
        if self._until is not None:
            return self._retry(error, now)
        self._become(RegistrationState.REFUSED)
        return [Conflict(error)]

    def _close(self) -> list[Effect]:
        if self.state in (RegistrationState.REMOVING, RegistrationState.REMOVED):
            return []
        self._missing = None
        # The node of an unfinished first attempt goes with the session.
        if not self.is_registered:
            return self._removed(None)
        self._become(RegistrationState.REMOVING)
        return [Call.LOOK]

    def _remove(self, nodes: Mapping[str, Versioned]) -> list[Effect]:
        if not nodes:
            return self._removed(None)
        return [Apply(tuple(Delete(path, node.version) for path, node in nodes.items()))]

    def _removed(self, error: DLError | None) -> list[Effect]:
        self._become(RegistrationState.REMOVED)
        return [RemovalEnded(error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state = self.state
        assert (self._missing is not None) == (state is RegistrationState.CHECKING)
        assert state is not RegistrationState.ABSENT or self._until is None
        if state in (RegistrationState.KEPT, RegistrationState.REFUSED):
            assert self._until is None
            assert self.is_registered
        assert state is not RegistrationState.KEPT or not self._may_differ


class SpaceReport:
    """Decides when the registered disk space is too old; pure.

    A report is due when the free space changed by `_MOVED_SHARE` of the disk, or by any amount
    after `_AGE_S_MAX`.  Therefore a busy bookie writes to the metadata store only a few times until
    its disk is full, and an idle one never.
    """

    # Clients weigh bookies by their free space, for which a rough figure is enough.
    _MOVED_SHARE = 0.02
    _AGE_S_MAX = 600.0

    def __init__(self) -> None:
        self._reported: tuple[int, int] | None = None
        self._reported_at = 0.0

    def is_due(self, *, free_bytes: int, total_bytes: int, now: float) -> bool:
        """Return whether this space is to be reported now; after True it counts as reported."""
        space = (free_bytes, total_bytes)
        if self._reported is not None:
            has_moved = abs(free_bytes - self._reported[0]) >= self._MOVED_SHARE * total_bytes
            is_old = now >= self._reported_at + self._AGE_S_MAX
            if space == self._reported or not (has_moved or is_old):
                return False
        self._reported = space
        self._reported_at = now
        return True
