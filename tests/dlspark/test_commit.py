"""Identities of appends: who counts as the same write, and in which order tasks' extents go.

Goal: a replay is recognised, two different writes never are one.  Method: exact cases.
"""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from dlcore.errors import UnexpectedError
from dlcore.log.append import check_identity
from dlspark.commit import (
    BATCH_ID_PROPERTY,
    QUERY_ID_PROPERTY,
    RUN_ID_PROPERTY,
    AppendIdentity,
    StagedTask,
    batch_identity,
    join_messages,
    stream_identity,
)
from dlspark.options import Transaction, WriteOptions

OPTIONS = WriteOptions(uri="distributedlog://h/p", log="clicks", transaction=None)
IN_A_BATCH = {QUERY_ID_PROPERTY: "q", BATCH_ID_PROPERTY: "7", RUN_ID_PROPERTY: "r"}
OUTSIDE = dict.fromkeys(IN_A_BATCH)


def test_stream_is_identified_by_query_and_batch() -> None:
    """The run is told apart, but is not part of the identity: a replay is in another run."""
    assert stream_identity(IN_A_BATCH) == AppendIdentity(
        identity="stream:q", version=7, run_id="r", recurs=True
    )


@pytest.mark.parametrize("missing", [QUERY_ID_PROPERTY, BATCH_ID_PROPERTY])
def test_stream_without_identity_is_refused(missing: str) -> None:
    """Writing under a wrong identity would lose or double batches."""
    with pytest.raises(UnexpectedError, match=missing):
        stream_identity(IN_A_BATCH | {missing: None})


def test_plain_write_has_an_identity_of_its_own() -> None:
    """Two writes with different tokens are two."""
    one, two = (batch_identity(OPTIONS, OUTSIDE, token=token) for token in "ab")
    assert one.identity != two.identity
    assert one.is_unique
    assert not one.recurs


def test_write_inside_foreach_batch_belongs_to_the_batch() -> None:
    """The token does not matter, the target does, and it is not the sink's own identity."""
    one, two = (batch_identity(OPTIONS, IN_A_BATCH, token=token) for token in "ab")
    assert one == two
    assert (one.version, one.run_id, one.recurs) == (7, "r", True)
    other = WriteOptions(uri=OPTIONS.uri, log=None, transaction=None)
    identities = {one.identity, batch_identity(other, IN_A_BATCH, token="a").identity}
    assert len(identities | {stream_identity(IN_A_BATCH).identity}) == 3


def test_users_own_transaction_wins() -> None:
    """Also inside foreachBatch."""
    options = WriteOptions(
        uri=OPTIONS.uri, log="clicks", transaction=Transaction(app_id="job", version=4)
    )
    found = batch_identity(options, IN_A_BATCH, token="a")
    assert (found.identity, found.version, found.run_id) == ("txn:job>clicks", 4, "")


def test_users_own_transaction_is_of_one_log() -> None:
    """One version may be written to several logs, whatever their names and the application's."""
    longest = "x" * 128
    targets = [
        (app, log)
        for app in ("a", "a>b", longest)
        for log in ("b", "c", "b/c", longest * 2, longest * 3, None)
    ]
    found = [
        batch_identity(
            WriteOptions(uri=OPTIONS.uri, log=log, transaction=Transaction(app_id=app, version=4)),
            OUTSIDE,
            token="a",
        ).identity
        for app, log in targets
    ]
    assert len(set(found)) == len(targets)
    for identity in found:
        check_identity(identity)


def test_extents_go_in_the_order_of_partitions() -> None:
    """Whatever order messages come in; failed tasks have none; messages survive pickling."""
    append = stream_identity(IN_A_BATCH)
    messages = [
        StagedTask(append=append, partition_id=number, extents=cast("Any", [f"e{number}"]))
        for number in (2, 0, 1)
    ]
    again = pickle.loads(pickle.dumps([*messages, None]))
    joined = join_messages(again)
    assert joined is not None
    assert joined[0] == append
    assert [str(extent) for extent in joined[1]] == ["e0", "e1", "e2"]
    assert join_messages([None, None]) is None


def test_messages_of_two_writes_are_not_joined() -> None:
    """That would commit one of them under the identity of the other."""
    appends = [stream_identity(IN_A_BATCH | {BATCH_ID_PROPERTY: number}) for number in "12"]
    messages = [StagedTask(append=append, partition_id=0, extents=[]) for append in appends]
    with pytest.raises(UnexpectedError, match="not of one append"):
        join_messages(messages)
    with pytest.raises(UnexpectedError, match="not of one append"):
        join_messages([messages[0], WriterCommitMessage()])
