import random
from itertools import islice

from agent.link import FIRST_DELAY, LONGEST_DELAY, delays


def test_delays_grow_to_a_bound_and_are_spread() -> None:
    waits = list(islice(delays(random.Random(1)), 12))
    others = list(islice(delays(random.Random(2)), 12))

    assert FIRST_DELAY / 2 <= waits[0] <= FIRST_DELAY
    assert all(LONGEST_DELAY / 2 <= wait <= LONGEST_DELAY for wait in waits[6:])
    assert waits != others
