"""A client that reads a log again and again until it is killed: `cold_reader URI LOG`."""

from __future__ import annotations

import sys

from dlcore.sync import open_namespace


def main(uri: str, log: str) -> None:
    """Read for ever; say when the first records are there."""
    with open_namespace(uri) as namespace:
        is_begun = False
        while True:
            for _ in namespace.open_log(log).read():
                if not is_begun:
                    print("reading", flush=True)
                    is_begun = True


if __name__ == "__main__":
    main(*sys.argv[1:])
