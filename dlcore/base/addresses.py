"""Whether a text can be the address of a server, before anything is looked up."""

from __future__ import annotations

import re


def is_address(host: str, port: str) -> bool:
    """Return whether a host, perhaps in brackets, and a port can be looked up at all.

    For others Python's look-up raises errors that are no OSError, so callers do not expect them.
    """
    try:
        host.strip("[]").encode("idna")
    except UnicodeError:
        return False
    is_port = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) < 2**16
    return is_port and bool(host) and host.isprintable()
