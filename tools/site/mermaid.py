"""Mermaid, which draws the diagrams, as a file of the site, so that no other server is asked.

Without it the generator's pages would load it from a network of servers.  The file is that of npm's
mermaid 11.16.0 (dist/mermaid.min.js), byte for byte, which the wheel of a package on PyPI carries:
pip, which made the environment, brings it too.  Nothing of that package is run; its digest is
checked.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "mermaidx==0.10.1"
_MEMBER = "mermaidx/assets/mermaid.js"
_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"


def bring(target: Path) -> None:
    """Write the file, unless it is there.

    Raises:
        CalledProcessError: pip cannot download the wheel.
        ValueError: the file is another one.
    """
    if target.exists() and _digest(target.read_bytes()) == _SHA256:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as members:
            content = members.read(_MEMBER)
    if _digest(content) != _SHA256:
        raise ValueError(f"{_MEMBER} of {WHEEL} has the SHA-256 {_digest(content)}, not {_SHA256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
