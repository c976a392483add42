"""Makes a release: a commit with its version and date, checked, tagged; then the next one begins.

`make release VERSION=0.2.0`. Nothing is pushed: the commits and the tag are looked at first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## Not released yet"
_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


class NotReleasableError(Exception):
    """The checkout cannot become this release; the text says why."""


def version_of(pyproject: str) -> Version:
    """Return the version that a pyproject.toml states."""
    found = _VERSION.search(pyproject)
    if found is None:
        raise NotReleasableError('pyproject.toml states no `version = "…"`')
    return Version(found[1])


def with_version(pyproject: str, version: Version) -> str:
    """Return a pyproject.toml that states another version."""
    return _VERSION.sub(f'version = "{version}"', pyproject, count=1)


def next_version(version: Version) -> Version:
    """Return the version of what is developed after a release."""
    return Version(f"{version.major}.{version.minor + 1}.0.dev0")


def released(changelog: str, version: Version, day: str) -> str:
    """Return a changelog whose unreleased changes are those of a release.

    Raises:
        NotReleasableError: there are none.
    """
    before, heading, after = changelog.partition(f"{UNRELEASED}\n")
    if not heading or not after.split("\n## ")[0].strip():
        raise NotReleasableError(f"CHANGELOG.md has no change below `{UNRELEASED}`")
    return f"{before}## {version}, {day}\n{after}"


def begun(changelog: str) -> str:
    """Return a changelog with a place for the changes after the latest release."""
    before, heading, after = changelog.partition("\n## ")
    return f"{before}\n{UNRELEASED}\n{heading}{after}"


def wanted(text: str, current: Version) -> Version:
    """Return the version of a release that was asked for.

    Raises:
        NotReleasableError: it has not three numbers, or is below that which is developed.
    """
    try:
        version = Version(text)
    except InvalidVersion:
        version = None
    if version is None or str(version) != text or not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise NotReleasableError(f"VERSION={text}: a release has three numbers, such as 0.2.0")
    if version < current:
        raise NotReleasableError(f"VERSION={text}: {current} is developed here, which is later")
    return version


def release(root: Path, text: str, check: list[str], day: str) -> None:
    """Commit, check and tag a release, and begin the next one.

    Nothing is left of it where the check fails.

    Raises:
        NotReleasableError: something stands in the way.
    """
    if _git(root, "status", "--porcelain"):
        raise NotReleasableError("the checkout has changes that are not committed")
    pyproject, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    version = wanted(text, version_of(pyproject.read_text()))
    tag = f"v{version}"
    if _git(root, "tag", "--list", tag):
        raise NotReleasableError(f"the tag {tag} exists already")
    history = released(changelog.read_text(), version, day)
    changelog.write_text(history)
    pyproject.write_text(with_version(pyproject.read_text(), version))
    _git(root, "commit", "--all", "--message", f"Release {version}")
    # After the commit, because the check builds with the time of the latest commit, as users will.
    if subprocess.run(check, cwd=root, check=False).returncode:
        # Nothing else is lost: the tree was clean before.
        _git(root, "reset", "--hard", "HEAD^")
        raise NotReleasableError("its check failed; the commit was taken back")
    _git(root, "tag", "--annotate", "--message", f"dlog {version}", tag)
    changelog.write_text(begun(history))
    pyproject.write_text(with_version(pyproject.read_text(), next_version(version)))
    _git(root, "commit", "--all", "--message", f"Begin what comes after {version}")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Make a release of this checkout, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("version", help="three numbers, such as 0.2.0")
    parser.add_argument("--without-audit", action="store_true", help="ask for no known weaknesses")
    arguments = parser.parse_args()
    check = [sys.executable, "-m", "tools.release_check"]
    check += ["--without-audit"] if arguments.without_audit else []
    try:
        release(ROOT, arguments.version, check, datetime.now(UTC).date().isoformat())
    except NotReleasableError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"v{arguments.version} is tagged; git push --follow-tags publishes it\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
