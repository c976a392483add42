"""`dlog log redact` in cases that tests/integration/test_redact.py does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from dlcore.base.access.audit_file import AuditFile
from dlcore.base.errors import LogNotReadyError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.shell import Shell


def test_a_receipt_that_the_audit_log_cannot_take_is_shown(
    shell: Shell, log: str, tmp_path: Path
) -> None:
    """Goal: the rows are gone by then, and only the receipt has the salt."""
    typed = f"{log}/typed"
    shell.text("log", "create", typed, "--schema", "person int64", "--replication-factor", "3")
    rows = tmp_path / "rows"
    rows.write_text('{"person": 1}\n{"person": 2}\n', encoding="utf-8")
    shell.text("log", "write", typed, "--file", str(rows))
    full = LogNotReadyError("the audit log cannot be written (No space left on device)")
    with patch.object(AuditFile, "require_writable", side_effect=full):
        exit_code, out, err = shell.outcome(
            *("log", "redact", typed, "--where", "person = 2", "--yes"),
            *("--audit-file", str(tmp_path / "audit"), "--patience-s", "1"),
        )
    assert exit_code == 1
    receipt = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert receipt.get("rows") == "1", out + err
    assert len(receipt["salt"]) == 32
    assert "the audit log cannot be written" in err
