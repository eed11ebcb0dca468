"""Tests of extras/dither.py: rounded, nothing changes; and small updates are right on average."""

import pytest
import torch

from extras import dither
from tests.conftest import Config, make_trainer, random_model
from train import Trainer


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_rounded_weights_stay_what_they_were_and_others_stay():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16  # of every bf16 number
    numbers = bits.view(torch.float32)
    numbers = numbers[numbers.isfinite()]
    weight = numbers.clone()
    dither.dither(weight, generator())
    assert torch.equal(weight.bfloat16().float(), numbers)
    assert (weight != numbers)[numbers != 0].float().mean() > 0.999
    assert torch.equal(weight[numbers == 0], numbers[numbers == 0])
    before = weight.clone()  # most are no bf16 numbers now
    dither.dither(weight, generator())
    stays = before.bfloat16().float() != before
    assert torch.equal(weight[stays], before[stays]) and stays.float().mean() > 0.99


def bf16_weights() -> torch.Tensor:
    weights = torch.randn(10**6, generator=generator()).mul(0.02).bfloat16()
    return weights[weights.abs() > 0.01]


def test_a_small_update_changes_rounded_weights_by_its_size_on_average():
    before = bf16_weights().float()
    assert torch.equal((before + 1e-6).bfloat16().float(), before)  # without dither it is lost
    weight = before.clone()
    dither.dither(weight, generator())
    change = (weight + 1e-6).bfloat16().float() - before
    assert 0.005 < (change != 0).float().mean() < 0.03
    assert change.double().mean() == pytest.approx(1e-6, rel=0.05)


@pytest.mark.parametrize(
    "flags, moves", [({}, True), ({"dither": False}, False), ({"dtype": "float32"}, False)]
)
def test_the_actor_starts_dithered(mesh, tmp_path, flags, moves):
    folder = random_model(tmp_path)
    made = make_trainer(Config(**{"model": str(folder), "device": "cpu", "dtype": "bfloat16"} | flags), mesh)
    weights = made.actor.parameters
    for weight in weights.values():
        weight.data.copy_(weight.data.bfloat16())
    before = {name: weight.full_tensor().clone() for name, weight in weights.items()}

    class Made(Trainer):
        def __init__(self, config):
            vars(self).update(vars(made))

    dither.extend(Made)(made.config)
    for name, weight in weights.items():
        now = weight.full_tensor()
        assert torch.equal(now.bfloat16(), before[name].bfloat16())
        assert torch.equal(now, before[name]) != (moves and before[name].any()), name


def test_copies_of_a_part_stay_equal_and_parts_differ(compared):
    everyones = torch.load(compared / "dithered.pt", weights_only=False)
    for name in everyones[0]:
        parts = {}
        for rank in everyones:
            place, values = rank[name]
            assert torch.equal(parts.setdefault(tuple(place), values), values), name
        shifts = {tuple((values.view(torch.int32) & 0xFFFF).flatten().tolist()) for values in parts.values()}
        assert len(shifts) == len(parts) == (1 if "norm" in name or "o_proj.bias" in name else 2), name


@pytest.mark.parametrize("name, moved", [("layer.lora_A", True), ("", False)])
def test_small_adapters_reach_the_engine(name, moved):
    weight = bf16_weights()
    merged = [weight.clone() for _ in range(3)]
    for other, update in zip(merged, (0.0, 1e-6, 1e-6)):
        dither.add(other, torch.full(weight.shape, update), name)
    assert torch.equal(merged[0], weight)  # adapters that add nothing
    assert torch.equal(merged[1], merged[2])  # every push has the same places
    change = (merged[1].double() - weight.double()).mean()
    assert change == (pytest.approx(1e-6, rel=0.05) if moved else 0)
