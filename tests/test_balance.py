"""Tests of extras/balance.py. That it changes no gradient is among the cases of tests/parity.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extras import balance
from extras.balance import CLOSE, moves
from tests.conftest import Config, make_trainer, random_model, some_samples
from train import Trainer


def test_moves_by_hand():
    # The fullest has 60 more than the emptiest: a sample of about 30 goes there.
    assert moves([100, 40, 70], [[50, 30, 20], [40], [70]]) == [(0, 1, 1)]
    # Nothing helps: the only sample that may leave is as long as the gap.
    assert moves([100, 50], [[50], [50]]) == []
    assert moves([0, 0], [[], []]) == [] and moves([10], [[10]]) == []
    # Some tokens cannot leave.
    assert moves([100, 0], [[], []]) == []


lengths = st.lists(st.lists(st.integers(1, 4000), max_size=12), min_size=1, max_size=8)


@given(lengths, st.integers(0, 5000))
@settings(deadline=None)
def test_moves_never_make_it_worse_and_stop_only_for_a_reason(movable, fixed):
    loads = [sum(own) + fixed * (i == 0) for i, own in enumerate(movable)]
    planned = moves(loads, movable)
    assert len({(source, index) for source, index, _ in planned}) == len(planned)  # each sample moves once
    after = list(loads)
    for source, index, target in planned:
        after[source] -= movable[source][index]
        after[target] += movable[source][index]
    assert sum(after) == sum(loads) and max(after) <= max(loads) and min(after) >= min(loads)
    gap = max(after) - min(after)
    fullest = after.index(max(after))
    gone = {index for source, index, _ in planned if source == fullest}
    left = [length for i, length in enumerate(movable[fullest]) if i not in gone]
    assert gap * len(loads) < CLOSE * sum(loads) or all(length >= gap for length in left)


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
