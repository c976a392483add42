"""Keeps Python's garbage collector from stopping a bookie that holds millions of objects.

A full collection looks at every object that may be in a cycle, and nothing else runs meanwhile.
What a bookie holds for long (states of ledgers, indexes) is in no cycle and is freed by its count
of references.  So what survived a full collection, and then has no garbage in it, is frozen: the
next one looks at what is newer.

A frozen object that becomes part of a cycle of garbage later is never freed.  Therefore nothing is
frozen until the survivors are many: then nearly all of them are there to stay, and what could ever
be lost is a small share of what is held.
"""

from __future__ import annotations

import gc

SURVIVORS_MIN = 20_000
"""Looked at in some milliseconds."""
_OLDEST = 2


def install() -> None:
    """Freeze what there is now, and from now on what survives in numbers."""
    gc.collect()
    gc.freeze()
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    is_full = phase == "stop" and info["generation"] == _OLDEST
    if is_full and len(gc.get_objects(generation=_OLDEST)) >= SURVIVORS_MIN:
        gc.freeze()
