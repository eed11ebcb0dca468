"""Tests of extras/gate.py: causes by hand, and a trainer whose engine is broken in one way after another."""

import asyncio
import json
import pickle
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a script, too

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import train
from extras import gate as gate_file
from extras.embedded import FILE
from extras.gate import Budget, Gate, Scores, extend
from extras.local_engine import LocalEngine
from tests import fake_sglang
from tests.conftest import HERE, Config, alone, run
from train import Sample, UserError


# ---- By hand ---------------------------------------------------------------------------------------------
def make_gate(play=None, score=None, push_again=lambda: None, tied=False, **flags) -> Gate:
    config = Config(device="cpu", **{"dtype": "float32"} | flags)
    return Gate(config, tied, play, score, push_again)


def scores(engine: float, actor: float, ids: int = 0) -> Scores:
    """Four tokens, to each of which a side gives the same log-prob."""
    return Scores(torch.full((4,), ids), torch.full((4,), float(engine)), torch.full((4,), float(actor)))


FIRST = scores(-1, -1)
LAST = scores(-2, -2)


@pytest.mark.parametrize(
    "dtype, first, last, now, cause",
    [
        ("float32", None, None, scores(-1, -1.00001), ""),
        ("float32", None, None, scores(-1, -1.5), "another model"),
        ("float32", None, None, scores(-2.99, -3), "dtype"),
        ("float32", FIRST, LAST, scores(-2, -3), "stale"),
        ("float32", FIRST, LAST, scores(-1, -3), "base"),
        ("float32", FIRST, LAST, scores(-2.99, -3), "damaged"),
        ("float32", FIRST, LAST, scores(-2.5, -3), "damaged"),
        ("float32", FIRST, LAST, scores(-2, -3, ids=1), "damaged"),  # other tokens: it moved, at least
        ("float32", FIRST, LAST, scores(-2, -2.00005), "stale"),  # within the bound, but too still
        ("float32", FIRST, LAST, scores(-2, -2), ""),  # nothing was learned
        ("float32", FIRST, LAST, scores(-2.002, -2.003), "damaged"),  # it follows, but not enough
        ("float32", FIRST, LAST, scores(float("nan"), -2), "damaged"),
        ("float32", FIRST, LAST, scores(-2, float("nan")), "a broken actor"),
        ("bfloat16", FIRST, LAST, scores(-2.99, -3), ""),
        ("bfloat16", FIRST, LAST, scores(-2.5, -3), "damaged"),
    ],
)
def test_the_cause_of_wrong_weights(dtype, first, last, now, cause):
    gate = make_gate(dtype=dtype, tied=True)
    gate.first = first
    gate.last = last
    found = gate.weights_cause(now)
    assert found.startswith(cause) and bool(found) == bool(cause), found
    assert ("ties its head" in found) == (cause == "damaged")


def drawn(ids, logprobs, versions=0) -> Sample:
    sample = Sample([], {})
    sample.append([3])
    sample.append(ids, mask=1, logprob=logprobs, version=versions)
    return sample


@pytest.mark.parametrize("cut, is_caught", [(1.0, False), (0.8, True)])
def test_the_tail_is_missed(mesh, cut, is_caught):
    """Draws from known logits with a long tail; with a nucleus the log-probs stay those of the whole."""
    logits = 8 * 0.9 ** torch.arange(300.0)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)

        def play(rows, temperature, limit):
            p = (logits / temperature).softmax(0)
            kept = torch.where(p.cumsum(0) - p < cut, p, 0)
            ids = torch.multinomial(kept, len(rows), replacement=True, generator=generator).tolist()
            return [drawn([i], p[i].log().item()) for i in ids]

        _, cause = make_gate(play).tail_cause()
        assert bool(cause) == is_caught and ("top_p" in cause) == is_caught


def test_the_gate_may_warn(mesh, capsys):
    gate = make_gate(lambda *_: [], lambda *_: vars(scores(-1.5, -2)).values(), gate="warn")
    gate.first = scores(-1, -1)
    gate.last = scores(-1, -2)
    assert gate.check_weights() == 0.5
    assert "damaged weights" in capsys.readouterr().out


def test_the_gate_believes_the_engine_when_it_reports_old_weights():
    gate = make_gate()
    gate.pushes = 3
    assert gate.version_cause([drawn([1, 2], [-1, -1], [3, 3])]) == ""
    found = gate.version_cause([drawn([1, 2], [-1, -1], [2, 3])])
    assert "after push 3 the engine reports those of push 2" in found


def test_a_failed_turn_is_named(mesh):
    failed = drawn([], [])
    failed.failure = "ValueError: no tokens"
    gate = make_gate(lambda *_: [failed], lambda *_: vars(scores(-1, -1)).values())
    with pytest.raises(
        UserError, match="--gate: .*Likely cause: ValueError: no tokens.* --gate warn continues"
    ):
        gate.check_weights()


def test_probes_stay_below_their_share_of_the_steps(mesh, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gate_file, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    budget = Budget()
    budget.cost = 1.0
    probed = []
    for step in range(100):
        budget.began = now[0]
        now[0] += 10
        if budget.allows():
            budget.probes += budget.cost
            probed.append(step)
        budget.steps += now[0] - budget.began
    # A probe takes a tenth of a step: 5 % are reached after every second step.
    assert probed == list(range(1, 100, 2))
    assert budget.probes == 0.05 * budget.steps


def test_probes_keep_nothing_that_other_ranks_could_not_have():
    """With --tp_size 2 their samples are pickled: a row or state may hold what cannot be."""
    answer = ([5], [-1.0], 1, False)

    async def generate(*arguments):
        return answer

    engine = SimpleNamespace(generate=generate)
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "")
    trainer = SimpleNamespace(engine=engine, tokenizer=tokenizer, config=Config(), data=[0])
    sample = train.Sample([], {"judge": lambda: 0}, state={"lock": threading.Lock()})
    played = asyncio.run(gate_file.Probe(trainer).episode(sample, 3, 1.0, 4))
    assert pickle.loads(pickle.dumps(played)).tokens["id"].tolist() == [5] and not played.failure


# ---- Sabotage --------------------------------------------------------------------------------------------
TENSOR = "model.layers.1.mlp.up_proj.weight"
LR = 1e-4


class Saboteur:
    """A whole trainer whose engine is broken in one way at a time."""

    def __init__(self, folder, **flags):
        from extras import monitor

        mesh = alone()
        train.init_distributed = lambda config: mesh
        embedded = json.loads(FILE.read_text().replace("ASSETS", str(FILE.parent)))
        small = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "warmup_steps": 0, "lr": LR}
        small |= {"eval_every": 0, "eval_data": "", "updates_per_step": 1, "output_dir": str(folder / "run")}
        config = Config(**embedded | small | {"device": "cpu", "dtype": "float32"} | flags)
        trainer_class = extend(monitor.extend(train.Trainer))
        reward_fn = rewards_that_differ
        self.trainer = trainer_class(config, train.RLDataset, reward_fn, None)
        self.engine = self.trainer.engine
        self.push = self.engine.push
        self.generate = self.engine.generate
        self.base = self.weights()
        self.engine.sleep()
        self.trainer.publish()

    def weights(self) -> list[list]:
        """Buckets with copies of the actor's weights."""
        buckets = self.trainer.actor.whole_weights()
        return [[(name, value.clone()) for name, value in bucket] for bucket in buckets]

    def repair(self, lr: float = LR):
        """An honest engine with the newest weights; `lr` from now on."""
        self.engine.push = self.push
        self.engine.generate = self.generate
        self.trainer.actor.scheduler.base_lrs = [lr]
        for group in self.trainer.actor.optimizer.param_groups:
            group["lr"] = lr
        self.engine.sleep()
        gate_file.SHARE = 1e9
        self.trainer.publish()

    def attempt(self, action) -> str:
        """The UserError that an action raises, or ""."""
        try:
            action()
            return ""
        except UserError as error:
            return str(error)

    def break_push(self, change, times: int):
        """From now on so many pushes bring change(buckets)."""
        left = [times]

        def push(buckets):
            left[0] -= 1
            changed = change(list(buckets)) if left[0] >= 0 else buckets
            self.push([list(bucket) for bucket in changed])  # SGLangEngine empties the lists it has sent

        self.engine.push = push

    def after_push(self, change, times: int = 99, lr: float = LR) -> str:
        """What a probe finds after a step whose push is broken."""
        self.repair(lr)
        self.break_push(change, times)
        return self.attempt(self.trainer.step)

    def after_rollout(self, change, times: int = 99, lr: float = LR) -> str:
        """The same without probes after pushes: what is found before the next optimizer step."""
        self.repair(lr)
        gate_file.SHARE = 0.0
        self.break_push(change, times)
        assert self.attempt(self.trainer.step) == ""
        return self.step_without_learning()

    def step_without_learning(self) -> str:
        """What ends a step, which must leave the actor's weights as they were."""
        before = self.weights()
        found = self.attempt(self.trainer.step)
        for (_, old), (_, new) in zip(sum(before, []), sum(self.weights(), [])):
            assert not found or torch.equal(old, new)
        return found

    def while_sampling(self, generate) -> str:
        """What is found before the optimizer step when the rollout comes from another `generate`."""
        self.repair()
        self.engine.generate = generate
        return self.step_without_learning()

    def probed_with(self, generate) -> str:
        """What the probe after a step finds with another `generate`."""
        self.repair()
        self.engine.generate = generate
        return self.attempt(self.trainer.step)

    def at_start(self, change=None, generate=None) -> str:
        """What the first probe finds."""
        self.repair()
        if change:
            self.break_push(change, times=99)
        if generate:
            self.engine.generate = generate
        self.trainer.gate.first = None
        self.trainer.gate.last = None
        self.engine.sleep()
        found = self.attempt(self.trainer.publish)
        self.trainer.gate.first = self.trainer.gate.last  # whatever it was: later probes are not the first
        return found


def rewards_that_differ(sample: Sample) -> float:
    return float(sample.key[1] % 3)


def halved(buckets):
    return [[(name, w * (0.5 if name == TENSOR else 1)) for name, w in bucket] for bucket in buckets]


def dropped(buckets):
    return [[(name, w) for name, w in bucket if name != "model.embed_tokens.weight"] for bucket in buckets]


def other_model(buckets):
    return [[(name, 2 * w) for name, w in bucket] for bucket in buckets]


def rounded(buckets):
    return [[(name, w.bfloat16().to(w.dtype)) for name, w in bucket] for bucket in buckets]


def nucleus(logits, uniforms, temperature):
    """sample_tokens with top_p 0.8; as in SGLang, the log-probs are those of the whole distribution."""
    logprobs = torch.log_softmax(logits / (temperature or 1), -1)
    p, order = logprobs.exp().sort(-1, descending=True)
    kept = torch.where(p.cumsum(-1) - p < 0.8, p, 0) if temperature else p * (p == p[:, :1])
    cumulative = kept.cumsum(-1)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:])
    ids = order.gather(1, places)[:, 0]
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def sabotage_everything(folder: Path, engine: str, sampler: str, **flags) -> dict[str, str]:
    """Breaks one thing after another. Returns what the gate said of each. In the end `sampler` samples."""
    saboteur = Saboteur(folder, engine=engine, **flags)
    generate = saboteur.generate

    def hot(ids, temperature, *rest):
        return generate(ids, 0.7 * temperature, *rest)

    async def later_tokens(ids, temperature, *rest):
        new_ids, logprobs, *others = await generate(ids, temperature, *rest)
        return new_ids, np.array(logprobs) - 0.5 * (np.arange(len(new_ids)) >= 8), *others

    async def old_versions(ids, temperature, *rest):
        new_ids, logprobs, version, truncated = await generate(ids, temperature, *rest)
        return new_ids, logprobs, version - 1, truncated

    async def no_numbers(ids, temperature, *rest):
        new_ids, logprobs, *others = await generate(ids, temperature, *rest)
        return new_ids, np.full(len(new_ids), np.nan), *others

    def stale(buckets):  # the weights of before the step
        return before

    found = {}
    found["nothing, probed"] = saboteur.after_push(list)
    found["nothing, not probed"] = saboteur.after_rollout(list)
    before = saboteur.weights()
    found["push skipped once, probed"] = saboteur.after_push(stale, times=1)
    before = saboteur.weights()
    found["push skipped twice, probed"] = saboteur.after_push(stale)
    before = saboteur.weights()
    found["push of a tiny step skipped, probed"] = saboteur.after_push(stale, lr=2e-6)
    before = saboteur.weights()
    found["push skipped once"] = saboteur.after_rollout(stale, times=1)
    before = saboteur.weights()
    found["push skipped twice"] = saboteur.after_rollout(stale)
    found["halved tensor, probed"] = saboteur.after_push(halved)
    found["halved tensor"] = saboteur.after_rollout(halved)
    found["halved tensor, once"] = saboteur.after_push(halved, times=1)
    # SGLang samples without a seed: tokens that happen to be certain hide what a smaller step changes.
    found["dropped tensor"] = saboteur.after_rollout(dropped, lr=10 * LR)
    found["base weights, probed"] = saboteur.after_push(lambda buckets: saboteur.base)
    found["base weights"] = saboteur.after_rollout(lambda buckets: saboteur.base)
    found["temperature"] = saboteur.while_sampling(hot)
    found["later tokens"] = saboteur.while_sampling(later_tokens)
    found["old versions, probed"] = saboteur.probed_with(old_versions)
    found["temperature at the start"] = saboteur.at_start(generate=hot)
    found["another model at the start"] = saboteur.at_start(other_model)
    found["dtype at the start"] = saboteur.at_start(rounded)
    found["no numbers at the start"] = saboteur.at_start(generate=no_numbers)
    found["nucleus at the start"] = saboteur.at_start(generate=with_nucleus(saboteur, sampler))
    found["repaired"] = saboteur.at_start()
    saboteur.engine.close()
    return found


def with_nucleus(saboteur: Saboteur, sampler: str):
    """generate with top_p 0.8."""
    if sampler == "local":
        from extras import local_engine

        honest = local_engine.sample_tokens

        async def generate(*arguments):
            local_engine.sample_tokens = nucleus
            found = await saboteur.generate(*arguments)
            local_engine.sample_tokens = honest
            return found

        return generate
    sglang = saboteur.engine.engine
    async_generate = sglang.async_generate

    async def generate(*arguments):
        sglang.async_generate = lambda sampling_params, **others: async_generate(
            sampling_params=sampling_params | {"top_p": 0.8}, **others
        )
        found = await saboteur.generate(*arguments)
        sglang.async_generate = async_generate
        return found

    return generate


SABOTAGE = {
    "nothing, probed": "",
    "nothing, not probed": "",
    "push skipped once, probed": "stale weights.*(a second push cures it)",
    "push skipped twice, probed": "stale weights.*(a second push does not cure it)",
    "push of a tiny step skipped, probed": "stale weights: the actor has learned",
    "push skipped once": "stale weights: the last push did not reach the engine (a second push cures it)",
    "push skipped twice": "stale weights.*(a second push does not cure it)",
    "halved tensor, probed": "damaged weights.*ties its head.*(a second push does not cure it)",
    "halved tensor": "damaged weights.*(a second push does not cure it)",
    "halved tensor, once": "stale or damaged weights.*(a second push cures it)",
    "dropped tensor": "damaged weights.*(a second push does not cure it)",
    "base weights, probed": "base weights.*(a second push does not cure it)",
    "base weights": "base weights.*(a second push does not cure it)",
    "temperature": "temperature: the engine seems to sample at 0.7, and --temperature is 1.0",
    "later tokens": "a difference in later tokens only",
    "old versions, probed": "stale weights: after push .* the engine reports those of push",
    "temperature at the start": "temperature: the engine seems to sample at 0.7,",
    "another model at the start": "another model",
    "dtype at the start": "dtype",
    "no numbers at the start": "ValueError: the engine returned no tokens, or log-probs that are missing",
    "nucleus at the start": "top_p, top_k or min_p",
    "repaired": "",
}


# SGLang repeats answers only up to the last bits: weights from between two probes look damaged to the gate.
STALE_OR_DAMAGED = ("push skipped twice, probed", "push of a tiny step skipped, probed")


def check_found(found: dict[str, str], engine: str):
    assert found.keys() == SABOTAGE.keys()
    for case, cause in SABOTAGE.items():
        if engine == "sglang" and case in STALE_OR_DAMAGED:
            assert re.search("(stale|damaged) weights", found[case]), (case, found[case])
            continue
        parts = cause.split(".*")
        assert bool(cause) == bool(found[case]), (case, found[case])
        assert all(part in found[case] for part in parts), (case, found[case])
        assert not cause or found[case].startswith("--gate: "), (case, found[case])


class StrictSGLang(fake_sglang.FakeEngine):
    """An sglang.Engine that dies of what would end the real one on a GPU, and samples as the local engine."""

    def __init__(self, **options):
        super().__init__(**options)
        path = options["model_path"]
        config = Config(device=options["device"], dtype=options["dtype"])
        self.inner = LocalEngine(path, AutoTokenizer.from_pretrained(path), alone(), config)
        self.loop = self.inner.loop

    def load(self, payload: dict):
        bucket = fake_sglang.FlattenedTensorBucket(**payload)
        self.inner.push([bucket.reconstruct_tensors()])

    async def complete(self, input_ids, temperature, sampling_seed, stop_token_ids, max_new_tokens) -> dict:
        assert set(stop_token_ids) <= self.inner.stops
        prompt = np.array(input_ids)
        completion = await self.inner.generate(prompt, temperature, sampling_seed, max_new_tokens)
        ids, logprobs, _, truncated = completion
        self.busy = 0  # until flush_cache says that it is not
        return {
            "output_token_logprobs": [(*pair, None) for pair in zip(logprobs.tolist(), ids.tolist())],
            "finish_reason": {"type": "length" if truncated else "stop"},
            "completion_tokens": len(ids),
        }


@pytest.mark.parametrize("engine", ["local", "sglang"])  # the latter of StrictSGLang
def test_every_sabotage_is_caught_before_it_is_learned_and_named(tmp_path, monkeypatch, mesh, engine):
    monkeypatch.setattr(train, "init_distributed", train.init_distributed)  # Saboteur replaces it
    monkeypatch.setattr(gate_file, "SHARE", 0.05)
    fake_sglang.install(monkeypatch, StrictSGLang)
    sharing = torch.multiprocessing.get_sharing_strategy()
    found = sabotage_everything(tmp_path, engine, "local")
    torch.multiprocessing.set_sharing_strategy(sharing)
    check_found(found, "local")


@pytest.mark.sglang
def test_every_sabotage_of_sglang_is_caught_and_named(tmp_path):
    stubs = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{HERE}:{HERE / '.ci/sglang_cpu'}"}
    done = run("tests/test_gate.py", tmp_path, **stubs)
    assert done.returncode == 0, done.stderr[-3000:]
    check_found(json.loads((tmp_path / "found.json").read_text()), "sglang")


def test_without_a_gate_nothing_is_probed(tmp_path, monkeypatch, mesh, capsys):
    class Base:
        def __init__(self, config):
            self.config = config
            model = SimpleNamespace(config=SimpleNamespace(tie_word_embeddings=True))
            self.actor = SimpleNamespace(model=model)

        def publish(self):
            pass

    for mode, printed in (("off", ""), ("warn", "disagree by 5.0e-01")):
        trainer = extend(Base)(Config(device="cpu", dtype="float32", gate=mode))
        trainer.check_engine(0.5)
        assert printed in (out := capsys.readouterr().out) and bool(out) == bool(printed)
        trainer.check_engine(1e-5)
        assert capsys.readouterr().out == ""
    trainer.config.gate = "off"
    trainer.publish()
    assert trainer.gate.pushes == 1 and trainer.gate.first is None


if __name__ == "__main__":
    SGLANG_ARGS = {  # what runs without CUDA kernels
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "max_total_tokens": 32768,
        "sleep_on_idle": True,
        "mem_fraction_static": 0.3,
    }
    output = Path(sys.argv[1])
    results = sabotage_everything(output, "sglang", "sglang", sglang_args=json.dumps(SGLANG_ARGS))
    (output / "found.json").write_text(json.dumps(results))
