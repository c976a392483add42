"""The archive of `dlog debug bundle`: its parts, and a manifest that says what is missing.

Texts that look like keys, tokens or passwords are cut out.  Nothing that goes into an archive is
read from a file of keys or tokens.  This is a second line: a log may hold a text of a client.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

CUT = "[cut out]"
_SECRETS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]*"),  # a JSON web token
    re.compile(r"(?<=://)[^/\s@:]+:[^/\s@]+(?=@)"),
    re.compile(r"(?<=\bbearer )[\w.~+/-]{8,}=*", re.I),
    re.compile(r"(?i)(?<=\bpassword[=:])\s*[^\s,;\"']+"),
    re.compile(r"(?i)(?<=\bsecret[=:])\s*[^\s,;\"']+"),
)


def redacted(text: str) -> str:
    """Return `text` without what looks like a secret."""
    for each in _SECRETS:
        text = each.sub(CUT, text)
    return text


def redacted_value(value: object) -> object:
    """Return a value of JSON whose texts have no such secrets."""
    match value:
        case str():
            return redacted(value)
        case Mapping():
            return {redacted(str(key)): redacted_value(each) for key, each in value.items()}
        case list() | tuple():
            return [redacted_value(each) for each in value]
        case _:
            return value


MANIFEST = "manifest"
_SUFFIX = ".json"
_FILES_MAX = 10_000
_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bundle:
    """The contents of an archive."""

    values: dict[str, Any] = field(default_factory=dict)
    """Parts that are objects, by name; one is `MANIFEST`."""
    texts: dict[str, str] = field(default_factory=dict)
    """Logs, stacks and metrics, by name."""


def write_archive(file: BinaryIO, bundle: Bundle, *, now_s: float) -> None:
    """Write an archive without anything that looks like a secret.

    Raises: OSError.
    """
    members = {
        **{
            name + _SUFFIX: json.dumps(redacted_value(value), indent=1)
            for name, value in bundle.values.items()
        },
        **{name: redacted(text) for name, text in bundle.texts.items()},
    }
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in members.items():
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"dlog-bundle/{name}")
            member.size, member.mtime, member.mode = len(data), int(now_s), 0o600
            archive.addfile(member, io.BytesIO(data))


def read_archive(path: Path) -> Bundle:
    """Return the contents of an archive; nothing is written.

    Raises:
        ConfigurationError: it is none, or it is too large.
    """
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    left = _BYTES_MAX
    try:
        with tarfile.open(path, "r:gz") as archive:
            for count, member in enumerate(archive):
                # Counted before it is unpacked: a MB of gzip may hold a GB.
                left -= member.size
                if left < 0 or count >= _FILES_MAX:
                    raise ConfigurationError(
                        f"{path}: expected at most {_FILES_MAX} files of {_BYTES_MAX} bytes in all"
                    )
                # A link has no size, and may name the largest file again and again.
                content = archive.extractfile(member) if member.isfile() else None
                text = content.read().decode(errors="replace") if content else ""
                name = member.name.partition("/")[2]
                if name.endswith(_SUFFIX):
                    values[name.removesuffix(_SUFFIX)] = json.loads(text)
                else:
                    texts[name] = text
    except (OSError, EOFError, tarfile.TarError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no archive of dlog debug bundle: {error}") from error
    if not isinstance(values.get(MANIFEST), dict):
        raise ConfigurationError(f"{path} is no archive of dlog debug bundle: it has no manifest")
    return Bundle(values, texts)
