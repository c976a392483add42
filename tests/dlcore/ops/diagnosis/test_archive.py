"""Archives: what goes in comes out, but for secrets; what is none is refused."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.ops.diagnosis import archive
from dlcore.ops.diagnosis.archive import (
    CUT,
    MANIFEST,
    Bundle,
    read_archive,
    redacted,
    redacted_value,
    write_archive,
)

if TYPE_CHECKING:
    from pathlib import Path

KEY = "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----"
TOKEN = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"a {KEY} b", f"a {CUT} b"),
        ("-----BEGIN EC PRIVATE KEY-----\nthe rest is cut", CUT),
        (f"authorization={TOKEN}, next", f"authorization={CUT}, next"),
        ("keys at https://user:pass@keys/", f"keys at https://{CUT}@keys/"),
        ("Bearer abcdefgh12345678==", f"Bearer {CUT}"),
        ("password=hunter2, user=a", f"password={CUT}, user=a"),
        ("secret: x y", f"secret:{CUT} y"),
        ("token_file=/etc/token tls_key=/etc/k.key", "token_file=/etc/token tls_key=/etc/k.key"),
        ("distributedlog://zk1:2181,zk2:2181/dlog", "distributedlog://zk1:2181,zk2:2181/dlog"),
        ("grpc://10.0.0.1:4190", "grpc://10.0.0.1:4190"),
    ],
)
def test_values_that_look_like_secrets_are_cut_out(text: str, left: str) -> None:
    """And paths and addresses are not."""
    assert redacted(text) == left
    assert redacted_value([{text: text}, (1, None)]) == [{left: left}, [1, None]]


def test_the_content_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """But for secrets."""
    path = tmp_path / "a.tar.gz"
    bundle = Bundle({MANIFEST: {"parts": {}}, "b": [1, KEY]}, {"logs/x.log": f"ä {TOKEN}\n"})
    with path.open("wb") as file:
        write_archive(file, bundle, now_s=1.0)
    found = read_archive(path)
    assert found.values == {MANIFEST: {"parts": {}}, "b": [1, CUT]}
    assert found.texts == {"logs/x.log": f"ä {CUT}\n"}


def test_a_file_that_is_no_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file, none, one without a manifest or with a wrong part, and one that swells."""
    path = tmp_path / "a.tar.gz"
    with pytest.raises(ConfigurationError, match=r"is no archive of dlog debug bundle: .*No such"):
        read_archive(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigurationError, match="is no archive of dlog debug bundle: "):
        read_archive(path)

    def made(name: str, data: bytes) -> Path:
        with tarfile.open(path, "w:gz") as written:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            written.addfile(member, io.BytesIO(data))
            written.addfile(tarfile.TarInfo("dlog-bundle/empty.txt"))
            folder = tarfile.TarInfo("dlog-bundle/folder")
            folder.type = tarfile.DIRTYPE
            written.addfile(folder)
        return path

    with pytest.raises(ConfigurationError, match="it has no manifest"):
        read_archive(made("dlog-bundle/other.json", b"{}"))
    with pytest.raises(ConfigurationError, match="it has no manifest"):
        read_archive(made(f"dlog-bundle/{MANIFEST}.json", b"[]"))
    with pytest.raises(ConfigurationError, match="is no archive"):
        read_archive(made(f"dlog-bundle/{MANIFEST}.json", b"{"))
    assert read_archive(made(f"dlog-bundle/{MANIFEST}.json", b"{}")).texts["folder"] == ""
    with pytest.raises(ConfigurationError, match="is no archive"):
        read_archive(made(f"dlog-bundle/{MANIFEST}.json", b"[" * 100_000))
    monkeypatch.setattr(archive, "_BYTES_MAX", 10)
    with pytest.raises(ConfigurationError, match="expected at most 10000 files of 10 bytes"):
        read_archive(made("dlog-bundle/a.txt", bytes(11)))
    monkeypatch.setattr(archive, "_FILES_MAX", 2)
    with pytest.raises(ConfigurationError, match="expected at most 2 files"):
        read_archive(made("dlog-bundle/a.txt", b""))


def test_a_link_in_an_archive_leads_nowhere(tmp_path: Path) -> None:
    """Neither to a file, which many links could repeat beyond the bound, nor to none."""
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as written:
        for name, data in ((f"{MANIFEST}.json", b"{}"), ("a.txt", b"text")):
            member = tarfile.TarInfo(f"dlog-bundle/{name}")
            member.size = len(data)
            written.addfile(member, io.BytesIO(data))
        for name, kind, at in (
            ("b.txt", tarfile.LNKTYPE, "dlog-bundle/a.txt"),
            ("c.txt", tarfile.SYMTYPE, "a.txt"),
            ("d.txt", tarfile.LNKTYPE, "none"),
        ):
            link = tarfile.TarInfo(f"dlog-bundle/{name}")
            link.type, link.linkname = kind, at
            written.addfile(link)
    assert read_archive(path).texts == {"a.txt": "text", "b.txt": "", "c.txt": "", "d.txt": ""}
