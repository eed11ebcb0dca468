"""Tests of recipes/distill.py: divergences against plain ones, on several ranks; what is refused; runs."""

import math
import os
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from extras import checks, head, offload, shared_prompts
from extras.servers import Server
from recipes import teacher as teacher_module
from recipes.distill import Distill, DistillConfig
from recipes.teacher import full_scores, head_part, load_teacher
from tests.conftest import (
    TEMPERATURE,
    TINY,
    VOCAB,
    add_flags,
    extend,
    make_trainer,
    plain_policy,
    random_model,
    read_rows,
    run,
    some_samples,
)
from train import Sample, UserError

pytestmark = pytest.mark.usefixtures("columns")  # the one that servers fill goes again
Flags = add_flags(DistillConfig)
WholeDistill = shared_prompts.extend(head.extend(extend(Distill)))
LOSSES = ("sampled", "reverse", "forward")
COEFS = {"kd_coef": 0.7, "reward_coef": 0.5}
PARTS = {
    "vocab_size": 520,
    "hidden_size": 48,
    "num_hidden_layers": 3,
}  # of a teacher; halves differ from 512's


def update(student: Path, teacher: Path, samples: list, mesh: dict, trainer_class=Distill, **flags) -> dict:
    """One backward pass: loss, divergence and whole gradients."""
    config = Flags(model=str(student), teacher=str(teacher), device="cpu", **flags)
    trainer = make_trainer(config, mesh, extend(trainer_class), servers=None)
    Distill.add_teacher(trainer, str(teacher))
    metrics = trainer.actor.backward(trainer.micro_batches(samples), trainer.forward)
    gradients = {name: one.grad.full_tensor().clone() for name, one in trainer.actor.parameters.items()}
    return {"loss": metrics["loss"], "teacher_kl": metrics["teacher_kl"], "gradients": gradients}


def plain(student: Path, teacher: Path, samples: list, kd_loss: str) -> dict:
    """What `update` returns, in the plainest way."""
    student, teacher = [AutoModelForCausalLM.from_pretrained(path) for path in (student, teacher)]
    total = torch.zeros(())
    divergences = []
    for sample in samples:
        own, targets = plain_policy(student, sample, TEMPERATURE)
        with torch.no_grad():
            other, _ = plain_policy(teacher, sample, TEMPERATURE)
        logprobs = own.log_prob(targets)
        advantage = 0.5 * float(sample.tokens["advantage"][-1])
        if kd_loss == "sampled":
            divergence = (logprobs - other.log_prob(targets)).detach()
            advantages = advantage - 0.7 * divergence
            terms = -advantages * (logprobs - logprobs.detach()).exp()
        else:
            pair = (own, other) if kd_loss == "reverse" else (other, own)
            divergence = torch.distributions.kl_divergence(*pair)
            terms = 0.7 * divergence - advantage * (logprobs - logprobs.detach()).exp()
        total = total + terms.mean() / len(samples)
        divergences.append(divergence.detach())
    total.backward()
    gradients = {name: one.grad for name, one in student.named_parameters()}
    return {"loss": total.item(), "teacher_kl": torch.cat(divergences).mean().item(), "gradients": gradients}


def agree(found: dict, expected: dict):
    for name in ("loss", "teacher_kl"):
        assert found[name] == pytest.approx(expected[name], abs=2e-6), name
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=3e-6, msg=name)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A student, and a teacher of other sizes."""
    folder = tmp_path_factory.mktemp("models")
    return random_model(folder / "student", "qwen2"), random_model(folder / "teacher", tied=False, **PARTS)


# ------------------------------------------- formulas --------------------------------------------------
class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("kd_loss", ["reverse", "forward"])
def test_divergences_are_exact_and_made_in_chunks(mesh, monkeypatch, kd_loss):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 0.5 * torch.randn(shape, generator=generator)

    monkeypatch.setattr(teacher_module, "CHUNK_ELEMENTS", 0)
    count, rows, used = 300, 1032, 1024  # more than two chunks of 128
    student = draw(count, 16).requires_grad_(), draw(rows, 16).requires_grad_()
    teacher = draw(count, 8), draw(rows, 8)
    targets = torch.randint(0, used, (count,), generator=generator)
    weights = draw(count)
    with Largest() as largest:
        found = full_scores(student, teacher, targets, kd_loss, TEMPERATURE, used, mesh["tp"])
        gradients = torch.autograd.grad((weights * found[2]).sum() + found[0].sum(), student)
    assert largest.elements < count * rows / 2
    exact = [one.detach().double().requires_grad_() for one in student]
    own = log_softmax(exact[0] @ exact[1][:used].T / TEMPERATURE, dim=1)
    other = log_softmax(teacher[0].double() @ teacher[1][:used].double().T / TEMPERATURE, dim=1)
    first, second = (own, other) if kd_loss == "reverse" else (other, own)
    divergence = (first.exp() * (first - second)).sum(dim=1)
    chosen = own.gather(1, targets[:, None])[:, 0]
    entropy = -(own.exp() * own).sum(dim=1)
    for value, expected in zip(found, (chosen, entropy, divergence)):
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad((weights * divergence).sum() + chosen.sum(), exact)
    for value, gradient in zip(gradients, expected):
        torch.testing.assert_close(value.double(), gradient, rtol=1e-4, atol=2e-6)


def test_parts_of_heads_face_the_same_ids():
    """A teacher of 10 rows beside a student of 12 on two ranks."""
    weight = torch.arange(10.0)[:, None]
    teacher = SimpleNamespace(lm_head=SimpleNamespace(weight=weight))
    parts = [head_part(teacher, 6, SimpleNamespace(get_local_rank=lambda: rank)) for rank in (0, 1)]
    assert torch.cat(parts).flatten().tolist() == [*range(10), 0, 0]
    weight.zero_()  # as if FSDP had freed it
    assert parts[0][5] == 5


def test_the_sampled_loss_has_the_gradient_of_the_reverse_divergence_in_expectation(mesh, models):
    student, teacher = [AutoModelForCausalLM.from_pretrained(path) for path in models]
    prompt = [5, 9, 400, 3]
    samples = []
    for token in range(VOCAB):  # every completion of one token
        sample = Sample([], {}, key=(0, token))
        sample.append(prompt)
        sample.append([token], mask=1)
        samples.append(sample)
    own, _ = plain_policy(student, samples[0], 1.0)
    with torch.no_grad():
        other, _ = plain_policy(teacher, samples[0], 1.0)
    exact = torch.distributions.kl_divergence(own, other).sum()
    exact.backward()
    probabilities = own.probs[0].detach().numpy()

    class Enumerating(Distill):
        def micro_batches(self, samples):
            """Each token counts as often as the student samples it."""
            batches = super().micro_batches(samples)
            for batch in batches:
                batch.weights = torch.tensor([probabilities[one.key[1]] for one in batch.samples])
            return batches

    found = update(*models, samples, mesh, Enumerating)
    expected = {name: one.grad for name, one in student.named_parameters()}
    assert found["loss"] == pytest.approx(exact.item(), abs=1e-5)  # -E[A]
    for name, gradient in expected.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kd_loss", LOSSES)
def test_loss_and_gradient_are_the_plain_ones(mesh, models, kd_loss):
    flags = {"temperature": TEMPERATURE, "tokens_per_micro_batch": 60, "kd_loss": kd_loss} | COEFS
    agree(update(*models, some_samples(), mesh, **flags), plain(*models, some_samples(), kd_loss))


@pytest.mark.slow
def test_ranks_and_tensor_parallelism_change_nothing(models, tmp_path):
    done = run("-m", "tests.test_distill", *models, tmp_path, processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    for kd_loss in LOSSES:
        expected = plain(*models, some_samples(), kd_loss)
        for tp in (1, 2):
            agree(torch.load(tmp_path / f"{kd_loss}-{tp}.pt"), expected)


def worker(student: str, teacher: str, output: str):
    """A rank of that test."""
    for tp in (1, 2):
        mesh = train.init_distributed(Flags(teacher=teacher, device="cpu", tp_size=tp))
        train.dist.init_process_group = lambda *arguments: None  # once is enough
        dp = mesh["dp"]
        trainer_class = shared_prompts.extend(Distill) if tp == 2 else Distill
        for kd_loss in LOSSES:
            flags = {"temperature": TEMPERATURE, "kd_loss": kd_loss, "tp_size": tp} | COEFS
            mine = [one for one in some_samples() if one.key[0] % dp.size() == dp.get_local_rank()]
            record = update(Path(student), Path(teacher), mine, mesh, trainer_class, **flags)
            if train.RANK == 0:
                torch.save(record, f"{output}/{kd_loss}-{tp}.pt")
    train.dist.barrier()
    os._exit(0)  # at once: destructors of many meshes take seconds


# --------------------------------------------- runs ----------------------------------------------------
@pytest.fixture
def distill(whole, models):
    """A function that makes a whole Trainer with a teacher."""

    def make(teacher=models[1], trainer_class=WholeDistill, **flags):
        flags = {"steps": 2, "eval_every": 0} | flags
        return whole(trainer_class=trainer_class, config=Flags, teacher=str(teacher), **flags)

    return make


def moved(trainer) -> bool:
    """Whether an export differs from the start."""
    start = load_file(TINY / "model.safetensors")
    end = load_file(trainer.folder / "model/model.safetensors")
    return any(not torch.equal(end[name], start[name]) for name in start)


@pytest.mark.parametrize("kd_loss", LOSSES)
def test_its_own_teacher_teaches_nothing(distill, kd_loss):
    trainer = distill(TINY, kd_loss=kd_loss, updates_per_step=1)
    trainer.fit()
    first, second = read_rows(trainer.folder / "metrics.jsonl")[1:]
    assert first["teacher_kl"] == first["grad_norm"] == second["grad_norm"] == 0
    assert not moved(trainer)


@pytest.mark.parametrize("kd_loss", LOSSES)
def test_groups_without_a_signal_learn_from_the_teacher(distill, kd_loss):
    trainer = distill(kd_loss=kd_loss, group_size=1, updates_per_step=2)
    trainer.fit()
    history = read_rows(trainer.folder / "metrics.jsonl")[1:]
    assert all(record["grad_norm"] > 0.01 and math.isfinite(record["teacher_kl"]) for record in history)
    assert moved(trainer)
    checks.check_config(trainer.config)


def test_the_teacher_leaves_the_gpu_with_the_reference(distill, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    trainer = distill(trainer_class=offload.extend(WholeDistill), offload=True)
    places = []
    monkeypatch.setattr(type(trainer.teacher), "to", lambda self, device: places.append(device))
    assert isinstance(trainer.teacher, FSDPModule)
    trainer.learn(trainer.rollout())
    assert len(places) >= 3
    assert sum(weight.requires_grad for weight in trainer.teacher.parameters()) == 0


# -------------------------------------------- servers --------------------------------------------------
@pytest.fixture
def served(models, monkeypatch):
    """Pretends that a server scores with the teacher; returns the payloads that it gets."""
    model = AutoModelForCausalLM.from_pretrained(models[1])
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(TINY)))
    payloads = []

    @torch.no_grad()
    async def post(self, path, **payload):
        if path == "server_info":
            return {"tokenizer_path": str(models[1])}
        payloads.append(payload)
        ids = torch.tensor(payload["input_ids"])
        logprobs = log_softmax(model(ids[None]).logits[0], dim=1)
        values = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        start = payload["logprob_start_len"]
        scored = list(zip([None, *values[start:]], ids[start:].tolist(), [None] * len(ids)))
        return {"meta_info": {"input_token_logprobs": scored}}

    monkeypatch.setattr(Server, "post", post)
    return payloads


def test_servers_teach_what_a_model_does(distill, served):
    histories = []
    for teacher in ("http://a:1,http://b:2", None):
        trainer = distill(**{"teacher": teacher} if teacher else {}, eval_every=1, reward_coef=0.5)
        trainer.fit()
        histories.append(read_rows(trainer.folder / "metrics.jsonl")[1:])
    assert len(served) == 2 * 4 * 2  # evaluations ask no teacher
    assert all(payload["sampling_params"] == {"max_new_tokens": 0} for payload in served)
    for one, other in zip(*histories):
        for name in ("loss", "teacher_kl", "grad_norm", "reward"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


def test_log_probs_of_other_tokens_fail_a_sample(distill, served, monkeypatch):
    async def post(self, path, **payload):
        return {"meta_info": {"input_token_logprobs": [(None, 1, None), (-1.0, 2, None)]}}

    trainer = distill("http://a:1")
    monkeypatch.setattr(Server, "post", post)
    with redirect_stderr(StringIO()), pytest.raises(UserError, match="log-probs of other tokens"):
        trainer.fit()


# -------------------------------------------- refusals -------------------------------------------------
@pytest.mark.parametrize(
    "flags, message",
    [
        ({"teacher": ""}, "--teacher must name"),
        ({"teacher": "http://a:1", "kd_loss": "reverse"}, "requires --kd_loss sampled"),
        ({"teacher": "http://a:1", "temperature": 0.5}, "requires --kd_loss sampled and --temperature 1"),
        ({"teacher": "x", "kd_coef": 0.0}, "--kd_coef must be above 0"),
        ({"teacher": "x", "reward_coef": -1.0}, "--reward_coef 0 or more"),
    ],
)
def test_flags_that_misfit_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        DistillConfig(device="cpu", engine="local", **flags)


def test_teachers_that_misfit_are_refused(distill, models, tmp_path):
    with pytest.raises(UserError, match="--teacher nowhere is neither a model folder nor"):
        distill("nowhere")
    with pytest.raises(UserError, match="--teacher must be .* http://host:port"):
        distill("http://a:1,x")
    other = random_model(tmp_path / "other", **PARTS)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|another|>"))
    config = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(config.replace("<|endoftext|>", "<|another|>"))
    with pytest.raises(UserError, match="--teacher .*other has another vocabulary: 2 tokens differ"):
        distill(other)


def test_a_teacher_has_the_compute_dtype(mesh, models):
    config = Flags(model=str(models[0]), teacher=str(models[1]), device="cpu", dtype="bfloat16")
    teacher = load_teacher(str(models[1]), mesh, config, VOCAB)
    expected = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.bfloat16)
    for name, weight in expected.named_parameters():
        assert torch.equal(dict(teacher.named_parameters())[name].full_tensor(), weight), name


@pytest.mark.slow
def test_a_resumed_run_continues_to_the_bit(models, tmp_path):
    flags = "--steps 2 --prompts_per_step 4 --group_size 2 --max_new_tokens 8 --eval_every 0 --save_every 1"
    command = ["-m", "recipes.distill", "--teacher", models[1], *flags.split(), "--output_dir"]
    assert run(*command, tmp_path / "one", processes=2).returncode == 0
    resumed = ["-m", "recipes.distill", "--resume", tmp_path / "one/checkpoint-1", "--output_dir"]
    done = run(*resumed, tmp_path / "two", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = [load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two")]
    assert all(torch.equal(one[name], two[name]) for name in one)


if __name__ == "__main__":
    worker(*sys.argv[1:])
