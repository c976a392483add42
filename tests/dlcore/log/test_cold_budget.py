"""The budget of reads of cold objects: no I/O."""

from __future__ import annotations

import random

from dlcore.log.cold.budget import Part, ReadBudget
from tests.fixtures.lengths import for_each


def budget(reads_at_once: int = 3, bytes_max: int = 100) -> ReadBudget:
    """Return a budget."""
    return ReadBudget(reads_at_once=reads_at_once, bytes_max=bytes_max)


def parts(*sizes: int, reader: object = "a") -> list[Part]:
    """Return parts of a reader."""
    return [Part(reader, size) for size in sizes]


def test_wanted_parts_wait_in_turn_for_slots() -> None:
    """A slot is free when a part was read, its bytes when it was given out."""
    at = budget()
    a, b, c, d, e = parts(1, 1, 1, 1, 1)
    assert at.want(a) == [a]
    assert at.want(b) == [b]
    assert at.want(c) == [c]
    assert at.want(d) == []
    assert at.want(e) == []
    assert at.read(b) == [d]
    assert at.give_back(a) == [e]
    assert at.read(b) == []
    at.validate()


def test_wanted_parts_wait_in_turn_for_bytes() -> None:
    """A small one does not pass a large one; a large one is read alone."""
    at = budget()
    a, large, small = parts(60, 150, 1)
    assert at.want(a) == [a]
    assert at.want(large) == []
    assert at.want(small) == []
    assert at.read(a) == []
    assert at.give_back(a) == [large]
    assert at.give_back(large) == [small]
    at.validate()


def test_a_part_that_fits_exactly() -> None:
    """All bytes may be used."""
    at = budget()
    a, b, c = parts(60, 40, 1)
    assert at.want(a) == [a]
    assert at.want(b) == [b]
    assert at.want(c) == []


def test_one_that_waits_and_is_given_up() -> None:
    """Its reader left; those behind it move up."""
    at = budget(1)
    a, b, c = parts(1, 1, 1)
    at.want(a)
    at.want(b)
    at.want(c)
    assert at.give_back(b) == []
    assert at.give_back(a) == [c]
    assert at.give_back(c) == []
    at.validate()


def test_the_read_ahead_leaves_a_slot_and_bytes() -> None:
    """A wanted one is read at once, beside a reader that takes nothing."""
    at = budget(3, 400)
    a, b, c = parts(10, 10, 10)
    assert at.ahead(a)
    assert at.ahead(b)
    assert not at.ahead(c)  # one slot is left
    at.read(a)
    assert at.ahead(c)
    d, e = parts(10, 399, reader="b")
    assert at.want(d) == [d]
    at.read(d)
    at.give_back(d)
    assert at.want(e) == [e]  # alone among those that are wanted
    at.validate()


def test_a_reader_has_at_most_as_much_ahead_as_it_leaves() -> None:
    """The first has half of 300 bytes, and the next one half of the rest."""
    at = budget(100, 400)
    first, second = parts(*[10] * 40), parts(*[10] * 40, reader="b")
    assert sum(map(at.ahead, first)) == 15
    assert sum(map(at.ahead, second)) == 7
    at.validate()
    assert at.give_back(first[0]) == []
    assert not at.ahead(first[39])  # it still has more than is left
    for part in (*first, *second):
        at.give_back(part)
    assert at.ahead(Part("c", 150))
    assert not at.ahead(Part("d", 151))


def test_nothing_is_read_ahead_of_one_that_waits_or_beyond_the_bytes() -> None:
    """It would take longer still."""
    at = budget(3, 100)
    wanted, *more = parts(90, 20, 1)
    at.want(wanted)
    assert not at.ahead(Part("b", 11))
    assert at.ahead(Part("b", 10))
    at.read(wanted)
    assert at.want(more[0]) == []
    assert not at.ahead(Part("b", 0))
    assert not budget(1).ahead(Part("b", 1))


@for_each(range(20))
def test_all_that_is_wanted_is_read_while_some_readers_stand_still(seed: int) -> None:
    """Readers that never take what lies ahead cannot hold up others."""
    rng = random.Random(seed)
    at = budget(rng.randint(1, 4), 100)
    for number in range(10):
        if at.ahead(part := Part(f"still-{number}", rng.randint(1, 60))):
            at.read(part)
    waiting = [Part(number, rng.randint(1, 200)) for number in range(50)]
    order, running = [], []
    for part in waiting:
        running += at.want(part)
        at.validate()
    while running:
        part = running.pop(rng.randrange(len(running)))
        order.append(part)
        more = at.read(part)
        running += [*more, *at.give_back(part)]
        at.validate()
    assert len(order) == 50
