"""Tests of extras/offload.py and extras/compile.py: neither changes what is computed."""

from types import SimpleNamespace

import pytest
import torch

import train
from extras import compile as compile_file
from extras import offload
from tests.conftest import Config, make_trainer, random_model, some_samples


def adam_devices(actor) -> set[str]:
    return {str(value.device) for state in actor.optimizer.state.values() for value in state.values()}


def test_a_moved_actor_goes_on_learning(mesh, tmp_path, monkeypatch):
    folder = str(random_model(tmp_path))
    config = Config(model=folder, group_size=2, warmup_steps=0, lr=0.01, device="cpu", dtype="float32")
    moved = make_trainer(config, mesh)
    still = make_trainer(config, mesh)
    # Without a GPU to move to, a copy of every tensor: what the parameters hold is new, as after a move.
    monkeypatch.setattr(moved.actor.model, "to", lambda device: moved.actor.model._apply(torch.clone))
    for _ in range(3):
        for trainer in (moved, still):
            trainer.actor.model.to("cpu")
            offload.move_optimizer(trainer.actor.optimizer, "cpu")
            batches = trainer.micro_batches(some_samples())
            trainer.actor.backward(batches, trainer.forward)
            trainer.actor.optimizer_step()
    assert adam_devices(moved.actor) == {"cpu"}
    for name, value in still.actor.parameters.items():
        assert torch.equal(moved.actor.parameters[name].full_tensor(), value.full_tensor()), name


class FakeTrainer:
    """Notes what happens, and where everything is."""

    def __init__(self, config):
        self.config = config
        self.events = []
        self.actor = FakeActor(self.events)
        self.reference = FakeModel("reference", self.events)

    def sample(self, *arguments):
        self.events.append("sample")

    def step(self):
        self.sample()
        raise KeyboardInterrupt

    def learn(self, samples):
        self.events.append("learn")
        return {}

    def publish(self):
        self.events.append("push")

    def evaluate(self):
        self.sample()
        return {}


class FakeModel:
    def __init__(self, name, events):
        self.to = lambda device: events.append(f"{name} to {device}")


class FakeActor:
    def __init__(self, events):
        self.model = FakeModel("actor", events)
        moment = SimpleNamespace(to=lambda device: events.append(f"Adam to {device}") or moment)
        self.optimizer = SimpleNamespace(state={"parameter": {"moment": moment}})


@pytest.fixture
def make_fake(monkeypatch):
    """A function that makes a trainer with --offload on or off."""
    monkeypatch.setattr(offload, "Actor", FakeActor)
    monkeypatch.setattr(offload, "FSDPModule", FakeModel)
    return lambda is_on: offload.extend(FakeTrainer)(Config(offload=is_on, device="cuda"))


@pytest.mark.parametrize("is_on", [True, False])
def test_the_actor_and_the_engine_take_turns(make_fake, is_on):
    in_memory = ["Adam to cpu", "reference to cpu", "actor to cpu"]
    back = ["actor to cuda", "Adam to cuda", "reference to cuda"]
    order = ["actor to cuda", "push", *in_memory, "sample", *back, "learn", "Adam to cpu", "reference to cpu"]
    order += ["actor to cuda", "push", *in_memory, "sample", "actor to cuda"]
    trainer = make_fake(is_on)
    trainer.publish()
    trainer.sample()
    trainer.learn([])
    trainer.publish()
    trainer.evaluate()
    assert trainer.events == [event for event in order if is_on or " to " not in event]


def test_the_actor_is_back_after_a_rollout_that_a_signal_ends(make_fake):
    trainer = make_fake(True)
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert trainer.events[-2:] == ["sample", "actor to cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("kind, recompute", [("qwen2", False), ("qwen2", True), ("qwen3_5", True)])
def test_compiled_layers_compute_the_same(mesh, tmp_path, monkeypatch, kind, recompute):
    plain_compile = torch.nn.Module.compile

    def graphs_only(module, **options):  # without minutes of making kernels of them
        assert options == {"dynamic": True}
        plain_compile(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", graphs_only)
    folder = str(random_model(tmp_path, kind))
    config = Config(model=folder, device="cpu", dtype="float32", gradient_checkpointing=recompute)
    plain = make_trainer(config, mesh)
    compiled = make_trainer(config, mesh)
    compile_file.compile_layers(compiled.actor.model)
    for samples in (some_samples(), some_samples(3)):  # other lengths, the same code
        batch = train.Batch(samples, "cpu")
        expected, _ = plain.actor.model.logprobs(batch)
        found, _ = compiled.actor.model.logprobs(batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        expected.sum().backward()
        found.sum().backward()
    for name, one in plain.actor.parameters.items():
        other = compiled.actor.parameters[name]
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-4, atol=1e-4)


def test_the_flag_compiles_each_layer_of_each_model():
    compiled = []

    def model_of(count: int) -> SimpleNamespace:
        layer = SimpleNamespace(compile=lambda **options: compiled.append(options))
        return SimpleNamespace(model=SimpleNamespace(layers=[layer] * count))

    class Base:
        def __init__(self, config):
            self.reference = model_of(1)
            self.actor = SimpleNamespace(model=model_of(2))

    compile_file.extend(Base)(Config(compile=False))
    assert not compiled
    compile_file.extend(Base)(Config(compile=True))
    assert compiled == [{"dynamic": True}] * 3
