"""Tests of extras/gate.py: causes by hand, and a trainer whose engine is broken in one way after another."""

import asyncio
import json
import math
import pickle
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
from extras import local_engine
from extras.embedded import FILE
from extras.gate import Gate, Scores, extend
from extras.sglang_cpu import ARGUMENTS
from tests import fake_sglang
from tests.conftest import GREETING, Config, FakeEngine, alone, run
from tests.real_sglang import ON_CPU
from train import Sample, UserError


# ---- By hand ---------------------------------------------------------------------------------------------
def make_gate(samples=(), scores=None, **flags) -> Gate:
    """A gate whose probes have these samples and scores."""
    model = SimpleNamespace(config=SimpleNamespace(tie_word_embeddings=True))
    config = Config(device="cpu", **{"dtype": "float32"} | flags)
    engine = SimpleNamespace(version=3)
    gate = Gate(SimpleNamespace(config=config, engine=engine, actor=SimpleNamespace(model=model)), None)
    gate.play = lambda *_: samples
    gate.score = lambda *_: scores
    return gate


def scores(engine: float, actor: float, ids: int = 0) -> Scores:
    """Four tokens, to each of which a side gives the same log-prob."""
    numbers = [torch.full((4,), float(number)) for number in (engine, actor, 0)]
    return Scores(torch.full((4,), ids), *numbers)


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
    gate = make_gate(dtype=dtype)
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


LONG_TAIL = 8 * 0.9 ** torch.arange(300.0)
RARE_TAIL = torch.cat([torch.tensor([10.0]), torch.zeros(99999)])


@pytest.mark.parametrize("logits", [LONG_TAIL, 12 * LONG_TAIL, RARE_TAIL], ids=["long", "certain", "rare"])
@pytest.mark.parametrize("cut, is_caught", [(1.0, False), (0.9, True)])
def test_the_tail_is_missed(mesh, logits, cut, is_caught):
    """Draws from known logits; with a nucleus the log-probs stay those of the whole."""
    generator = torch.Generator().manual_seed(0)

    def play(rows, temperature, limit):
        p = (logits / temperature).softmax(0)
        kept = torch.where(p.cumsum(0) - p < cut, p, 0)
        ids = torch.multinomial(kept, len(rows), replacement=True, generator=generator).tolist()
        return [drawn([i], p[i].log().item()) for i in ids]

    gate = make_gate()
    gate.play = play
    gate.score = lambda samples, temperature: SimpleNamespace(
        entropy=torch.distributions.Categorical(logits=logits / temperature).entropy()
    )
    for _ in range(10):
        cause = gate.tail_cause()[1]
        assert bool(cause) == is_caught == ("top_p" in cause)


@pytest.mark.parametrize("sigmas, is_caught", [(5, False), (8, True)])  # 6, and 0.02 more
def test_a_lack_of_surprise_must_be_far_out(mesh, sigmas, is_caught):
    spread = torch.linspace(-1, 1, 1024)
    entropy = 2 + sigmas * (spread.std() / 32)
    gate = make_gate(scores=SimpleNamespace(entropy=entropy))
    gate.play = lambda *_: [drawn([1], one - 2) for one in spread.tolist()]
    assert bool(gate.tail_cause()[1]) == is_caught


def test_the_gate_may_warn(mesh, capsys):
    gate = make_gate(scores=scores(-1.5, -2), gate="warn")
    gate.first = scores(-1, -1)
    gate.last = scores(-1, -2)
    assert gate.check_weights() == 0.5
    assert "damaged weights" in capsys.readouterr().out


def test_the_gate_believes_the_engine_when_it_reports_old_weights():
    gate = make_gate()
    assert gate.version_cause([drawn([1, 2], [-1, -1], [3, 3])]) == ""
    found = gate.version_cause([drawn([1, 2], [-1, -1], [2, 3])])
    assert "after push 3 the engine reports those of push 2" in found


def test_a_failed_turn_is_named(mesh):
    failed = drawn([], [])
    failed.failure = "ValueError: no tokens"
    said = "--gate: .*Likely cause: ValueError: no tokens.* --gate warn continues"
    with pytest.raises(UserError, match=said):
        make_gate([failed], scores(-1, -1)).check_weights()


class Bare:
    """What a gate wraps, with nothing to train."""

    pushes = 0

    def __init__(self, config):
        self.config = config

    def publish(self):
        self.pushes += 1


def test_probes_stay_below_their_share_of_the_run(mesh, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gate_file, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = extend(Bare)(Config(device="cpu", dtype="float32"))
    probed = []

    def check_weights():
        probed.append(trainer.pushes - 1)
        trainer.gate.first = LAST
        now[0] += 1
        return 0.0

    trainer.gate.check_weights = check_weights
    trainer.gate.check_sampling = lambda: probed.append("sampling")
    for _ in range(100):
        trainer.publish()
        now[0] += 10
    # A probe takes a tenth of a step, so every second step has time for one.
    assert probed == [0, "sampling", *range(2, 100, 2)]


def test_without_a_gate_nothing_is_probed(mesh, capsys):
    for mode, printed in (("off", ""), ("warn", "disagree by 5.0e-01")):
        trainer = extend(Bare)(Config(device="cpu", dtype="float32", gate=mode))
        trainer.check_engine(0.5)
        assert printed in (out := capsys.readouterr().out) and bool(out) == bool(printed)
        trainer.check_engine(1e-5)
        assert capsys.readouterr().out == ""
    trainer.config.gate = "off"
    trainer.publish()
    assert trainer.pushes == 1 and trainer.gate.first is None


def test_probes_keep_nothing_that_other_ranks_could_not_have(tokenizer):
    """With --tp_size 2 their samples are pickled: a row or state may hold what cannot be."""
    trainer = SimpleNamespace(
        engine=FakeEngine([([5], [-1.0], 1, False)]), tokenizer=tokenizer, prompt_limit=5
    )
    trainer.config = Config(dtype="float32")
    trainer.data = [Sample(GREETING, {"judge": lambda: 0}, state={"lock": threading.Lock()})]
    played = asyncio.run(Gate(trainer, None).episode(3, 0, 1.0, 4))
    assert len(pickle.loads(pickle.dumps(played)).tokens) == 6 and not played.failure
    assert trainer.engine.requests[0][3] == 4


# ---- Sabotage --------------------------------------------------------------------------------------------
LR = 1e-4


class Saboteur:
    """A whole trainer whose engine is broken in one way at a time."""

    def __init__(self, folder, **flags):
        embedded = json.loads(FILE.read_text().replace("ASSETS", str(FILE.parent)))
        small = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 24, "warmup_steps": 0, "lr": LR}
        small |= {"eval_every": 0, "eval_data": "", "updates_per_step": 1, "output_dir": str(folder / "run")}
        config = Config(**embedded | small | {"device": "cpu", "dtype": "float32"} | flags)
        self.trainer = extend(train.Trainer)(config, train.RLDataset, lambda sample: sample.key[1] % 3, None)
        self.engine = self.trainer.engine
        self.push = self.engine.push
        self.generate = self.engine.generate
        self.base = self.weights()
        self.engine.sleep()
        self.trainer.publish()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the actor's weights."""
        buckets = self.trainer.actor.whole_weights()
        return {name: value.clone() for bucket in buckets for name, value in bucket}

    def repair(self, lr: float = LR, pause: float = 0):
        """An honest engine with the newest weights; a learning rate and pauses between probes from now on."""
        self.engine.push = self.push
        self.engine.generate = self.generate
        self.trainer.actor.scheduler.base_lrs = [lr]
        for group in self.trainer.actor.optimizer.param_groups:
            group["lr"] = lr
        self.engine.sleep()
        self.trainer.next_probe = 0.0
        gate_file.PAUSE = pause
        self.trainer.publish()
        self.before = self.weights()

    def stale(self, name, weight):
        """The weight of before the step."""
        return self.before[name]

    def initial(self, name, weight):
        """The weight of before the run."""
        return self.base[name]

    def attempt(self, action) -> str:
        """The UserError that an action raises, or ""."""
        try:
            action()
            return ""
        except UserError as error:
            return str(error)

    def break_push(self, change, times: int = 99):
        """From now on so many pushes bring change(name, weight), or nothing where it is None."""
        left = [times]

        def push(buckets):
            left[0] -= 1
            bring = change if left[0] >= 0 else honest
            changed = [[(name, bring(name, weight)) for name, weight in bucket] for bucket in buckets]
            self.push([[pair for pair in bucket if pair[1] is not None] for bucket in changed])

        self.engine.push = push

    def break_answers(self, change):
        """From now on the engine answers change(ids, logprobs, version, truncated)."""

        async def generate(*arguments):
            ids, logprobs, *rest = await self.generate(*arguments)
            return change(ids, np.array(logprobs), *rest)

        self.engine.generate = generate

    def heat(self):
        """From now on the engine samples at 0.7 times the temperature."""
        self.engine.generate = lambda ids, temperature, *rest: self.generate(ids, 0.7 * temperature, *rest)

    def after_push(self, change, lr: float = LR, **times) -> str:
        """What a probe finds after a step whose push is broken."""
        self.repair(lr)
        self.break_push(change, **times)
        return self.attempt(self.trainer.step)

    def after_rollout(self, change, lr: float = LR, **times) -> str:
        """The same without probes after pushes: what is found before the next optimizer step."""
        self.repair(lr, pause=math.inf)
        self.break_push(change, **times)
        assert self.attempt(self.trainer.step) == ""
        return self.step_without_learning()

    def step_without_learning(self) -> str:
        """What ends a step, which must leave the actor's weights as they were."""
        before = self.weights()
        found = self.attempt(self.trainer.step)
        after = self.weights()
        assert not found or all(torch.equal(before[name], after[name]) for name in before)
        return found

    def while_sampling(self, sabotage, *arguments) -> str:
        """What is found before the optimizer step when the rollout is broken."""
        self.repair()
        sabotage(*arguments)
        return self.step_without_learning()

    def at_start(self, sabotage=lambda: None, *arguments) -> str:
        """What the first probe finds."""
        self.repair()
        sabotage(*arguments)
        self.trainer.gate.first = None
        self.trainer.gate.last = None
        self.engine.sleep()
        found = self.attempt(self.trainer.publish)
        self.trainer.gate.first = self.trainer.gate.last  # whatever it was: later probes are not the first
        return found

    def with_nucleus(self) -> str:
        """What the first probe finds if top_p is 0.8."""
        sglang = getattr(self.engine, "engine", None)
        owner, name, changed = local_engine, "sample_tokens", nucleus
        if sglang and not isinstance(sglang, StrictSGLang):
            honest = sglang.async_generate
            owner, name = sglang, "async_generate"

            def changed(sampling_params, **others):
                return honest(sampling_params=sampling_params | {"top_p": 0.8}, **others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, changed)
            return self.at_start()


def honest(name, weight):
    return weight


def halved(name, weight):
    return weight * (0.5 if name == "model.layers.1.mlp.up_proj.weight" else 1)


BROKEN_PUSHES = {
    "dropped tensor": lambda name, weight: None if name == "model.embed_tokens.weight" else weight,
    "another model": lambda name, weight: 2 * weight,
    "dtype": lambda name, weight: weight.bfloat16().to(weight.dtype),
}
BROKEN_ANSWERS = {  # ids, log-probs, version, truncated -> the same, broken
    "later tokens": lambda ids, logprobs, *rest: (ids, logprobs - 0.5 * (np.arange(len(ids)) >= 8), *rest),
    "old versions": lambda ids, logprobs, version, truncated: (ids, logprobs, version - 1, truncated),
    "no numbers": lambda ids, logprobs, *rest: (ids, np.full(len(ids), np.nan), *rest),
}


def nucleus(logits, uniforms, temperature):
    """sample_tokens with top_p 0.8; as in SGLang, the log-probs are those of the whole distribution."""
    logprobs = torch.log_softmax(logits / (temperature or 1), -1)
    p, order = logprobs.exp().sort(-1, descending=True)
    kept = torch.where(p.cumsum(-1) - p < 0.8, p, 0) if temperature else p * (p == p[:, :1])
    cumulative = kept.cumsum(-1)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:])
    ids = order.gather(1, places)[:, 0]
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def check(name: str, found: str, *parts: str):
    """What the gate says of a sabotage has these parts; without parts it must say nothing."""
    assert found.startswith("--gate: ") if parts else not found, (name, found)
    assert all(part in found for part in parts), (name, found)


def sabotage_everything(folder: Path, is_real: bool = False, **flags):
    """Breaks one thing after another, and checks what the gate says of each."""
    s = Saboteur(folder, **flags)
    cured = "(a second push cures it)"
    not_cured = "(a second push does not cure it)"
    twice = ("stale weights", not_cured)
    tiny = ("stale weights: the actor has learned",)
    check("nothing, probed", s.after_push(honest))
    check("nothing, not probed", s.after_rollout(honest))
    check("push skipped once, probed", s.after_push(s.stale, times=1), "stale weights", cured)
    found = [s.after_push(s.stale), s.after_push(s.stale, lr=2e-6)]
    if is_real:  # its answers repeat only up to the last bits: weights from between two probes look damaged
        found = [said.replace("damaged weights", "stale weights") for said in found]
        twice = tiny = ("stale weights",)
    check("push skipped twice, probed", found[0], *twice)
    check("push of a tiny step skipped, probed", found[1], *tiny)
    check("push skipped once", s.after_rollout(s.stale, times=1), "stale weights: the last push", cured)
    check("push skipped twice", s.after_rollout(s.stale), "stale weights", not_cured)
    check("halved tensor, probed", s.after_push(halved), "damaged weights", "ties its head", not_cured)
    check("halved tensor", s.after_rollout(halved), "damaged weights", not_cured)
    check("halved tensor, once", s.after_push(halved, times=1), "stale or damaged weights", cured)
    # SGLang samples without a seed: tokens that happen to be certain hide what a smaller step changes.
    check(
        "dropped tensor",
        s.after_rollout(BROKEN_PUSHES["dropped tensor"], lr=10 * LR),
        "damaged weights",
        not_cured,
    )
    check("base weights, probed", s.after_push(s.initial), "base weights", not_cured)
    check("base weights", s.after_rollout(s.initial), "base weights", not_cured)
    hot = "temperature: the engine seems to sample at 0.7, and --temperature is 1.0"
    check("temperature", s.while_sampling(s.heat), hot)
    late = "a difference in later tokens only"
    check("later tokens", s.while_sampling(s.break_answers, BROKEN_ANSWERS["later tokens"]), late)
    old = ("stale weights: after push", "the engine reports those of push")
    s.repair()
    s.break_answers(BROKEN_ANSWERS["old versions"])
    check("old versions, probed", s.attempt(s.trainer.step), *old)
    check("temperature at the start", s.at_start(s.heat), hot)
    for cause in ("another model", "dtype"):
        check(f"{cause} at the start", s.at_start(s.break_push, BROKEN_PUSHES[cause]), cause)
    no_tokens = "ValueError: the engine returned no tokens, or log-probs that are missing"
    check("no numbers at the start", s.at_start(s.break_answers, BROKEN_ANSWERS["no numbers"]), no_tokens)
    check("nucleus at the start", s.with_nucleus(), "top_p, top_k or min_p")
    check("repaired", s.at_start())
    s.engine.close()


class StrictSGLang(fake_sglang.FakeEngine):
    """An sglang.Engine that dies of what would end the real one on a GPU, and samples as the local engine."""

    def __init__(self, **options):
        super().__init__(**options)
        path = options["model_path"]
        config = Config(device=options["device"], dtype=options["dtype"])
        self.inner = local_engine.LocalEngine(path, AutoTokenizer.from_pretrained(path), alone(), config)
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
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)
    monkeypatch.setattr(gate_file, "PAUSE", 20)  # Saboteur changes it
    fake_sglang.install(monkeypatch, StrictSGLang)
    sharing = torch.multiprocessing.get_sharing_strategy()
    sabotage_everything(tmp_path, engine=engine)
    torch.multiprocessing.set_sharing_strategy(sharing)


@pytest.mark.sglang
def test_every_sabotage_of_sglang_is_caught_and_named(tmp_path):
    done = run("tests/test_gate.py", tmp_path, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    arguments = json.dumps(ARGUMENTS | {"mem_fraction_static": 0.3})
    sabotage_everything(Path(sys.argv[1]), is_real=True, engine="sglang", sglang_args=arguments)
