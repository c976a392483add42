"""The page of a proxy's limits and deadlines has the figures of the code."""

from __future__ import annotations

import re
from dataclasses import fields

from dlcore.backends.flight.endpoint import LIST_ANSWER_S
from dlcore.base.config import MIB
from dlcore.flight import calls
from dlcore.flight.actions import ANSWER_S, DRAIN_ANSWER_S, LONG_ANSWER_S
from dlcore.flight.producer_client import SILENCE_S
from dlcore.proxy import server
from dlcore.proxy.config import LIVE_SETTINGS, ProxyConfig
from dlcore.proxy.reading import delivery, kept, outgoing, ring, serving
from dlcore.proxy.writing import admission, budget, owned_log, rates
from tests.fixtures.pages import ROOT

PAGE = (ROOT / "docs" / "proxy-limits.md").read_text(encoding="utf-8")
NAMES = {1: "one", 2: "two", 3: "three", 5: "five", 8: "eight"}
SHARE = {4: "a quarter"}
TIMES = {30.0: "half a minute", 60.0: "minute"}
NOT_LIVE = ("message_bytes_max", "calls_max", "logs_max")
OF_GRPC = "about 64 KiB of one that it does not read"
FIGURE = re.compile(r"\d[\d.,]*(?: (?:s|ms|minutes|KiB|MiB)\b|(?= \|))")


def sentences() -> list[str]:
    """Return what the page says in figures, as the code has them."""
    config, share = ProxyConfig(), SHARE[budget._SHARE]
    answers = dict(calls.CLIENT_OPTIONS)
    wait_ms = answers["grpc.keepalive_timeout_ms"]
    pings = f"| `grpc.keepalive_time_ms` | {answers['grpc.keepalive_time_ms']} |"
    both = "`grpc.keepalive_timeout_ms`, `grpc.http2.ping_timeout_ms`"
    rest = ("grpc.http2.max_pings_without_data", "grpc.min_reconnect_backoff_ms")
    assert answers["grpc.http2.ping_timeout_ms"] == wait_ms
    return [
        f"A log holds at most {share} of the free part of `pending_bytes_max`",
        f"a log has at most {share} of what is free",
        f"the proxy reads {NAMES[owned_log.READING_MAX]} of its streams at a time",
        f"A message waits for room for at most {admission.STALL_S:g} s.",
        f"gathers the records and bytes of {NAMES[int(rates.BURST_S)]} second.",
        f"Keep `throttle_max_s` below {SILENCE_S:g} s:",
        f"gives up a stream on which the proxy owes a reply for {SILENCE_S:g} s",
        f"messages of up to {ring.RUN_BYTES // 1024} KiB",
        f"at most {NAMES[ring.SKIPS_MAX]} times.",
        f"the same position within the last {TIMES[kept.KEPT_S]}",
        f"was not used for {kept.UNUSED_S:g} s",
        f"receives nothing for {outgoing.STALL_S:g} s loses its place,",
        f"or for {delivery.HURRIED_S:g} s while others wait.",
        f"gives its place up after {delivery.TURN_BYTES // MIB} MiB.",
        f"Another message counts {NAMES[outgoing._COPIES]} times:",
        f"reads ahead, about {outgoing._READER_BYTES // MIB} MiB.",
        f"{NAMES[outgoing._READERS_MIN].capitalize()} such readers are always allowed",
        f"for the longest, and for at least {outgoing.STALL_S:g} s.",
        f"at the latest {TIMES[serving.CALM_S]} after it was used.",
        f"| an action that answers at once | {ANSWER_S:g} s | {ANSWER_S:g} s |",
        f"or for many logs | {ANSWER_S:g} s | {LONG_ANSWER_S:g} s |",
        f"| `ListFlights` | by the number of logs | {LIST_ANSWER_S:g} s |",
        f"| `drain` | longer | {DRAIN_ANSWER_S:g} s |",
        f"is waited for `lock_timeout_s`, {config.lock_timeout_s:g} s by default.",
        f"| pings a client that is silent | {server._SILENCE_MS // 1000} s |",
        f"no answer to the ping comes | another {server._SILENCE_MS // 1000} s |",
        f"on which no HTTP/2 begins | {server._HANDSHAKE_MS // 1000} s |",
        f"opens another one for the next call | {server._IDLE_MS // 60_000} minutes |",
        f"| pings at least {server._PING_MIN_MS // 1000} s apart are allowed |",
        f"This library pings after {calls._SILENCE_MS // 1000} s of silence,",
        f"and waits {calls._ANSWER_MS // 1000} s for the answer.",
        pings,
        f"| {both} | {wait_ms} |",
        *(f"| `{name}` | {answers[name]} |" for name in rest),
    ]


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    """Each is in a sentence here, so that none stays behind."""
    known = sentences()
    assert [each for each in known if each not in PAGE] == []
    others = PAGE
    for each in (*known, OF_GRPC):
        others = others.replace(each, "")
    assert FIGURE.findall(others) == []


def test_the_settings_of_the_page_are_those_of_a_proxy() -> None:
    """All that it lists are taken over while a proxy runs, but for those that it excepts."""
    table = PAGE.partition("## Limits")[2].partition("By default")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert listed <= {each.name for each in fields(ProxyConfig)}
    assert listed - set(LIVE_SETTINGS) == set(NOT_LIVE)
    assert f"except `{NOT_LIVE[0]}`, `{NOT_LIVE[1]}` and `{NOT_LIVE[2]}`." in PAGE
    rates_of = {each for each in LIVE_SETTINGS if each.endswith("_per_s")}
    assert set(LIVE_SETTINGS) - rates_of <= listed
