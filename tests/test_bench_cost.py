"""Tests of bench/cost.py: how it books time, and how it counts waiting."""

from collections import Counter
from types import SimpleNamespace

import pytest

from bench import cost


def test_time_is_booked_to_the_innermost_part(monkeypatch):
    clock = cost.Clock()
    now = [0.0]
    monkeypatch.setattr(clock, "read", lambda: (now[0], now[0] / 2))

    def wait(seconds):
        now[0] += seconds

    step = SimpleNamespace(inner=wait)
    clock.attach(step, "inner", "inner")
    with clock.part("outer"):
        wait(1)
        step.inner(2)
        wait(4)
    wait(8)  # outside of every part
    assert dict(clock.wall) == {"outer": 5.0, "inner": 2.0}
    assert dict(clock.cpu) == {"outer": 2.5, "inner": 1.0}
    parts = {"model": 3.0, "push": 1.0, "log": 4.0}
    around = {"push": 1.0, "log": 4.0, "all of these": 5.0, "step": 8.0}
    assert cost.totals(Counter(parts)) == around


@pytest.mark.parametrize(
    "lengths, share",
    [
        ([[10], [10]], 0.0),
        ([[10], [5]], 0.25),  # one rank waits for half of the pass
        ([[8000, 8000], [8000]], 0.25),  # two passes, and nothing to do in the second one
        ([[100, 100], [50, 30]], 0.3),
    ],
)
def test_ranks_wait_for_the_fullest_one(lengths, share):
    ranks = [[SimpleNamespace(tokens=range(length)) for length in one] for one in lengths]
    assert cost.waiting_share(ranks) == pytest.approx(share)


def test_balancing_keeps_every_sample():
    ranks = [[SimpleNamespace(tokens=range(length)) for length in one] for one in ([9, 8, 7], [1], [2])]
    after = cost.balanced(ranks)
    assert sorted(len(one.tokens) for rank in after for one in rank) == [1, 2, 7, 8, 9]
    assert [sum(len(one.tokens) for one in rank) for rank in after] == [9, 9, 9]
    assert [len(rank) for rank in ranks] == [3, 1, 1]
