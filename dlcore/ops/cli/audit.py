"""`dlog audit`: the audit logs of proxies."""

from __future__ import annotations

from pathlib import Path

import click

from dlcore.base.access.audit import BEGINNING, verify
from dlcore.base.errors import ConfigurationError
from dlcore.ops.cli.context import common_options
from dlcore.ops.cli.output import show_done


@click.group("audit")
@common_options
def audit_group() -> None:
    """Check the audit logs that proxies write.

    Proxies write one if they have an audit_file (docs/configuration.md).
    """


@audit_group.command("verify", epilog="Example: dlog audit verify audit.jsonl.2026* audit.jsonl")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--after",
    metavar="DIGEST",
    default=BEGINNING,
    help="Digest of the line before the first one; default: the log begins in the first file.",
)
@click.option("--expect", metavar="DIGEST", help="Fail unless the last line has this digest.")
@common_options
def verify_files(files: tuple[str, ...], after: str, expect: str | None) -> None:
    """Find a line of FILES that was altered, removed or moved.

    The oldest file is the first.  The answer has the digest of the last line.  Kept elsewhere and
    given as --expect later with the same files, or as --after with newer ones, it also shows that
    nothing at the end is missing.
    """
    digest, total = after, 0
    for name in files:
        try:
            with Path(name).open("rb") as lines:
                count, digest = verify(lines, digest=digest)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from error
        total += count
    if expect not in (None, digest):
        raise ConfigurationError(f"{files[-1]}: its last line has digest {digest}, not {expect}")
    show_done(f"{total} lines, the last one {digest}", {"lines": total, "digest": digest})
