"""Clients of any release: they use only what 0.2.0 had, and run as programs.

``write URI LOG`` writes records 1, 2, 3, … until it is terminated, and says which are acknowledged.
A record's number is its transaction id, so after an error the log itself tells where to go on.
``tail URI LOG`` reads from the beginning, follows, and says how far it came.  ``read URI LOG`` says
how far a log goes; FIRST, one argument more, is its first record if that is not 1.  Both end
with an error at the first record that is not the next one.
"""

from __future__ import annotations

import os
import sys
import time

import dlcore
from dlcore import LogRecord
from dlcore.base.errors import DLError
from dlcore.sync import Namespace, open_namespace

_AT_ONCE = 5
_PAUSE_S = 0.1
_RETRY_S = 0.2


def _write(namespace: Namespace, log: str) -> None:
    while True:
        try:
            with namespace.open_log(log) as manager, manager.open_writer() as writer:
                written = max(writer.last_txid, 0)
                while True:
                    for number in range(written + 1, written + 1 + _AT_ONCE):
                        writer.write(LogRecord(number, b"%d" % number))
                    writer.commit()
                    written += _AT_ONCE
                    print(f"at {written}")
                    time.sleep(_PAUSE_S)
        except DLError as error:
            print(f"again: {type(error).__name__}: {error}")
            time.sleep(_RETRY_S)


def _tail(namespace: Namespace, log: str) -> None:
    seen = 0
    while True:
        try:
            with namespace.open_log(log) as manager, manager.open_reader() as reader:
                for expected, record in enumerate(reader.records(follow=True), 1):
                    _require(expected, record.txid, record.payload)
                    if expected > seen:
                        seen = expected
                        print(f"at {seen}")
        except DLError as error:
            print(f"again: {type(error).__name__}: {error}")
            time.sleep(_RETRY_S)


def _read(namespace: Namespace, log: str, first: str = "1") -> None:
    count = int(first) - 1
    with namespace.open_log(log) as manager, manager.open_reader() as reader:
        for record in reader:
            count += 1
            _require(count, record.txid, record.payload)
    print(f"at {count}")


def _require(expected: int, txid: int, payload: bytes) -> None:
    if (txid, bytes(payload)) != (expected, b"%d" % expected):
        print(f"lost or doubled: expected {expected}, found {txid} with {bytes(payload)!r}")
        os._exit(3)


if __name__ == "__main__":
    work, uri, name, *more = sys.argv[1:]
    print(f"of {dlcore.__file__}")
    with open_namespace(uri) as opened:
        {"write": _write, "tail": _tail, "read": _read}[work](opened, name, *more)
