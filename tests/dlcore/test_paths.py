"""URIs and the namespace's tree: both directions, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import CorruptMetadataError, InvalidNamespaceUriError
from dlcore.metadata.paths import (
    NAME_NODE_LENGTH_MAX,
    NamespacePaths,
    NamespaceUri,
    bucket_of,
    escape,
    name_of_component,
    parse_uri,
    unescape,
)

PATHS = NamespacePaths("/dlog")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("uri", "servers", "root"),
    [
        ("distributedlog://127.0.0.1:2181/dlog", "127.0.0.1:2181", "/dlog"),
        ("distributedlog-bk://zk1:2181/dlog", "zk1:2181", "/dlog"),
        ("DistributedLog://zk1:1/a", "zk1:1", "/a"),
        ("distributedlog://zk1,zk2:2182/a/b", "zk1:2181,zk2:2182", "/a/b"),
        ("distributedlog://zk1:1;zk2:2, zk3:3/a/b/", "zk1:1,zk2:2,zk3:3", "/a/b"),
        ("  distributedlog://zk1:65535/a\n", "zk1:65535", "/a"),
        (
            "distributedlog://[::1]:2181,b\u00fccher.example/a",
            "[::1]:2181,b\u00fccher.example:2181",
            "/a",
        ),
    ],
)
def test_a_uri_names_servers_and_root(uri: str, servers: str, root: str) -> None:
    """And its text form is parsed to the same."""
    parsed = parse_uri(uri)
    assert parsed == NamespaceUri(servers, root)
    assert parse_uri(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "expected distributedlog://"),
        ("dlog", "expected distributedlog://"),
        ("127.0.0.1:2181/dlog", "expected distributedlog://"),
        ("http://zk1:2181/dlog", "unknown scheme 'http'"),
        ("distributedlog:///dlog", "expected distributedlog://"),
        ("distributedlog://zk1:2181", "the path '' is not a node path"),
        ("distributedlog://zk1:2181/", "the path '/' is not a node path"),
        ("distributedlog://zk1:2181/a//b", "the path '/a//b' is not a node path"),
        ("distributedlog://zk1:2181/a/../b", "is not a node path"),
        ("distributedlog://zk1:2181/./b", "is not a node path"),
        ("distributedlog://zk1:port/a", "'zk1:port' is not host:port"),
        ("distributedlog://zk1:0/a", "'zk1:0' is not host:port"),
        ("distributedlog://zk1:65536/a", "'zk1:65536' is not host:port"),
        ("distributedlog://zk1:\u00b2/a", "'zk1:\u00b2' is not host:port"),
        ("distributedlog://:2181/a", "':2181' is not host:port"),
        ("distributedlog://zk1,,zk2/a", "'' is not host:port"),
        ("distributedlog://zk1:\u00b2/a", "is not host:port"),
        (f"distributedlog://zk1:{'9' * 5000}/a", "is not host:port"),
        ("distributedlog://zk..example:2181/a", "'zk..example:2181' is not host:port"),
        (f"distributedlog://{'z' * 64}:2181/a", "is not host:port"),
        ("distributedlog://zk\0:2181/a", "is not host:port"),
    ],
)
def test_other_uris_are_refused_with_the_reason(uri: str, problem: str) -> None:
    """The message holds the URI."""
    with pytest.raises(InvalidNamespaceUriError) as caught:
        parse_uri(uri)
    assert problem in str(caught.value)
    assert repr(uri) in str(caught.value)


def test_a_value_that_is_no_text_is_no_uri() -> None:
    """As of a variable that is not set."""
    with pytest.raises(InvalidNamespaceUriError, match="invalid namespace URI None: expected"):
        parse_uri(None)  # type: ignore[arg-type]


@given(st.text(max_size=60) | st.text("distributedlog:/-bk,;.0a ", max_size=60))
def test_any_text_is_a_uri_or_refused(uri: str) -> None:
    """Nothing else is raised."""
    for text in (uri, f"distributedlog://{uri}", f"distributedlog://zk1:2181/{uri}"):
        try:
            parsed = parse_uri(text)
        except InvalidNamespaceUriError:
            continue
        assert parse_uri(str(parsed)) == parsed


@given(NAMES)
def test_escaping_is_undone(name: str) -> None:
    """And makes one safe path component."""
    escaped = escape(name)
    assert unescape(escaped) == name
    assert re.fullmatch(r"[A-Za-z0-9\-_.=:#@+%]+", escaped)
    assert not escaped.startswith(".")


@given(NAMES, NAMES)
def test_different_names_have_different_paths(one: str, two: str) -> None:
    """Two logs never share a node."""
    assert (escape(one) == escape(two)) == (one == two)
    assert (PATHS.log(one) == PATHS.log(two)) == (one == two)


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("a/b", "a%2Fb"),
        ("%2F", "%252F"),
        (".", "%2E"),
        ("..", "%2E."),
        ("ü", "%C3%BC"),
        ("a.b", "a.b"),
    ],
)
def test_the_escaped_form(name: str, escaped: str) -> None:
    """It is stored: it must never change."""
    assert escape(name) == escaped


@given(st.text("ab/ä", min_size=1, max_size=400) | NAMES)
def test_the_node_of_a_name_is_short_and_tells_it_or_where_to_look(name: str) -> None:
    """A million names are therefore listed in answers below 1 MB, whatever their length."""
    component = PATHS.log(name).rpartition("/")[2]
    assert PATHS.log(name) == f"{PATHS.log_bucket(bucket_of(name))}/{component}"
    assert len(component) <= NAME_NODE_LENGTH_MAX
    assert name_of_component(component) in (name, None)
    assert (name_of_component(component) is None) == (len(escape(name)) > NAME_NODE_LENGTH_MAX)


def test_a_long_name_is_cut() -> None:
    """A digest stands for the cut-off part: it is stored, and must never change."""
    digest = "f8a8b95f0b6e025fd8bf8f44"
    component = PATHS.log("a/" + "x" * 200).rpartition("/")[2]
    assert component.startswith("a%2F" + "x" * 91 + "~" + digest)


@pytest.mark.parametrize("component", ["%FF", "%C3", "a%80"])
def test_an_unescaped_component_is_refused(component: str) -> None:
    """By its name."""
    with pytest.raises(CorruptMetadataError, match=re.escape(repr(component))):
        unescape(component)


@given(st.integers(0, 2**63 - 1))
def test_a_ledger_is_found_from_its_path(ledger_id: int) -> None:
    """And no node has more than 10,000 children below the first level."""
    prefix, high, middle, low = PATHS.ledger(ledger_id).rsplit("/", 3)
    assert prefix == PATHS.ledgers
    assert PATHS.ledger_id_of(high, middle, low) == ledger_id
    assert len(middle) == len(low) == 4


def test_a_path_that_is_no_ledgers_is_refused() -> None:
    """By its name."""
    with pytest.raises(CorruptMetadataError, match="x/0000/0001 is not a ledger's path"):
        PATHS.ledger_id_of("x", "0000", "0001")


def test_the_tree() -> None:
    """Paths are stored in other nodes and known to tools: they must never change."""
    log = PATHS.log_of("0c")
    assert {
        "bookie_available": PATHS.bookie_available("b1"),
        "bookie_readonly": PATHS.bookie_readonly("b1"),
        "cookie": PATHS.cookie("b1"),
        "idgen": PATHS.ledger_idgen,
        "ledger": PATHS.ledger(123_456_789),
        "log": PATHS.log("a/b"),
        "head": log.head,
        "lock": log.lock,
        "segment": log.segment(7),
        "chunk": log.chunk(7, 3),
        "deleted": PATHS.deleted_log("0c"),
        "commit": PATHS.commit("q/1"),
        "staging": PATHS.staging_entry("q/1", 5),
        "staged": PATHS.staged_ledger(5),
        "owner": PATHS.staging_owner("t"),
        "request": PATHS.upkeep_request("0c"),
        "upkeep": PATHS.upkeep_lock("a/b"),
    } == {
        "bookie_available": "/dlog/bookies/available/b1",
        "bookie_readonly": "/dlog/bookies/readonly/b1",
        "cookie": "/dlog/bookies/cookies/b1",
        "idgen": "/dlog/ledgers/idgen",
        "ledger": "/dlog/ledgers/1/2345/6789",
        "log": "/dlog/logs/c1/a%2Fb",
        "head": "/dlog/heads/48/0c",
        "lock": "/dlog/heads/48/0c/lock",
        "segment": "/dlog/heads/48/0c/7",
        "chunk": "/dlog/heads/48/0c/7/3",
        "deleted": "/dlog/deleted/0c",
        "commit": "/dlog/commits/dd/q%2F1",
        "staging": "/dlog/staging/dd/q%2F1/5",
        "staged": "/dlog/ledgers/0/0000/0005/staged",
        "owner": "/dlog/staging-owners/t",
        "request": "/dlog/upkeep/requests/48/0c",
        "upkeep": "/dlog/upkeep/locks/a%2Fb",
    }
