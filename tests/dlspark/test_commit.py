"""Identities of appends: which runs count as the same write, and in which order tasks' extents go.

Goal: a replay is recognised, two different writes never are one.  Method: exact cases.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, cast

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from dlcore import SharedStaging
from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError, UnexpectedError
from dlcore.base.ids import require_identity
from dlspark import in_batch
from dlspark.commit import (
    APPLICATION_PROPERTIES,
    BATCH_ID_PROPERTY,
    CALL_SITE_PROPERTY,
    CONNECT_OPERATION_PROPERTY,
    EXECUTION_PROPERTY,
    QUERY_ID_PROPERTY,
    STREAM_SESSION_PROPERTY,
    TASK_PROPERTIES,
    AppendIdentity,
    StagedTask,
    batch_identity,
    join_messages,
    stream_identity,
)
from dlspark.options import Address, Transaction, WriteOptions

OPTIONS = WriteOptions(address=Address(uri="distributedlog://h/p"), log="clicks", transaction=None)
BY_COLUMN = WriteOptions(address=Address(uri="distributedlog://h/p"), log=None, transaction=None)
IN_A_BATCH = {
    QUERY_ID_PROPERTY: "q",
    BATCH_ID_PROPERTY: "7",
    EXECUTION_PROPERTY: "12",
    **dict.fromkeys(APPLICATION_PROPERTIES, "a"),
    STREAM_SESSION_PROPERTY: "2",
}
OUTSIDE = dict.fromkeys(TASK_PROPERTIES)


def test_stream_is_identified_by_query_target_and_batch() -> None:
    """It writes a batch once, so that its runs need not be distinguished."""
    found = stream_identity(OPTIONS, IN_A_BATCH)
    assert found == AppendIdentity(
        identity="stream:q",
        version=7,
        shared=SharedStaging(identity="stream:q", round="7"),
        is_stream=True,
        is_of_log=True,
    )
    assert found.committed_as("9f") == "stream:q><9f>"
    by_column = stream_identity(BY_COLUMN, IN_A_BATCH)
    assert (by_column.identity, by_column.is_of_log) == ("stream:q><column>", False)


@pytest.mark.parametrize("missing", [QUERY_ID_PROPERTY, BATCH_ID_PROPERTY])
def test_stream_without_identity_is_refused(missing: str) -> None:
    """Writing under a wrong identity would lose or double batches."""
    with pytest.raises(UnexpectedError, match=missing):
        stream_identity(OPTIONS, IN_A_BATCH | {missing: None})


@pytest.mark.parametrize(
    "missing", [BATCH_ID_PROPERTY, EXECUTION_PROPERTY, *APPLICATION_PROPERTIES]
)
def test_batch_of_an_unknown_run_is_refused(missing: str) -> None:
    """Writes counted in the wrong run would be lost or doubled."""
    with pytest.raises(UnexpectedError, match=missing):
        batch_identity(OPTIONS, IN_A_BATCH | {missing: None}, token="a")


def test_rows_of_a_batch_in_a_thread_of_no_batch_are_refused() -> None:
    """A repetition would write them again; with an identity of the user's own it does not."""
    properties = OUTSIDE | {STREAM_SESSION_PROPERTY: "2", EXECUTION_PROPERTY: "13"}
    with pytest.raises(ConfigurationError, match=r"dlspark\.in_batch.*txnAppId"):
        batch_identity(OPTIONS, properties, token="a")
    named = replace(OPTIONS, transaction=Transaction(app_id="job", version=4))
    assert batch_identity(named, properties, token="a", log_id="9f").identity == "txn:job><9f>"


REQUEST = 'session_id: "a"\nplan {\n  command {\n    write_operation {\n      input {\n        '
OF_A_BATCH = {CALL_SITE_PROPERTY: REQUEST + "cached_remote_relation {\n"}
BEHIND = '\n      source: "dlog"\n'
OVER_CONNECT = {CALL_SITE_PROPERTY: REQUEST + "range {\n" + BEHIND}
OF_SPARK_4_3 = {CONNECT_OPERATION_PROPERTY: "b"}


@pytest.mark.parametrize(
    "properties",
    [OF_A_BATCH, OVER_CONNECT | OF_SPARK_4_3 | {STREAM_SESSION_PROPERTY: "2"}],
    ids=["4.1, 4.2", "4.3"],
)
def test_rows_of_a_batch_over_connect_are_refused(properties: dict[str, str]) -> None:
    """No thread knows of the batch there; what works is an identity of the user's own."""
    with pytest.raises(ConfigurationError, match=r"Spark Connect.*txnAppId") as caught:
        batch_identity(OPTIONS, OUTSIDE | properties, token="a")
    assert "in_batch" not in str(caught.value)
    named = replace(OPTIONS, transaction=Transaction(app_id="job", version=4))
    found = batch_identity(named, OUTSIDE | properties, token="a", log_id="9f")
    assert found.identity == "txn:job><9f>"


DEEP = """project {
              input {
                common {
                }
                RELATION {
                }
              }
"""
"""How Spark shows what is deep: that it is there, and nothing in it."""


@pytest.mark.parametrize(
    ("rows", "is_refused"),
    [
        (DEEP.replace("RELATION", "project") + BEHIND, True),
        (DEEP.replace("RELATION", "range") + BEHIND, False),
        (DEEP.replace("input", "left_input").replace("RELATION", "filter") + BEHIND, True),
        ("project {\n          expressions {\n            expression_string {...", True),
    ],
    ids=["deep", "deep, and whole", "deep, of two", "long"],
)
def test_rows_that_may_be_of_a_batch_are_refused(rows: str, is_refused: bool) -> None:
    """Before PySpark 4.3 the plan tells, and Spark shows as much of it as it likes."""
    properties = OUTSIDE | {CALL_SITE_PROPERTY: REQUEST + rows}
    assert batch_identity(OPTIONS, properties | OF_SPARK_4_3, token="a").is_unique
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"may be of a micro-batch.*txnAppId"):
            batch_identity(OPTIONS, properties, token="a")
    else:
        assert batch_identity(OPTIONS, properties, token="a").is_unique


@pytest.mark.parametrize(
    "properties",
    [OVER_CONNECT, OVER_CONNECT | OF_SPARK_4_3, OF_A_BATCH | OF_SPARK_4_3],
    ids=["4.1, 4.2", "4.3", "4.3, of a checkpoint"],
)
def test_plain_writes_over_connect(properties: dict[str, str]) -> None:
    """They are as elsewhere, also where the server keeps their rows, if that is all."""
    assert batch_identity(OPTIONS, OUTSIDE | properties, token="a").is_unique


def test_in_batch_says_that_connect_has_no_need_of_it() -> None:
    """Instead of Spark's own error, which speaks of an attribute."""
    with pytest.raises(ConfigurationError, match=r"Spark Connect.*txnAppId"):
        in_batch(print, cast("Any", object()))


def test_plain_write_has_an_identity_of_its_own() -> None:
    """Two writes with different tokens are two."""
    one, two = (batch_identity(OPTIONS, OUTSIDE, token=token) for token in "ab")
    assert one.identity != two.identity
    assert one.is_unique
    assert one.staged_as == one.identity


def test_write_inside_foreach_batch_belongs_to_the_batch() -> None:
    """The token does not matter, the target does; a query may change from one sink to the other."""
    one, two = (batch_identity(OPTIONS, IN_A_BATCH, token=token) for token in "ab")
    assert one == two
    assert (one.version, one.run, one.is_stream) == (7, "a/a/12", True)
    assert one.identity == stream_identity(OPTIONS, IN_A_BATCH).identity
    assert batch_identity(BY_COLUMN, IN_A_BATCH, token="a").identity != one.identity


@pytest.mark.parametrize("changed", [EXECUTION_PROPERTY, *APPLICATION_PROPERTIES])
def test_runs_of_a_batch_are_distinguished(changed: str) -> None:
    """By its execution, and by the JVM that counts executions; the identity stays."""
    one = batch_identity(OPTIONS, IN_A_BATCH, token="a")
    two = batch_identity(OPTIONS, IN_A_BATCH | {changed: "other"}, token="a")
    assert (one.identity, one.version) == (two.identity, two.version)
    assert one.run != two.run


def test_users_own_transaction_wins() -> None:
    """Also inside foreachBatch."""
    options = WriteOptions(
        address=OPTIONS.address, log="clicks", transaction=Transaction(app_id="job", version=4)
    )
    found = batch_identity(options, IN_A_BATCH, token="a", log_id="9f")
    assert (found.identity, found.version, found.run) == ("txn:job><9f>", 4, "")
    assert (found.log_id, found.is_of_log) == ("9f", False)


def test_the_rows_of_a_query_are_staged_under_one_name() -> None:
    """Whatever its targets, its sink, or the users' own transactions; outside of it nothing is."""
    named = replace(OPTIONS, transaction=Transaction(app_id="job", version=4))
    found = [
        stream_identity(OPTIONS, IN_A_BATCH),
        *(batch_identity(each, IN_A_BATCH, token="a") for each in (OPTIONS, BY_COLUMN)),
        batch_identity(named, IN_A_BATCH, token="a", log_id="9f"),
    ]
    assert {append.shared for append in found} == {SharedStaging(identity="stream:q", round="7")}
    assert {append.staged_as for append in found} == {"stream:q"}
    assert batch_identity(named, OUTSIDE, token="a", log_id="9f").shared is None


def test_users_own_transaction_is_of_one_log() -> None:
    """One version may be written to several logs, whatever the name of the application.

    A log counts by its id, whatever its name is.
    """
    longest = "x" * 128
    one, other = SystemClock().new_token(), SystemClock().new_token()

    def identity(app: str, name: str | None, log_id: str | None) -> str:
        transaction = Transaction(app_id=app, version=4)
        options = replace(OPTIONS, log=name, transaction=transaction)
        return batch_identity(options, OUTSIDE, token="a", log_id=log_id).identity

    apps = ("a", "a>b", "a><column>", f"a><{one}>", longest)
    logs = ((None, None), ("b", one), ("b", other))
    found = {identity(app, *log) for app in apps for log in logs}
    assert len(found) == len(apps) * len(logs)
    for each in found:
        require_identity("identity", each)
    assert identity("a", "b", one) == identity("a", "renamed", one)


def test_extents_go_in_the_order_of_partitions() -> None:
    """Whatever order messages come in; failed tasks have none; messages survive pickling."""
    append = stream_identity(OPTIONS, IN_A_BATCH)
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
    appends = [
        stream_identity(OPTIONS, IN_A_BATCH | {BATCH_ID_PROPERTY: number}) for number in "12"
    ]
    messages = [StagedTask(append=append, partition_id=0, extents=[]) for append in appends]
    with pytest.raises(UnexpectedError, match="not of one append"):
        join_messages(messages)
    with pytest.raises(UnexpectedError, match="not of one append"):
        join_messages([messages[0], WriterCommitMessage()])
