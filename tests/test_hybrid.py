"""Tests of extras/hybrid.py: Qwen3.5 on packed samples, against plain transformers one sample at a time."""

import json
import shutil
import sys
from copy import deepcopy
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers, trainers
from torch.nn.functional import conv1d, silu
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import train
from extras import checkpoint, checks, hybrid, monitor
from extras.local_engine import LocalEngine
from extras.shared_prompts import SharedBatch
from tests.conftest import (
    COUNTDOWN,
    HERE,
    SGLANG_CPU,
    VOCAB,
    Config,
    VariantTrainer,
    make_trainer,
    needs_sglang,
    plain_logprobs,
    plain_update,
    random_model,
    read_rows,
    run,
    some_samples,
)
from tests.parity import COMMON, LOSSES, update
from tests.runs import EQUAL, differences, read_samples
from train import Batch, Sample, UserError

VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 32}
TEXTS = [
    "नमस्ते दुनिया",
    "e\u0301 u\u0308 n\u0303",
    "สวัสดีชาวโลก",
    "שָׁלוֹם",
    "12+4-1 = 15 no",
    "日本語 Việt Nam",
    "👩‍👩‍👧",
]


def wrap(text, folder, outer: bool, inner: bool):
    """A folder as published: a text model inside a vision-language model; both flags say if it is tied."""
    config = json.loads((text / "config.json").read_text())
    config = Qwen3_5Config(text_config=config | {"tie_word_embeddings": inner}, vision_config=VISION)
    config.tie_word_embeddings = outer
    torch.manual_seed(1)
    whole = Qwen3_5ForConditionalGeneration(config)
    weights = {name: weight for name, weight in whole.state_dict().items() if ".visual." in name}
    weights["mtp.fc.weight"] = torch.ones(2)
    for name, weight in load_file(text / "model.safetensors").items():
        weights[name.replace("model.", "model.language_model.", 1) if "lm_head" not in name else name] = (
            weight
        )
    shutil.copytree(text, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder, mesh, **flags):
    return train.load_policy(str(folder), mesh, Config(device="cpu", temperature=0.8, **flags), VOCAB)


def long_samples(*lengths: int) -> list[Sample]:
    """Samples of one group with a common prompt of 16 tokens; every eighth token is trained."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, VOCAB, 16)
    samples = []
    for length in lengths:
        sample = Sample([], {})
        sample.append(prompt)
        mask = np.arange(length - 16) % 8 == 0
        sample.append(generator.integers(0, VOCAB, length - 16), mask=mask, logprob=-1.0, advantage=1.0)
        samples.append(sample)
    train.set_weights(samples, len(samples))
    return samples


# ---- Packed samples --------------------------------------------------------------------------------------
def gradient_error(trainer, samples, expected: dict, loss: str) -> float:
    """The norm of the difference to the expected gradients, in norms of these."""
    found = update(trainer, deepcopy(samples), loss)["gradients"]
    difference = torch.cat([(found[name] - one).flatten() for name, one in expected.items()])
    return (difference.norm() / torch.cat([one.flatten() for one in expected.values()]).norm()).item()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_layers_of_transformers_would_train_wrongly(inputs, mesh, loss):
    """The control: with these layers in place of PackedDeltaNet, state leaks from sample to sample."""
    folder = inputs / "qwen3_5-untied"
    samples = torch.load(f"{folder}.pt", weights_only=False)
    _, expected = plain_update(AutoModelForCausalLM.from_pretrained(folder), samples, loss)
    config = Config(**COMMON | {"model": str(folder), "token_groups": 0} | LOSSES[loss])
    assert gradient_error(make_trainer(config, mesh), samples, expected, loss) < 1e-5
    trainer = make_trainer(config, mesh)
    for layer in trainer.actor.model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.__class__ = hybrid.qwen.Qwen3_5GatedDeltaNet
    assert gradient_error(trainer, samples, expected, loss) > 0.3


@pytest.mark.parametrize("batch_class", [Batch, SharedBatch])
def test_a_sample_does_not_change_what_follows_it(inputs, mesh, batch_class):
    policy = load(inputs / "qwen3_5-tied", mesh)
    samples = some_samples()
    before, _ = policy.logprobs(batch_class(samples, "cpu"))
    for i in (0, 1):  # the first group
        samples[i].tokens["id"][1] += 1
    after, _ = policy.logprobs(batch_class(samples, "cpu"))
    own = sum(int(sample.tokens["mask"].sum()) for sample in samples[:2])
    assert (before[:own] != after[:own]).all() and torch.equal(before[own:], after[own:])


def check_long(mesh, folder, *lengths: int):
    """Log-probs and gradients of long samples, packed in two ways, against plain ones."""
    random_model(folder, "qwen3_5", max_position_embeddings=max(lengths))
    model = AutoModelForCausalLM.from_pretrained(folder)
    samples = long_samples(*lengths)
    expected = torch.cat([plain_logprobs(model, sample, 0.8) for sample in samples])
    (expected / len(expected)).sum().backward()
    for batch_class in (Batch, SharedBatch):
        policy = load(folder, mesh)
        found, _ = policy.logprobs(batch_class(samples, "cpu"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-5)
        (found / len(expected)).sum().backward()
        for name, weight in model.named_parameters():
            gradient = policy.get_parameter(name).grad.full_tensor()
            bound = 3e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
            assert (gradient - weight.grad).abs().max() < bound * weight.grad.abs().max(), name


def test_samples_of_2000_tokens(mesh, tmp_path):
    check_long(mesh, tmp_path, 2000, 700, 1025)


@pytest.mark.slow
def test_samples_of_8000_tokens(mesh, tmp_path):
    check_long(mesh, tmp_path, 8000, 3001)


def test_the_kernels_get_the_bounds_of_samples(inputs, mesh, monkeypatch):
    """Stand-ins with the signatures of fla-core 0.6.0, which loop over samples."""

    def causal_conv1d(x, weight, activation, cu_seqlens):
        assert activation == "silu" and cu_seqlens.dtype == torch.int64 and len(x) == 1
        parts = x.split(cu_seqlens.diff().tolist(), 1)
        padding = {"padding": weight.shape[1] - 1, "groups": len(weight)}
        parts = [conv1d(x.mT, weight[:, None], **padding)[..., : x.shape[1]].mT for x in parts]
        return silu(torch.cat(parts, 1)), None

    def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel and q.shape[2] == k.shape[2] == 2 and v.shape[2] == 4
        lengths = cu_seqlens.diff().tolist()
        q, k = (part.repeat_interleave(2, 2) for part in (q, k))  # grouped heads, as in the kernel
        parts = zip(*(part.split(lengths, 1) for part in (q, k, v, g, beta)))
        rule = hybrid.DELTA_RULE
        outputs = [rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0] for q, k, v, g, b in parts]
        return torch.cat(outputs, 1), None

    for name, function in (
        ("modules.causal_conv1d", causal_conv1d),
        ("ops.gated_delta_rule", chunk_gated_delta_rule),
    ):
        for part in ("fla", f"fla.{name.split('.')[0]}", f"fla.{name}"):
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        setattr(sys.modules[f"fla.{name}"], function.__name__, function)
    policy = load(inputs / "qwen3_5-tied", mesh)
    layer = policy.model.layers[0].linear_attn
    batch = SharedBatch(some_samples(), "cpu")
    layout = batch.layout["key_bounds"]
    seen = (
        torch.randn(1, int(layout[-1]), layer.conv_dim),
        -torch.rand(1, int(layout[-1]), 4),
        torch.rand(1, int(layout[-1]), 4),
    )
    found = layer.by_kernels(*seen, layout.long())
    torch.testing.assert_close(found, layer.by_rows(*seen, layout, batch.layout["longest"]))


# ---- Folders ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tied, outer, inner",
    [(True, True, True), (True, True, False), (True, False, True), (False, False, False)],
)
def test_the_text_model_of_a_wrapper_is_loaded_wherever_the_flag_stands(
    tmp_path, mesh, tokenizer, tied, outer, inner
):
    text = random_model(tmp_path / "text", "qwen3_5", tied)
    folder = wrap(text, tmp_path / "wrapper", outer, inner)
    checks.check_weights(str(folder))
    expected, found = (dict(load(one, mesh).named_parameters()) for one in (text, folder))
    assert expected.keys() == found.keys() and ("lm_head.weight" in found) is not tied
    assert all(torch.equal(expected[name].full_tensor(), found[name].full_tensor()) for name in found)
    config = Config(model=str(folder), device="cpu", dtype="float32")
    engine = LocalEngine(str(folder), tokenizer, mesh, config)
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, expected[name].full_tensor())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.layers.0.linear_attn.A_log"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="model.layers.0.linear_attn.A_log is missing"):
        checks.check_weights(str(folder))


HybridTrainer = hybrid.extend(VariantTrainer)


def train_tokenizer(folder):
    """Gives a folder a tokenizer with merges within words of other scripts, and a misleading class name."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = list(tokenizer.get_added_vocab())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.backend_tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))


def test_a_run_from_a_wrapper_exports_a_model_and_a_tokenizer_that_agree(whole, tmp_path, capsys):
    text = random_model(tmp_path / "text", "qwen3_5", max_position_embeddings=1024)
    folder = wrap(text, tmp_path / "wrapper", True, True)
    train_tokenizer(folder)
    base = AutoTokenizer.from_pretrained(folder)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, text)
    copied = AutoTokenizer.from_pretrained(text)
    assert any(copied.encode(one) != base.encode(one) for one in TEXTS)  # what copied files would do
    trainer = whole(trainer_class=HybridTrainer, model=str(folder), steps=2)
    trainer.fit()
    assert capsys.readouterr().out.count("ignored weights: mtp, visual") == 1
    exported = AutoTokenizer.from_pretrained(trainer.folder / "model")
    for text in TEXTS:
        assert base.encode(text) == trainer.tokenizer.encode(text) == exported.encode(text)
        assert exported.decode(exported.encode(text)) == base.decode(base.encode(text))
    chat = [{"role": "user", "content": TEXTS[0]}]
    assert exported.apply_chat_template(chat) == base.apply_chat_template(chat)
    config = json.loads((trainer.folder / "model/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config["full_attention_interval"] == 2
    model = AutoModelForCausalLM.from_pretrained(trainer.folder / "model")
    sample = some_samples()[0]
    found, _ = trainer.actor.model.logprobs(Batch([sample], "cpu"), temperature=1.0, vocab_size=VOCAB)
    torch.testing.assert_close(found, plain_logprobs(model, sample), rtol=1e-5, atol=2e-5)
    records = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").open()]
    assert all(record["logprob_diff"] < 1e-5 and record["grad_norm"] > 0 for record in records[1:])


def test_what_cannot_work_ends_in_one_line(tmp_path, monkeypatch):
    folder = random_model(tmp_path / "hybrid", "qwen3_5")
    with (
        monkeypatch.context() as older,
        pytest.raises(UserError, match="requires transformers 5.19 or newer"),
    ):
        older.setattr(hybrid.transformers, "__version__", "5.12.0")
        train.empty_model(str(folder))
    with pytest.raises(UserError, match="requires kernels: pip install fla-core"):
        HybridTrainer(Config(model=str(folder), device="cuda"))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_next", "num_experts": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is a qwen3_next: of hybrids only Qwen3.5's are implemented"):
        train.empty_model(str(folder))


# ---- Runs ------------------------------------------------------------------------------------------------
def test_a_resumed_run_equals_its_run_to_the_bit(whole, tmp_path, monkeypatch):
    model = random_model(tmp_path / "model", "qwen3_5", max_position_embeddings=1024)
    monkeypatch.setattr(checkpoint.Stop, "listen", lambda self: None)
    trainer_class = checkpoint.extend(monitor.extend(HybridTrainer))
    flags = {"trainer_class": trainer_class, "model": str(model), "steps": 4, "save_every": 2}
    folders = [tmp_path / "one", tmp_path / "other"]
    whole(output_dir=str(folders[0]), **flags).fit()
    whole(output_dir=str(folders[1]), resume=str(folders[0] / "checkpoint-2"), **flags).fit()
    assert differences(*folders) == EQUAL


TINY_HYBRID = HERE / "assets/tiny_hybrid"
JOB = ["--model", TINY_HYBRID, "--data", COUNTDOWN / "train.jsonl", "--max_new_tokens", 64]


def history_of(folder, *flags, processes: int = 0, **environment) -> list[dict]:
    """The metrics of a run that trains the tiny hybrid."""
    flags = [*JOB, "--output_dir", folder, *flags]
    done = run("train.py", *flags, processes=processes, timeout=500, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.slow
def test_the_tiny_hybrid_learns(tmp_path):
    flags = [
        "--steps",
        15,
        "--prompts_per_step",
        32,
        "--updates_per_step",
        2,
        "--lr",
        2e-4,
        "--eval_every",
        15,
    ]
    flags += ["--eval_data", f"{COUNTDOWN}/test.jsonl:train[:128]", "--gradient_checkpointing", False]
    history = history_of(tmp_path, *flags)
    assert history[15]["eval_score"] > history[0]["eval_score"] + 0.15
    assert np.mean([record["reward"] for record in history[13:]]) > history[1]["reward"] + 0.1
    assert all(record["logprob_diff"] < 1e-5 for record in history[1:])


@pytest.mark.slow
def test_samples_do_not_depend_on_the_ranks(tmp_path):
    flags = ["--steps", 2, "--prompts_per_step", 8, "--group_size", 4, "--eval_every", 0, "--lr", 1e-4]
    for name, processes, tp_size in (("one", 0, 1), ("two", 2, 1), ("tp", 2, 2)):
        history_of(tmp_path / name, *flags, "--tp_size", tp_size, processes=processes)
    one, two, tp = (read_samples(tmp_path / name) for name in ("one", "two", "tp"))
    texts = [[(sample["key"], sample["text"]) for sample in samples] for samples in (one, two, tp)]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 2 * 8 * 4


@needs_sglang
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_run_with_sglang_and_an_evaluation_of_its_export(tmp_path, tp_size):
    environment = SGLANG_CPU | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[:tp_size])}
    common = ["--engine", "sglang", "--tp_size", tp_size, "--device", "cpu", "--dtype", "float32"]
    common += ["--eval_data", f"{COUNTDOWN}/test.jsonl:train[:16]", "--eval_every", 2]
    flags = [*common, "--steps", 2, "--prompts_per_step", 8, "--group_size", 8, "--lr", 1e-4]
    history = history_of(tmp_path / "run", *flags, processes=tp_size, **environment)
    assert all(record["logprob_diff"] < 1e-5 and record["grad_norm"] > 0 for record in history[1:])
    assert history[1]["reward"] > 0 and history[1]["failures"] == 0
    if tp_size == 1:
        flags = [*common, "--steps", 0, "--model", tmp_path / "run/model"]
        exported = history_of(tmp_path / "export", *flags, **environment)
        assert exported[0]["eval_score"] == history[2]["eval_score"] > 0
