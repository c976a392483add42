"""The clients of the model: the real append and recovery machines, and how drivers connect them.

Sending, time-outs, the metadata store's answers and the list of bookies are model steps, because
they are waiting and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
    LedgerClosedError,
    LedgerFencedError,
    MetadataConnectionError,
    MetadataVersionError,
)
from dlcore.base.ids import BookieId
from dlcore.base.machines import CallFailed as RecoveryCallFailed
from dlcore.ledger.placing.placement import Topology
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    EndRecovery,
    FenceBookie,
    Fenced,
    Found,
    LedgerRecovery,
    LengthRead,
    Missing,
    ReadEntry,
    ReadLength,
    ReadMetadata,
    Signal as RecoverySignal,
    StartWriteBack,
    Unknown,
    WriteBack,
    WrittenBack,
)
from dlcore.ledger.writing.appender import (
    AddFailed,
    AddSucceeded,
    After,
    Append,
    AppenderState,
    AppendRecovered,
    BookiesListed,
    Call,
    CallFailed,
    CloseEnded,
    CompleteAdds,
    Event,
    FailAdds,
    LedgerAppender,
    MetadataRead,
    MetadataStored,
    SendAdd,
    Signal,
    StoreMetadata,
)
from dlcore.wire.frames import decode_frame
from tests.fixtures.append_bench import GivenChoice, appender_of
from tests.model.bookie import LEDGER_ID, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ledger.recovering.recovery import Effect as RecoveryEffect, Event as RecoveryEvent

BOOKIES = tuple(BookieId(f"bookie-{number}", f"{number:032x}") for number in range(5))
_ANSWERED_ERRORS = {"lost": MetadataConnectionError, "refused": MetadataVersionError}
_NUMBERS = {bookie: number for number, bookie in enumerate(BOOKIES)}


class Do(NamedTuple):
    """Event: the client does what it may do at any time; see `offers`."""

    what: str
    entry_id: int = -1
    position: int = -1
    bookie: int = -1


class Listed(NamedTuple):
    """Event: the registered bookies that may replace others are listed."""

    bookies: tuple[int, ...]


class Answer(NamedTuple):
    """Event: the metadata store's answer; `error` is lost, refused or none."""

    version: int
    metadata: Frozen | None = None
    error: str = ""


class Frozen:
    """Metadata that can be part of a key."""

    __slots__ = ("_key", "value")

    def __init__(self, value: LedgerMetadata) -> None:
        self.value = value
        self._key = (value.state, value.ensembles, value.last_entry_id, value.length_bytes)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._key == other._key


class Ask(NamedTuple):
    """The request of a client to the metadata store: a read, or a write of `metadata`."""

    metadata: Frozen | None = None
    version: int = -1


class _Client:
    """The common part of writers and recoverers: an appender, and one call at a time."""

    is_recovery = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.appender: LedgerAppender | None = None
        self.asks: Ask | None = None
        self.reported_end: tuple[int, int] | None = None
        """The end of the ledger that its caller learned."""
        self.is_over = False
        self.is_closing = False
        self._writes: StoreMetadata | None = None  # the question to the store, if it is a write

    def offers(self) -> list[Do]:
        """Return what it may do now by itself."""
        if (
            self.is_over
            or self.is_closing
            or self.appender is None
            or self.appender.error is not None
        ):
            return []
        return [
            Do("time out", add.entry_id, position, _NUMBERS[bookie])
            for add in self.appender.window.adds.values()
            for position, bookie in (
                *sorted(add.waiting.items()),
                *sorted(add.owed.items()),
            )
        ]

    @property
    def looks(self) -> bool:
        """Whether it waits for the list of bookies."""
        appender = self.appender
        if appender is None or appender.error is not None or self.is_closing:
            return False
        return appender.state is AppenderState.LOOKING

    def take(self, event: Message | Do | Listed | Answer) -> Sequence[Message]:
        """Return the requests that this sends."""
        if isinstance(event, Message):
            return self._on_message(event)
        if isinstance(event, Answer):
            return self._on_answer(event)
        assert self.appender is not None
        if isinstance(event, Listed):
            candidates = [BOOKIES[number] for number in event.bookies]
            return self._feed(BookiesListed(candidates, Topology(), 0.0))
        if event.what == "time out":
            return self._on_failure(event, BookieUnavailableError("no answer"))
        return self._do(event.what)

    def _feed(self, event: Event) -> Sequence[Message]:
        assert self.appender is not None
        effects = self.appender.handle(event)
        self.appender.validate()
        return self._perform(effects)

    def _on_failure(self, add: Message | Do, error: DLError) -> Sequence[Message]:
        return self._feed(
            AddFailed(add.entry_id, add.position, BOOKIES[add.bookie], error, now=0.0)
        )

    def _on_message(self, message: Message) -> Sequence[Message]:
        if self.appender is None or self.is_over:
            return ()
        if message.kind == "refused":
            return self._on_failure(message, LedgerFencedError("fenced"))
        assert message.kind == "added", message
        return self._feed(AddSucceeded(message.entry_id, message.position, BOOKIES[message.bookie]))

    def _perform(self, effects: Sequence[Any]) -> list[Message]:
        sent: list[Message] = []
        for effect in effects:
            match effect:
                case SendAdd():
                    kind = "recovery add" if self.is_recovery else "add"
                    sent += (
                        Message(
                            kind,
                            self.number,
                            position,
                            _NUMBERS[bookie],
                            effect.entry_id,
                            bytes(effect.frame),
                        )
                        for position, bookie in effect.targets
                    )
                case CompleteAdds():
                    sent += self._on_confirmed(effect.last_entry_id)
                case StoreMetadata(metadata, version):
                    self._writes = effect
                    self.asks = Ask(Frozen(metadata), version)
                case Call.READ_METADATA | After(_, Signal.READ_DUE):
                    self._writes = None
                    self.asks = Ask()
                case FailAdds():
                    self._on_failed(effect.error)
                case _:
                    sent += self._perform_own(effect)
        return sent

    def _on_confirmed(self, last_entry_id: int) -> Sequence[Message]:
        assert last_entry_id >= 0
        return ()

    def _on_failed(self, error: DLError) -> None:
        raise NotImplementedError

    def _perform_own(self, effect: object) -> Sequence[Message]:
        return ()

    def _do(self, what: str) -> Sequence[Message]:
        raise NotImplementedError

    def _on_answer(self, answer: Answer) -> Sequence[Message]:
        """Tell the appender what became of its write, or of its read."""
        self.asks = None
        write = self._writes
        if write is None:
            assert answer.metadata is not None
            return self._feed(MetadataRead(answer.metadata.value, answer.version))
        if answer.error:
            error = _ANSWERED_ERRORS[answer.error](answer.error)
            return self._feed(CallFailed(write, error, now=0.0))
        return self._feed(MetadataStored(write.metadata, answer.version))


class Writer(_Client):
    """The ledger's writer: appends `entry_count` entries when it likes, and may close it."""

    def __init__(self, metadata: LedgerMetadata, *, entry_count: int, closes: bool) -> None:
        super().__init__(0)
        self.appender = appender_of(metadata, GivenChoice())
        self.entry_count = entry_count
        self.closes = closes

    def offers(self) -> list[Do]:
        """Return what it may do now by itself."""
        assert self.appender is not None
        offers = super().offers()
        error = self.appender.error
        has_more = self.appender.window.last_add_pushed + 1 < self.entry_count
        if error is None and not self.is_closing and has_more:
            offers.append(Do("append"))
        # A ledger that did not end well it leaves to a recovery.
        may_close = error is None and self.appender.window.is_idle
        if (
            self.closes
            and may_close
            and not (self.is_closing or self.appender.state is AppenderState.CHANGING)
        ):
            offers.append(Do("close"))
        return offers

    def _do(self, what: str) -> Sequence[Message]:
        assert self.appender is not None
        if what == "append":
            return self._feed(Append([b"."]))
        assert what == "close"
        self.is_closing = True
        return self._feed(Signal.CLOSE)

    def _on_failed(self, error: DLError) -> None:
        if isinstance(error, LedgerFencedError | LedgerClosedError):
            self.is_over = True

    def _perform_own(self, effect: object) -> Sequence[Message]:
        if isinstance(effect, CloseEnded):
            self.is_over = True
            if effect.error is None:
                assert self.appender is not None
                end = self.appender.metadata
                self.reported_end = (end.last_entry_id, end.length_bytes)
        return ()


class Recoverer(_Client):
    """One recovery from its first read of the metadata to its end; it starts when it likes."""

    is_recovery = True
    read_ahead_max = 1

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.machine = LedgerRecovery(LEDGER_ID, read_ahead_max=self.read_ahead_max)
        self.start = -1
        self._call: ReadMetadata | StoreMetadata | None = None  # the question of the recovery
        self._fences: set[int] = set()
        self._reads: set[tuple[int, int]] = set()
        self._hear(RecoverySignal.BEGIN)

    def offers(self) -> list[Do]:
        """Return what it may do now by itself."""
        offers = super().offers()
        if not self.is_over:
            offers += (Do("give up read", entry, place) for entry, place in sorted(self._reads))
        return offers

    def take(self, event: Message | Do | Listed | Answer) -> Sequence[Message]:
        """Return the requests that this sends."""
        if isinstance(event, Do) and event.what == "give up read":
            self._reads.discard((event.entry_id, event.position))
            return self._hear(
                Unknown(event.entry_id, event.position, BookieUnavailableError("no answer"))
            )
        return super().take(event)

    def _on_message(self, message: Message) -> Sequence[Message]:
        if self.is_over or self.is_closing:
            return ()
        position = message.position
        if message.kind == "fenced":
            if position not in self._fences:
                return ()
            self._fences.discard(position)
            assert isinstance(message.data, int)
            return self._hear(Fenced(position, message.data))
        if message.kind not in ("found", "missing"):
            return super()._on_message(message)
        if (message.entry_id, position) not in self._reads:
            return ()
        self._reads.discard((message.entry_id, position))
        if message.kind == "missing":
            return self._hear(Missing(message.entry_id, position))
        assert isinstance(message.data, bytes)
        return self._hear(Found(decode_frame(message.data), position))

    def _on_answer(self, answer: Answer) -> Sequence[Message]:
        call, self._call = self._call, None
        if call is None:
            return super()._on_answer(answer)
        self.asks = None
        if answer.error:
            return self._hear(RecoveryCallFailed(_ANSWERED_ERRORS[answer.error](answer.error)))
        if isinstance(call, StoreMetadata):
            return self._hear(MetadataStored(call.metadata, answer.version))
        assert answer.metadata is not None
        return self._hear(MetadataRead(answer.metadata.value, answer.version))

    def _hear(self, event: RecoveryEvent) -> list[Message]:
        """Feed the recovery; its appender is fed by its effects."""
        effects = self.machine.handle(event)
        self.machine.validate()
        sent: list[Message] = []
        for effect in effects:
            sent += self._perform_of_recovery(effect)
        return sent

    def _perform_of_recovery(self, effect: RecoveryEffect) -> Sequence[Message]:
        match effect:
            case ReadMetadata():
                self._call, self.asks = effect, Ask()
            case StoreMetadata(metadata, version):
                self._call, self.asks = effect, Ask(Frozen(metadata), version)
                self.is_closing = self.appender is not None
                self._reads.clear()
            case FenceBookie():
                self._fences.add(effect.position)
                bookie = _NUMBERS[effect.bookie]
                return [Message("fence", self.number, effect.position, bookie)]
            case ReadEntry():
                self._fences.clear()
                self._reads.add((effect.entry_id, effect.position))
                bookie = _NUMBERS[effect.bookie]
                return [Message("read", self.number, effect.position, bookie, effect.entry_id)]
            case StartWriteBack():
                self.start = effect.last_add_confirmed
                self.appender = appender_of(
                    effect.pinned.metadata,
                    GivenChoice(),
                    version=effect.pinned.version,
                    last_add_confirmed=self.start,
                    is_recovery=True,
                )
            case WriteBack():
                self._reads = {each for each in self._reads if each[0] != effect.entry.entry_id}
                return self._feed(AppendRecovered(effect.entry))
            case ReadLength():
                # A body is one byte, so the length needs no reading.
                return self._hear(LengthRead(effect.entry_id + 1))
            case EndRecovery():
                self.reported_end = (effect.closed.last_entry_id, effect.closed.length_bytes)
                self.is_over = True
            case AbortRecovery():
                self.is_over = True
            case _:
                assert_never(effect)
        return ()

    def _on_confirmed(self, last_entry_id: int) -> Sequence[Message]:
        assert self.appender is not None
        return self._hear(WrittenBack(last_entry_id, self.appender.metadata.ensembles))

    def _on_failed(self, error: DLError) -> None:
        self.is_over = True
