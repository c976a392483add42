"""A small Debian of another release, whose Python and Java are other ones than this machine's.

Each is made once, by debootstrap, in `.debian` of the checkout.  A program runs in it in namespaces
of its own: what it mounts and starts is gone when it ends.  It runs as an ordinary user in a fresh
clone of what is committed, as a new user of that release would.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".debian"
_USER = "someone"
_HOME = f"/home/{_USER}"
_PACKAGES = "ca-certificates,curl,git,iproute2,make,openssl,procps,python3,python3-venv"
_PASSED_ON = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_INDEX_URL", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
)
"""Variables that say how packages are reached from here."""
_ENTER = """
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
pivot_root . .
umount --lazy .
shift
user=$1
shift
cd "/home/$user/dlog"
exec setpriv --reuid "$user" --regid "$user" --init-groups --inh-caps=-all "$@"
"""


class Release(NamedTuple):
    """A release of Debian, and what it is made for."""

    name: str
    python: str
    """The version of its `python3`."""
    java: str


RELEASES = (
    Release("bookworm", "3.11", "17"),
    Release("trixie", "3.13", "21"),
    Release("testing", "3.14", "25"),
)


def why_not() -> str | None:
    """Return what a root of Debian lacks here; None if it can be made."""
    if os.geteuid() != 0:
        return "only root can make a Debian to run in"
    missing = [name for name in ("debootstrap", "pivot_root", "unshare") if not shutil.which(name)]
    return f"{' and '.join(missing)} is not installed" if missing else None


def make(release: Release) -> Path:
    """Return the folder of a release, which is made first if it is not there.

    Raises:
        subprocess.CalledProcessError: debootstrap or one of the commands after it failed; what they
            say is on the standard error.
    """
    made = FOLDER / release.name
    if made.exists():
        return made
    FOLDER.mkdir(exist_ok=True)
    partial = made.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    packages = f"{_PACKAGES},openjdk-{release.java}-jre-headless"
    _run(["debootstrap", "--variant=minbase", f"--include={packages}", release.name, str(partial)])
    _run(["chroot", str(partial), "useradd", "--create-home", "--user-group", _USER])
    # A network that inspects connections has a certificate of its own, which is trusted here.
    for name in ("etc/ssl/certs/ca-certificates.crt", "etc/hosts", "etc/resolv.conf"):
        source, target = Path("/") / name, partial / name
        if source.exists():
            target.unlink(missing_ok=True)
            shutil.copyfile(source, target)
    partial.rename(made)
    return made


def clone_into(folder: Path) -> None:
    """Lay a fresh clone into the home of the user there; keep the environments of an older one."""
    clone = folder / _HOME.lstrip("/") / "dlog"
    if clone.exists():
        _git("-C", str(clone), "fetch", "--quiet", str(ROOT), "HEAD")
        _git("-C", str(clone), "reset", "--quiet", "--hard", "FETCH_HEAD")
    else:
        _git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
    _run(["chroot", str(folder), "chown", "--recursive", f"{_USER}:{_USER}", f"{_HOME}/dlog"])


def command_in(folder: Path, command: Sequence[str]) -> list[str]:
    """Return what runs a command in the clone there, as its user."""
    variables = {
        "HOME": _HOME,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("sh", "-euc", _ENTER, "sh", str(folder), _USER),
        *("env", "--ignore-environment", *(f"{key}={value}" for key, value in variables.items())),
        *command,
    ]


def _git(*arguments: str) -> None:
    # The clone belongs to its user, and git refuses another user's repository otherwise.
    _run(["git", "-c", "safe.directory=*", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
