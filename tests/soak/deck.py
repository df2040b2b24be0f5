"""Chance that leaves nothing out: every card once in shuffled order, and from then on drawn by weight.

The more often a card has come, the less likely it comes again, so that a short run too sees all of them several times
while no order can be foreseen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping


class Deck:
    def __init__(self, weights: Mapping[str, int], chance: random.Random) -> None:
        self._weights, self._chance = dict(weights), chance
        self._round = list(self._weights)
        chance.shuffle(self._round)
        self.drawn: Counter[str] = Counter()

    def draw(self) -> str:
        if self._round:
            name = self._round.pop()
        else:
            shares = [weight / (1 + self.drawn[card]) ** 2 for card, weight in self._weights.items()]
            name = self._chance.choices(list(self._weights), shares)[0]
        self.drawn[name] += 1
        return name
