"""Tests of extras/balance.py. That it changes no gradient is among the cases of tests/parity.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extras import balance
from extras.balance import CLOSE, moves
from tests.conftest import Config, make_trainer, random_model, some_samples
from train import Trainer


def alone(lengths: list[int]) -> list[tuple[int, list[int]]]:
    """Groups of one sample each, which share nothing."""
    return [(0, [length]) for length in lengths]


def test_moves_by_hand():
    # The fullest has 60 more than the emptiest: a sample of about 30 goes there.
    assert moves([100, 40, 70], [alone([50, 30, 20]), alone([40]), alone([70])]) == [(0, 1, 1, 1)]
    # Nothing helps: the only sample that may leave is as long as the gap.
    assert moves([100, 50], [alone([50]), alone([50])]) == []
    assert moves([0, 0], [[], []]) == [] and moves([10], [alone([10])]) == []
    # Some tokens cannot leave.
    assert moves([100, 0], [[], []]) == []
    # One of four samples takes a copy of the prompt along: 100 and 20 become 80 and 60.
    assert moves([100, 20], [[(20, [20, 20, 20, 20])], []]) == [(0, 0, 1, 1)]
    # Halves of a group whose prompt is most of it would not be faster; the whole of a smaller one is.
    assert moves([110, 10], [[(100, [5, 5])], []]) == []
    assert moves([110, 10], [[(30, [5, 5]), (65, [5])], []]) == [(0, 0, 2, 1)]


sizes = st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 4000), min_size=1, max_size=6))


@given(st.lists(st.lists(sizes, max_size=8), min_size=1, max_size=8), st.integers(0, 5000))
@settings(deadline=None)
def test_moves_never_make_it_worse(groups, fixed):
    loads = [sum(shared + sum(rests) for shared, rests in own) for own in groups]
    loads[0] += fixed
    after = list(loads)
    left = [[(shared, list(rests)) for shared, rests in own] for own in groups]
    for source, group, n, target in moves(loads, groups):
        shared, rests = left[source][group]
        fullest = after[source]
        assert fullest == max(after) and 1 <= n <= len(rests)
        moved = sum(rests[:n])
        after[source] -= moved + shared * (n == len(rests))
        after[target] += moved + shared
        del rests[:n]
        assert max(after[source], after[target]) < fullest
    assert max(after) <= max(loads)
    ideal = max(after) <= (1 + len(loads) * CLOSE) * sum(loads) / len(loads)
    assert ideal or moves(after, [[one for one in own if one[1]] for own in left]) == []


def test_samples_move_between_the_ranks_of_a_machine(inputs, compared):
    record = torch.load(compared / "qwen3-tied-all terms-4-(2, 1, 60, True).pt")
    own = {sample.key for sample in some_samples() if sample.key[0] < 4}  # those of rank 0 before
    assert set(record["keys"]) < own and len(set(record["keys"])) == len(record["keys"]) < len(own)


def test_a_rank_without_neighbors_keeps_its_samples(mesh, tmp_path, monkeypatch):
    config = Config(model=str(random_model(tmp_path)), group_size=2, device="cpu", dtype="float32")
    trainer = make_trainer(config, mesh, balance.extend(Trainer))
    (batch,) = trainer.micro_batches(some_samples())
    assert trainer.neighbors is None and len(batch.samples) == 12


def test_what_leaves_a_process_has_no_row():
    sample = some_samples()[0]
    sample.state["connection"] = lambda: None  # cannot be pickled
    other = balance.without_row(sample)
    assert (other.messages, other.row, other.state) == ([], {}, {}) and sample.row and sample.state
    assert other.tokens is sample.tokens and other.key == sample.key


def test_a_recipe_may_decline():
    assert balance.extend(Trainer).balanced
    assert not balance.extend(type("Recipe", (Trainer,), {"balanced": False})).balanced


def test_machines_with_different_numbers_of_processes_share_nothing(compared):
    assert [(compared / f"uneven-{rank}").read_text() for rank in range(4)] == ["None"] * 4
