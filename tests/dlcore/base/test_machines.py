"""The table of a machine's transitions, its diagram, and what the machine asserts by it."""

from __future__ import annotations

import pytest

from dlcore.base.machines import Machine, State, Transitions
from tests.fixtures.machines_page import diagram


class Door(State):
    """The states of a door."""

    OPEN = "one can go through"
    SHUT = "one cannot"
    BROKEN = "for ever"


TRANSITIONS = Transitions(
    Door.OPEN,
    {
        Door.OPEN: {Door.SHUT: "pushed"},
        Door.SHUT: {Door.OPEN: "pulled", Door.BROKEN: "kicked"},
        Door.BROKEN: {},
    },
)


class Doorman(Machine[Door]):
    """Changes the state as it is asked to."""

    transitions = TRANSITIONS

    def __init__(self) -> None:
        self.state = Door.OPEN

    def become(self, state: Door) -> None:
        """Change the state."""
        self._become(state)


def test_the_diagram_has_each_transition_with_its_cause() -> None:
    """In the order of the table, from the state in which the machine begins."""
    assert diagram(TRANSITIONS).splitlines() == [
        "stateDiagram-v2",
        "  [*] --> OPEN",
        "  OPEN --> SHUT: pushed",
        "  SHUT --> OPEN: pulled",
        "  SHUT --> BROKEN: kicked",
    ]


def test_a_machine_changes_its_state_as_the_table_says() -> None:
    """Any other change is a defect of the machine."""
    doorman = Doorman()
    doorman.become(Door.SHUT)
    doorman.become(Door.BROKEN)
    assert doorman.state is Door.BROKEN
    with pytest.raises(AssertionError):
        doorman.become(Door.OPEN)
