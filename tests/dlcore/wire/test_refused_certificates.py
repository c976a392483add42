"""Certificates that a bookie or its client refuses: both learn the reason, and the remedy.

Goal: the same certificate is judged alike on each Python, and the error names what it lacks.
Method: real certificates, each wrong in one way, between a served bookie and a client.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from dlcore.base.access import tls_refusals
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.tls_refusals import own_refusal
from dlcore.base.errors import BookieUnavailableError
from dlcore.ops.secure.certificates import CLIENT, SERVER
from tests.dlcore.wire.test_tls import client_of
from tests.fixtures.certificates import Authority
from tests.fixtures.served_bookie import BOOKIE, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

FORM = "expected basicConstraints=critical,CA:TRUE, keyUsage=critical,keyCertSign and subject"
HOST = "expected one with the host that is connected to in subjectAltName"
OF_SERVERS = {
    "the authority has no key usage": rf"\(CA cert does not include key usage.*\): {FORM}",
    "expired": r"\(certificate has expired\): expected one that is valid now",
    "not yet valid": r"\(certificate is not yet valid.*\): expected one that is valid now",
    "another host": rf"\(IP address mismatch.* '127.0.0.1'\): {HOST}",
    "no host": rf"\(IP address mismatch.* '127.0.0.1'\): {HOST}",
    "for clients only": r"\(uns.* purpose\): expected one with serverAuth in extendedKeyUsage",
    "its signer is not named": rf"\(Missing Authority Key Identifier\): {FORM}",
}
OF_CLIENTS = {
    "the authority has no key usage": OF_SERVERS["the authority has no key usage"],
    "expired": OF_SERVERS["expired"],
    "not yet valid": OF_SERVERS["not yet valid"],
    "for servers only": r"\(uns.* purpose\): expected one with clientAuth in extendedKeyUsage",
    "its signer is not named": OF_SERVERS["its signer is not named"],
}


class Files:
    """Those of both ends, by what is wrong with one's certificate."""

    def __init__(self, folder: Path) -> None:
        ours, unfit = Authority(folder / "ours"), Authority(folder / "unfit", has_key_usage=False)
        self.good = ours.issue("good")
        self.wrong = {
            "the authority has no key usage": unfit.issue("unfit"),
            "expired": ours.issue("expired", days=-1),
            "not yet valid": ours.issue("early", since=timedelta(days=1)),
            "another host": ours.issue("elsewhere", host="DNS:elsewhere"),
            "no host": ours.issue("nowhere", host=None),
            "for clients only": ours.issue("a-client", purposes=[CLIENT]),
            "for servers only": ours.issue("a-server", purposes=[SERVER]),
            "its signer is not named": ours.issue("unsigned", names_signer=False),
        }
        self.stranger = replace(Authority(folder / "theirs").issue("stranger"), ca=self.good.ca)

    def other_end(self, files: TlsFiles) -> TlsFiles:
        """Return the files of one that is in order and trusts the same authority."""
        return self.good if files.ca == self.good.ca else replace(files, cert="", key="")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Made once; no test changes them."""
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("wrong", OF_SERVERS)
def test_the_client_tells_what_is_wrong_with_a_bookies_certificate(
    wrong: str, files: Files, tmp_path: Path
) -> None:
    """The bookie itself tells it from its own files, before a client comes."""

    async def scenario() -> None:
        async with serve(tmp_path, tls=files.wrong[wrong]) as served:
            client = client_of(served, files.other_end(files.wrong[wrong]))
            text = f"its certificate is not accepted {OF_SERVERS[wrong]}"
            with pytest.raises(BookieUnavailableError, match=text):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()

    run(scenario)
    own = own_refusal(files.wrong[wrong], host="127.0.0.1")
    assert own is not None
    assert re.search(rf"cert='.*' is not accepted by others {OF_SERVERS[wrong]}", own)


@pytest.mark.parametrize("wrong", OF_CLIENTS)
def test_the_bookies_log_tells_what_is_wrong_with_a_clients_certificate(
    wrong: str, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however often the client comes; which learns it as far as its own files tell it."""
    theirs = files.wrong[wrong]
    own = rf"cert='.*' is not accepted by others {OF_CLIENTS[wrong]}"
    reason = own if theirs.ca == files.good.ca else "closes so, and its log tells why: expected a"

    async def scenario() -> None:
        async with serve(tmp_path, tls=replace(files.good, ca=theirs.ca)) as served:
            for _ in range(2):
                client = client_of(served, replace(theirs, ca=files.good.ca))
                with pytest.raises(BookieUnavailableError, match=reason):
                    await client.add_entry(BOOKIE, frame_of(1, 0))
                await client.aclose()

    run(scenario)
    (warning,) = [each for each in caplog.records if each.name == tls_refusals.__name__]
    text = f"a client's certificate is not accepted {OF_CLIENTS[wrong]}"
    assert re.match(text, warning.getMessage())
    refusal = own_refusal(theirs, host=None)
    assert refusal is not None
    assert re.search(own, refusal)


@pytest.mark.parametrize("who", ["no certificate", "a stranger"])
def test_both_ends_tell_of_who_is_not_known(
    who: str, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a certificate, or with one that another authority signed."""
    theirs, reason, logged = {
        "no certificate": (
            TlsFiles(ca=files.good.ca),
            "a server that asks for a certificate closes so: expected cert and key",
            "a client without a certificate is not let in: expected one signed by whom tls_ca",
        ),
        "a stranger": (
            files.stranger,
            "a server that does not accept cert='.*' closes so, and its log tells why: expected a",
            r"a client's certificate is not accepted \(.*\): expected one signed by whom tls_ca",
        ),
    }[who]

    async def scenario() -> None:
        async with serve(tmp_path, tls=files.good) as served:
            client = client_of(served, theirs)
            with pytest.raises(BookieUnavailableError, match=reason):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            with pytest.raises(BookieUnavailableError, match=reason):
                await client.list_entries(BOOKIE, ledger_id=1)
            await client.aclose()

    run(scenario)
    (warning,) = [each for each in caplog.records if each.name == tls_refusals.__name__]
    assert re.match(logged, warning.getMessage())
    assert own_refusal(files.stranger, host=None) is None  # its signer may be known to others


@pytest.mark.parametrize("wrong", ["expired", "not yet valid", "another host", "for clients only"])
def test_the_client_of_the_control_service_tells_what_a_certificate_needs(
    wrong: str, files: Files, tmp_path: Path
) -> None:
    """There gRPC judges, and tells a text only."""

    async def scenario() -> None:
        async with serve(tmp_path, tls=files.wrong[wrong]) as served:
            client = client_of(served, files.good)
            with pytest.raises(BookieUnavailableError, match="not accepted: expected one signed"):
                await client.list_entries(BOOKIE, ledger_id=1)
            await client.aclose()

    run(scenario)


def test_an_authority_below_another_is_trusted_alone(tmp_path: Path) -> None:
    """On both ports, though the one above it is in no file."""
    above = Authority(tmp_path / "above")
    below = Authority(tmp_path / "below", signer=above)
    bookie, client_files = below.issue("bookie"), below.issue("client", host=None)

    async def scenario() -> None:
        async with serve(tmp_path / "data", tls=bookie) as served:
            client = client_of(served, client_files)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            assert len(await client.list_entries(BOOKIE, ledger_id=1)) == 1
            await client.aclose()

    run(scenario)
    assert own_refusal(bookie, host="127.0.0.1") is None


def test_missing_files_and_hosts_are_named_in_the_same_way(files: Files) -> None:
    """Files may have been removed since they were read."""
    host = own_refusal(files.good, host=".example")
    assert host is not None
    assert "host='.example': " in host
    refusal = own_refusal(replace(files.good, key="/nowhere.key"), host=None)
    assert refusal is not None
    assert "key='/nowhere.key': expected readable PEM files" in refusal
