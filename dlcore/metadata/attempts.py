"""A machine's transaction: the effect that stores it, and the attempts until it is stored.

A conflict means that nothing was stored and that another client was first.  Without an answer it
may have been stored.  Both mean: pause, look again, and plan by what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataConnectionError
from dlcore.base.steps import Pause
from dlcore.metadata.port import CONFLICTS, UNANSWERED

if TYPE_CHECKING:
    from dlcore.base.errors import DLError
    from dlcore.metadata.port import Op

ATTEMPTS_MAX = 100
_DELAY_S_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Store:
    """Effect: apply these in one transaction; answer with `STORED`, or with `CallFailed`."""

    ops: tuple[Op, ...]


class Attempts:
    """The attempts of one transaction.

    Args:
        subject: the job that the transaction belongs to, for the error of the last attempt.
        goal: the end of the sentence that begins with the number of attempts.
    """

    __slots__ = ("_goal", "_subject", "count")

    def __init__(self, subject: str, goal: str) -> None:
        self._subject = subject
        self._goal = goal
        self.count = 0
        """How many failed since `begin`."""

    def begin(self) -> None:
        """Count from here: another transaction comes."""
        self.count = 0

    def failed(self, error: DLError) -> Pause:
        """Note that an attempt failed; return the pause before the next one.

        Raises:
            DLError: `error`, if it is neither a conflict nor a missing answer.
            MetadataConnectionError: that was the last attempt.
        """
        if not isinstance(error, (*CONFLICTS, *UNANSWERED)):
            raise error
        self.count += 1
        if self.count == ATTEMPTS_MAX:
            raise MetadataConnectionError(
                f"{self._subject}: {ATTEMPTS_MAX} attempts {self._goal} were overtaken or not "
                "answered"
            )
        return Pause(_DELAY_S_MAX, error)
