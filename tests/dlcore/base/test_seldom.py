"""Logs that no client can fill."""

from __future__ import annotations

import io
import logging
import ssl
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from bookie.serving import connection
from dlcore.base.access import tls_refusals
from dlcore.base.log_lines import PERIOD_S, Seldom, SeldomHandler
from tests.fixtures.bookie_process import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO, SimpleNamespace]]:
    """A log, what is written of it, and the time."""
    stream, now = io.StringIO(), SimpleNamespace(s=0.0)
    handler = SeldomHandler(stream, clock=lambda: now.s)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("proxy")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, stream, now
    logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    handler.close()


def test_some_of_a_kind_are_written_and_the_rest_counted() -> None:
    """In each period anew; one kind does not cost another one its turn."""
    seldom = Seldom(2, period_s=10)
    assert [seldom.is_written("a", now_s=0) for _ in range(5)] == [True, True, False, False, False]
    assert seldom.is_written("b", now_s=1)
    assert seldom.left_out(now_s=9) == {}
    assert seldom.left_out(now_s=10) == {"a": 3}
    assert seldom.left_out(now_s=20) == {}
    assert not seldom._periods
    assert seldom.is_written("a", now_s=21)


def test_a_flood_of_refusals_is_a_few_lines(
    log: tuple[logging.Logger, io.StringIO, SimpleNamespace],
) -> None:
    """And the number of those that were left out, once the minute is over."""
    logger, stream, now = log
    for number in range(10_000):
        logger.warning("connection refused peer=%s: %s", f"10.0.0.1:{number}", "no magic")
    logger.warning("another one")
    lines = stream.getvalue().splitlines()
    assert (len(lines), lines[-1]) == (21, "WARNING proxy another one")
    now.s = PERIOD_S
    logger.info("served")
    assert stream.getvalue().splitlines()[21:] == [
        "WARNING proxy 9980 more like this were left out: connection refused peer=%s: %s",
        "INFO proxy served",
    ]


def test_the_number_of_left_out_lines_is_written_at_the_end(
    log: tuple[logging.Logger, io.StringIO, SimpleNamespace],
) -> None:
    """Also if nothing else is logged any more; debugging is not limited."""
    logger, stream, _ = log
    for _ in range(700):
        logger.debug("a step")
        logger.info("client given up")
    logger.handlers[0].close()
    lines = stream.getvalue().splitlines()
    assert lines.count("DEBUG proxy a step") == 700
    assert lines.count("INFO proxy client given up") == 600
    assert lines[-1] == "INFO proxy 100 more like this were left out: client given up"


@pytest.mark.parametrize(
    "path", ["bookie/__main__.py", "dlcore/ops/cli/proxy.py", "dlcore/ops/cli/autorecovery.py"]
)
def test_every_server_logs_so(path: str) -> None:
    """One that sets up its log by itself could be filled."""
    text = (REPOSITORY / path).read_text()
    assert "log_to_stderr(" in text
    assert "basicConfig" not in text
    assert connection.logger.isEnabledFor(logging.WARNING)


def test_the_reasons_of_refused_certificates_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason once in a minute, and how many more there were."""
    error = ssl.SSLError(1, "[SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]")
    error.reason = "PEER_DID_NOT_RETURN_A_CERTIFICATE"
    seldom = Seldom(1)
    for now_s in (0.0, 1.0, 2.0, PERIOD_S):
        tls_refusals._log(error, seldom, now_s=now_s)
    assert [each.getMessage()[:60] for each in caplog.records] == [
        "a client without a certificate is not let in: expected one s",
        "2 more like this were left out: a client without a certifica",
        "a client without a certificate is not let in: expected one s",
    ]
