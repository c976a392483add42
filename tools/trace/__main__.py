"""Prints the ways of a record and the counts of the classes, each beside its aim.

`python -m tools.trace [--records N]`.  Nothing is judged: the figures say how far it is to the aim.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tools.trace.counts import count
from tools.trace.passage import trace_in_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.trace.counts import Figure
    from tools.trace.passage import Passage

ROOMS_AIM = {"client": 8, "bookie": 5}
MODULES_AIM = {"client": 14, "bookie": 10}


def main() -> None:
    """Trace, count and print."""
    parser = argparse.ArgumentParser(prog="make trace", description=__doc__)
    parser.add_argument("--records", type=int, default=25, help="records that are counted")
    records = parser.parse_args().records
    for passage in trace_in_temporary_folder(records):
        sys.stdout.writelines(f"{line}\n" for line in lines_of(passage))
    for figure in count():
        sys.stdout.writelines(f"{line}\n" for line in lines_of_figure(figure))


def lines_of(passage: Passage) -> Iterator[str]:
    """Yield a headline for each side, then a line for each room with its modules and calls."""
    for side, calls in (("client", passage.client), ("bookie", passage.bookie)):
        # The modules of dlcore that a bookie uses are clients' modules, such as the wire.
        counted = [each for each in calls if side == "client" or each.startswith("bookie.")]
        rooms = {_room(each) for each in counted}
        yield (
            f"{passage.name}, {side}: {len(rooms)} rooms (aim {ROOMS_AIM[side]}), "
            f"{len(counted)} modules (aim {MODULES_AIM[side]}), {sum(calls.values())} calls"
        )
        for room in dict.fromkeys(map(_room, calls)):
            modules = (
                f"{module.removeprefix(f'{room}.')} {number}"
                for module, number in calls.items()
                if _room(module) == room
            )
            beside = "" if room in rooms else "  (of dlcore: not counted)"
            yield f"    {room:24} {', '.join(modules)}{beside}"


def _room(module: str) -> str:
    return module.rpartition(".")[0]


def lines_of_figure(figure: Figure) -> Iterator[str]:
    """Yield the figure beside its aim, then what it counted."""
    yield f"{figure.name}: {figure.value:,} (aim {figure.aim:,})"
    for part in figure.parts:
        yield f"    {part}"


if __name__ == "__main__":
    main()
