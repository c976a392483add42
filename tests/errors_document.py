"""docs/errors.md, made of the classes of errors, with what to do at each.

``python -m tests.errors_document`` writes it; a test compares.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from dlcore.base import errors
from dlcore.base.errors import DLError

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
_HEAD = """# Errors

Generated from the code by `make pages`.

Every error is a `dlcore.DLError`. The classes below are in `dlcore.base.errors`: a program that
catches the one at the head of a section catches all of the section. `error.code` is a number
that stays, and `error.retriable` says whether the same call may succeed later without a change by
the caller. `dlog --json` prints both:
`{"error": "…", "kind": "LogNotFoundError", "code": 510, "retriable": false, "exit_code": 1}`.
A proxy sends the number beside gRPC's status ([errors of proxies](proxy-actions.md#errors)).

The message names the value and what would be right; read it before this table. Two other pages
explain [messages of Spark](deploying-spark.md#errors) and
[messages about certificates](tls.md#errors).
"""
DATA = "keep all data as it is, make `dlog debug bundle`, and look with `dlog log inspect`"
TO_DO = {
    "DLError": "see the message",
    "ConfigurationError": "correct the option, URI or argument that the message names",
    "InvalidLogNameError": "choose a name by the rule in the message",
    "InvalidNamespaceUriError": "write it like `distributedlog://host:2181/path`",
    "UnsupportedError": "open the other kind of namespace: [over proxies]"
    "(clients-dlcore.md#what-each-kind-offers) says what each has",
    "UnknownActionError": "correct the name of the action, or upgrade the proxy",
    "UnauthenticatedError": "get a new token, and look at its issuer, audience and time: "
    "[users](access.md#users)",
    "AccessDeniedError": "ask for a rule: `dlog acl test` shows what a principal may do, and "
    "`dlog acl allow` gives it the right",
    "AlreadyClosedError": "open the object again; look for who closes it too early",
    "MetadataError": "see the message; look at the metadata store's own log",
    "MetadataConnectionError": "look whether ZooKeeper answers at the address of the URI. Before "
    "an append is repeated, read whether the first one took effect",
    "MetadataSessionExpiredError": "repeat the call, for a new session opens by itself. If it "
    "happens often, look for long pauses of the process and of ZooKeeper",
    "MetadataVersionError": "another client changed it at the same time: read it again, then "
    "decide again",
    "NodeExistsError": "use what is there, or another name",
    "NoNodeError": "look whether the URI names the right path; create it first",
    "NodeNotEmptyError": "delete what is below it first",
    "TransactionTooLargeError": "do it in smaller parts: fewer logs or tasks in one append",
    "CorruptMetadataError": DATA,
    "ObjectStoreError": "look whether the store of the setting `tier` answers, and what it "
    "refuses; the call is repeated by itself, and nothing is lost",
    "BookieError": "see the message, which names the bookie; `dlog bookie list`",
    "NoSuchLedgerError": "nothing: clients ask another replica",
    "NoSuchEntryError": "nothing: clients ask another replica",
    "LedgerFencedError": "stop writing: another writer, or a recovery, has taken over. Open the "
    "log again if this program should write",
    "BookieReadOnlyError": "give its disk more room: [DlogBookieReadOnly](alerts.md)",
    "BookieOverloadedError": "send less at once, or add bookies",
    "BookieUnavailableError": "look whether the process runs and its port can be reached from here",
    "BookieStorageError": "look at the bookie's log and its disk; replace the disk if it fails, "
    "and let auto-recovery copy what it held",
    "WrongIncarnationError": "a disk was replaced or mounted in the wrong place: `dlog bookie "
    "cookie list` shows which is known",
    "DigestMismatchError": "nothing: another replica is read, and the damaged one is replaced",
    "EntryTooLargeError": "write smaller records, or raise the bookie's limit",
    "BadRequestError": "use a version of the client that fits the bookie's",
    "BookieAccessDeniedError": "give the client a certificate, or a newer capability: "
    "[capabilities](capabilities.md)",
    "LedgerError": "see the message, which names the ledger; `dlog ledger show`",
    "LedgerNotFoundError": "it was deleted, mostly because its records were truncated: read from "
    "the log's first position on",
    "LedgerExistsError": "make a new one",
    "LedgerClosedError": "open the log again to write on",
    "LedgerRecoveryError": "wait until more of its bookies answer, then repeat the call",
    "LedgerReadError": "bring back a bookie that holds it. If the message speaks of damage, the "
    "logs of its bookies name the entries, and `dlog log inspect --entries` finds all such",
    "NotEnoughBookiesError": "start bookies, or make room on their disks: `dlog bookie list`",
    "DecommissionError": "do what the message says first: stop the bookie, or wait for its ledgers",
    "LogError": "see the message, which names the log; `dlog log show`",
    "LogNotFoundError": "correct the name, or create it: `dlog log list`",
    "LogRenamedError": "open it by its new name",
    "LogExistsError": "choose another name",
    "LogEmptyError": "wait for a first record, or ask `log.read()`, which gives none",
    "LogRecordTooLongError": "divide the record, or keep it elsewhere and write where",
    "TransactionIdOutOfOrderError": "use `writer.last_txid` to go on; `dlog log reset-txid` if a "
    "number was wrong",
    "EndOfStreamError": "stop: a sealed log has no further record. Write to another log",
    "AlreadyTruncatedError": "read from the log's first position on",
    "OwnershipAcquireFailedError": "close the other writer, which `error.owner` names, or wait "
    "longer (`lock_timeout_s`)",
    "LogModeError": "write through a proxy, or not through one, as the message says; "
    "`dlog log settings` shows the mode",
    "LogElsewhereError": "go to the proxy at `error.location`; this library does by itself",
    "ProxyUnavailableError": "look at the proxies with `dlog proxy list`; read on at the position "
    "that was reached",
    "OverCapacityError": "repeat after `error.retry_after_s`, and send more slowly; the limits are "
    "[settings of proxies](configuration.md#proxies)",
    "ReaderIdleError": "call again; look whether the writer still lives",
    "ReaderStalledError": "read faster, or ask for less; go on at the position that was reached",
    "LogNotReadyError": "repeat after `error.retry_after_s`",
    "SubscriptionMovedError": "stop this reader, or give it a subscriber's name of its own",
    "SchemaMismatchError": "cast the columns that the message shows, or widen the schema: "
    "`log.update_schema`, in Spark `mergeSchema`",
    "SequenceGapError": "send the records from `error.expected` on",
    "ProducerFencedError": "stop, if another process has taken this producer's name; else begin "
    "again as a new incarnation",
    "ConditionFailedError": "read what was written since, up to `error.last`, then decide again",
    "TableError": "do what the message says; rows stay in the log, and the table as it is",
    "WriteError": "close the writer and open another one; its first error said why",
    "WriteCancelledError": "write the record again with a new writer",
    "InvalidEntryError": DATA,
    "EncryptionKeyError": "give this process the file with the key that the message names: "
    "[encryption](encryption.md)",
    "AppendAbortedError": "write the batch again as a new append",
    "DuplicateAppendError": "write to a log in one thread, or to a log of its own in each",
    "AppendSupersededError": "stop this run: a later one has taken its place",
    "AppendMismatchError": "go on from the newest state or checkpoint, or under a new identity",
    "UnexpectedError": DATA,
}
"""For each error, what its reader does."""


def classes() -> list[type[DLError]]:
    """Return all errors, in the order of the tree."""
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, DLError)
    ]


def page() -> str:
    """Return the whole page."""
    heads = [each for each in classes() if each.__base__ is DLError]
    alone = [each for each in heads if not each.__subclasses__()]
    groups = [each for each in heads if each not in alone]
    parts = [_HEAD, "## Of any call\n", _table([DLError, *alone])]
    for head in groups:
        members = [each for each in classes() if issubclass(each, head)]
        parts += [f"## {head.__name__}\n", _table(members)]
    return "\n".join(parts)


def _table(kinds: list[type[DLError]]) -> str:
    rows = [
        f"| `{kind.__name__}` | {kind.code} | {'yes' if kind.retriable else ''} | "
        f"{_meaning(kind)} | {TO_DO[kind.__name__]} |"
        for kind in kinds
    ]
    return "\n".join(
        ["| error | code | again | meaning | what to do |", "|" + "---|" * 5, *rows, ""]
    )


def _meaning(kind: type[DLError]) -> str:
    """Return what the docstring says, on one line."""
    return " ".join((inspect.getdoc(kind) or "").replace("``", "`").split())


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
