"""The parts of the soak that its promise rests on, without the hours."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.soak.deck import Deck
from tests.soak.flap import link_down

WEIGHTS = {"kill": 6, "freeze": 3, "node": 2, "controller": 3, "store": 2, "shim": 1, "agent": 2, "twice": 4}


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_draw_every_fault_several_times(seed: int) -> None:
    """The first round has every card once, and forty draws (ten minutes of faults) have each at least twice."""
    deck = Deck(WEIGHTS, random.Random(seed))
    first = [deck.draw() for _ in WEIGHTS]
    assert sorted(first) == sorted(WEIGHTS)
    drawn = Counter(first + [deck.draw() for _ in range(40 - len(WEIGHTS))])
    assert min(drawn[name] for name in WEIGHTS) >= 2, drawn
    assert drawn == deck.drawn


def test_one_seed_is_one_order() -> None:
    """A soak can be repeated: the seed alone decides, and another seed decides otherwise."""

    def order(seed: int) -> list[str]:
        deck = Deck(WEIGHTS, random.Random(seed))
        return [deck.draw() for _ in range(50)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_the_link_comes_back_whatever_happens() -> None:
    """An error (or Ctrl-C) during a flap must not leave the rest of the soak without a network."""
    asked: list[bool] = []

    def set_to(*, up: bool) -> None:
        asked.append(up)

    with pytest.raises(KeyboardInterrupt), link_down(set_to):
        raise KeyboardInterrupt
    assert asked == [False, True]
