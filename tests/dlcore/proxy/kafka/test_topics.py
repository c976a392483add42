"""Names of topics: each log has one, Kafka allows it, and it leads back to the log."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import InvalidLogNameError
from dlcore.base.ids import validate_log_name
from dlcore.proxy.kafka.topics import log_of, node_of, topic_of

NAMES = st.text(st.one_of(st.sampled_from("a_./-Ä0"), st.characters()), min_size=1, max_size=12)


@given(NAMES)
def test_a_topic_leads_back_to_its_log(name: str) -> None:
    """Whatever characters the name has."""
    try:
        log = validate_log_name(name)
    except InvalidLogNameError:
        return
    topic = topic_of(log)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", topic)
    assert log_of(topic) == log


@given(st.text(st.sampled_from("a_.-5fe/ "), max_size=12))
def test_no_two_topics_are_of_one_log(topic: str) -> None:
    """A topic that no log has leads nowhere."""
    log = log_of(topic)
    assert log is None or topic_of(log) == topic


@pytest.mark.parametrize(
    ("log", "topic"),
    [
        ("clicks", "clicks"),
        ("team/clicks_2-b", "team.clicks_2-b"),
        ("a.b", "a._2eb"),
        ("a/_b", "a.._5fb"),
        ("a/.x", "a.._2ex"),
        ("Ärger", "._c3._84rger"),
    ],
)
def test_examples(log: str, topic: str) -> None:
    """Those of the documentation."""
    assert (topic_of(log), log_of(topic)) == (log and topic, log)


@pytest.mark.parametrize("topic", ["a/b", "._ff", "a b", "._61", "x ", " x"])
def test_topics_of_no_log(topic: str) -> None:
    """A character that is not allowed, no UTF-8, and an escape of what needs none."""
    assert log_of(topic) is None


@pytest.mark.parametrize("topic", ["a..b", "a.", ".a", "..", "._2ea", "._20"])
def test_topics_of_names_that_no_log_may_have(topic: str) -> None:
    """An empty component, a dot or a slash at the beginning, a space."""
    assert log_of(topic) is None


def test_numbers_of_nodes() -> None:
    """They are positive numbers of 31 bits, the same for the same location."""
    numbers = {node_of(f"grpc://host-{each}:4190") for each in range(1000)}
    assert len(numbers) == 1000
    assert 0 <= min(numbers) < max(numbers) < 2**31
    assert node_of("grpc://a:1") == node_of("grpc://a:1")
