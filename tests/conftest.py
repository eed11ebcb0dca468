"""What the tests share: runs in a subprocess, small random models, made-up samples, fixtures."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder is refused at once
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the defaults of train.py, which the tests expect, depend on GPUs

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train
from extras import add_flags, embedded, turns, updates, variants
from recipes.trainer import add_column
from train import Actor, RLDataset, Sample, Trainer

sys.modules.setdefault("tests.conftest", sys.modules[__name__])  # pytest may have imported it as `conftest`


def extend(trainer_class: type) -> type:
    """A Trainer with those extras that change what it computes."""
    return updates.extend(turns.extend(variants.extend(trainer_class)))


Config = add_flags(train.Config)  # with the flags of extras/
VariantTrainer = extend(Trainer)
HERE = Path(__file__).parent.parent
TINY = HERE / "assets/tiny"
COUNTDOWN = HERE / "assets/countdown"
TEMPERATURE = 0.8  # of the log-probs that are compared with plain ones
GREETING = [{"role": "user", "content": "hi"}]
KINDS = ("qwen2", "qwen3", "qwen3_5")
FORMS = tuple(f"{kind}-{form}" for kind in KINDS for form in ("tied", "untied"))  # of random models
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
HYBRID |= {"rms_norm_eps": 1e-3}  # its norm of small values would amplify rounding
VOCAB = 500  # ids that the random models may use; their embeddings have 512 rows
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SGLANG_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(HERE / ".ci/sglang_cpu")}  # its environment
torch.set_num_threads(1)  # on busy cores more can stall for seconds


def parse_flags(config_class: type, arguments: list[str]):
    """A command line, as main parses it: with the flags of extras/ and those of the embedded job."""
    config_class = config_class if config_class is Config else add_flags(config_class)
    return train.parse_flags(config_class, embedded.add_flags(arguments))


def words(processes: int, command) -> list[str]:
    """The words that run python, or torchrun with so many processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(torchrun if processes else []), *map(str, command)]


def run(*command, processes: int = 0, cwd=HERE, timeout: int = 600, **environment):
    """Runs python, or torchrun with so many processes, in a folder. Returns a CompletedProcess."""
    options = {"cwd": cwd, "env": ENVIRONMENT | environment, "timeout": timeout}
    return subprocess.run(words(processes, command), **options, capture_output=True, text=True)


def needs_sglang(test):
    """Marks a test that runs the real SGLang on a CPU."""
    reason = "needs sglang: .ci/sglang_cpu/install"
    return pytest.mark.sglang(pytest.mark.skipif(not find_spec("sglang"), reason=reason)(test))


def read_rows(file: Path) -> list[dict]:
    """The rows of a .jsonl."""
    return [json.loads(line) for line in file.open()]


def random_model(folder: Path, kind: str = "qwen3", tied: bool = True, **options) -> Path:
    """A small random model with the tiny tokenizer, in a folder.

    Norms and biases are perturbed, so that errors in them show.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    sizes |= {"qwen3": {"head_dim": 8}, "qwen3_5": HYBRID}.get(kind, {})
    model_type = "qwen3_5_text" if kind == "qwen3_5" else kind
    config = AutoConfig.for_model(model_type, **sizes | options, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    scale = 0.2 if kind == "qwen3_5" else 0.3  # a recurrence amplifies rounding
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + scale * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def some_samples(groups: int = 6, size: int = 2) -> list[Sample]:
    """Groups of unequal lengths with made-up advantages; the longer samples have a reply in their middle."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(groups * size):
        prompt, length = 3 + i // size % 4, 4 + 5 * (i % 5)
        ids = torch.randint(0, VOCAB, (prompt + length,), generator=generator).numpy()
        ids[:prompt] = samples[-1].tokens["id"][:prompt] if i % size else ids[:prompt]  # that of its group
        advantage = torch.randn((), generator=generator).item()
        sample = Sample([], {"i": i}, key=(i // size, i % size))
        sample.append(ids[:prompt])
        sample.append(ids[prompt:], mask=1, logprob=-1.0, advantage=advantage)
        if length > 8:
            for name in ("mask", "logprob", "advantage"):
                sample.tokens[name][prompt + 3 : prompt + 5] = 0
        samples.append(sample)
    return samples


def episode(tokens: int, rewards: list[float], turns: list[int] | None = None, **columns) -> Sample:
    """A sample with a prompt of one token and so many trained ones, sampled with log-prob -1."""
    sample = Sample([], {})
    sample.append([7])
    sample.append([7] * tokens, mask=1, **{"turn": 0 if turns is None else turns, "logprob": -1.0, **columns})
    sample.rewards = rewards
    sample.reward = sum(rewards)
    return sample


def plain_policy(model, sample: Sample, temperature: float):
    """A distribution over V for each trained token [N] in the plainest way: one sequence, all logits."""
    ids = torch.from_numpy(sample.tokens["id"].astype(np.int64))
    trained = torch.from_numpy(sample.tokens["mask"] == 1)
    logits = model(ids[None]).logits[0, :-1, :VOCAB].float() / temperature
    return torch.distributions.Categorical(logits=logits[trained[1:]]), ids[trained]


def plain_logprobs(model, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [N] of a sample's trained tokens."""
    policy, targets = plain_policy(model, sample, temperature)
    return policy.log_prob(targets)


class FakeEngine:
    """Answers with given turns: (ids, logprobs, versions, truncated)."""

    def __init__(self, turns: list):
        self.turns = iter(turns)
        self.requests = []

    async def generate(self, ids, temperature, seed, max_new_tokens):
        self.requests.append((ids.tolist(), temperature, seed, max_new_tokens))
        return next(self.turns)


def play(tokenizer, answers: list, env_step=None, prompt_limit: int = 999, **flags) -> Sample:
    """An episode whose turns are (ids, logprobs, versions, truncated)."""
    trainer = object.__new__(turns.extend(Trainer))
    trainer.engine = FakeEngine(answers)
    trainer.tokenizer = tokenizer
    trainer.env_step = env_step
    trainer.config = Config(**flags)
    trainer.prompt_limit = prompt_limit
    sample = Sample(GREETING, {})
    sample.append(train.encode_prompt(tokenizer, GREETING))
    asyncio.run(trainer.play(sample, 1.0))
    sample.state["seen"] = [request[0] for request in trainer.engine.requests]
    return sample


def make_trainer(config: Config, mesh, trainer_class=VariantTrainer, actor_class=Actor, **parts) -> Trainer:
    """A Trainer with an actor, but without data, engine and log."""
    trainer = object.__new__(trainer_class)
    trainer.config = config
    trainer.mesh = mesh
    trainer.path = config.model
    trainer.engine = SimpleNamespace(vocab_size=VOCAB)
    trainer.actor = actor_class(trainer.load_policy(), mesh, config)
    trainer.reference = None
    vars(trainer).update(parts)
    return trainer


def mesh_of(rank: int, ranks: int) -> dict:
    """What a Trainer sees of a mesh as the given one of several data-parallel ranks."""
    dp = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: ranks)
    return {"dp": dp, "tp": SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1)}


def other_logprobs(batch, shift: float) -> torch.Tensor:
    """Made-up log-probs [N] near the engine's, which differ from token to token."""
    return batch.engine_logprobs + 0.2 * torch.sin(shift * batch.targets)


def plain_update(model, samples: list[Sample], loss: str) -> tuple[torch.Tensor, dict]:
    """Loss and gradients of tests/parity.py's losses for all samples in the plainest way."""
    total = torch.zeros(())
    for sample in samples:
        tokens = sample.tokens[sample.tokens["mask"] == 1]
        policy, targets = plain_policy(model, sample, TEMPERATURE)
        logprobs = policy.log_prob(targets)
        advantage = float(tokens["advantage"][0])
        if loss == "plain":
            total = total - advantage * (logprobs - logprobs.detach()).exp().mean() / len(samples)
            continue
        engine = torch.from_numpy(tokens["logprob"].copy())
        old = engine + 0.2 * torch.sin(3.0 * targets)
        ref = engine + 0.2 * torch.sin(5.0 * targets)
        ratio = (logprobs - old).exp()
        bounded = ratio.clamp(max=1.28) if advantage > 0 else ratio.clamp(min=0.8)
        terms = -advantage * bounded * (old - engine).exp().clamp(max=1.1)
        terms = terms + 0.05 * ((ref - logprobs).exp() - 1 + logprobs - ref) - 0.01 * policy.entropy()
        total = total + terms.sum() / sum(one.tokens["mask"].sum() for one in samples)
    total.backward()
    return total.detach(), {name: value.grad for name, value in model.named_parameters()}


@cache
def alone() -> dict:
    """This process alone, as meshes of one."""
    return train.init_distributed(Config(device="cpu"))


@pytest.fixture(scope="session")
def mesh():
    return alone()


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def columns():
    """Tokens with the columns of all recipes, for a module only."""
    before = list(train.TOKEN)
    for name in ("ref_logprob", "value", "return"):
        add_column(name)
    yield
    train.TOKEN[:] = before


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The models of FORMS, each with samples whose log-probs of the engine are near its own."""
    folder = tmp_path_factory.getbasetemp() / "models"
    if folder.exists():  # test_train.py imports these fixtures, which so exist twice
        return folder
    folder.mkdir()
    for name in FORMS:
        kind, form = name.split("-")
        model = AutoModelForCausalLM.from_pretrained(random_model(folder / name, kind, form == "tied"))
        samples = some_samples()
        for sample in samples:
            logprobs = plain_logprobs(model, sample, TEMPERATURE).detach().numpy()
            noise = 0.1 * np.sin(7 * np.arange(len(logprobs)) + sample.row["i"])
            sample.tokens["logprob"][sample.tokens["mask"] == 1] = logprobs + noise
        torch.save(samples, folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="session")
def compared(inputs):
    """The folder with what tests/parity.py has computed in 1, 2 and 4 processes."""
    folder = inputs.parent / "compared"
    if not folder.exists():
        folder.mkdir()
        done = run("tests/parity.py", "few", inputs, folder)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def whole(mesh, tmp_path, monkeypatch):
    """A function that makes a whole Trainer of the embedded job, with rewards that differ within groups."""
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)
    runs = itertools.count()

    def default_reward(sample):
        return int(sample.tokens["id"].sum()) % 7

    def make(reward_fn=default_reward, env_step=None, trainer_class=VariantTrainer, config=Config, **flags):
        options = {"model": str(TINY), "data": f"{COUNTDOWN}/train.jsonl:train[:20]", "eval_data": ""}
        options |= {"engine": "local", "device": "cpu", "dtype": "float32", "steps": 5, "prompts_per_step": 4}
        options |= {"group_size": 2, "max_new_tokens": 8, "lr": 1e-3, "warmup_steps": 0}
        options |= {"gradient_checkpointing": False, "output_dir": str(tmp_path / f"run{next(runs)}")}
        return trainer_class(config(**options | flags), RLDataset, reward_fn, env_step)

    return make


@pytest.fixture
def small(mesh, tmp_path):
    """A function that makes a Trainer with a random model, but without data, engine and log."""

    def make(**flags):
        folder = tmp_path / "small"
        if not folder.exists():
            random_model(folder)
        options = {"group_size": 2, "lr": 0.02, "warmup_steps": 0, "device": "cpu", "steps": 9}
        return make_trainer(Config(**options | {"model": str(folder)} | flags), mesh)

    return make
