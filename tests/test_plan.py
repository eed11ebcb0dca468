"""Tests of tools/plan.py: counts by hand, an update's measured memory, and what it says."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

import train
from bench import memory
from tests.conftest import Config
from tools import plan as planner
from tools.shapes import known_config

HERE = Path(__file__).parent.parent
TINY = str(HERE / "assets/tiny")


def qwen_1_5b(folder: Path, tied: bool = True) -> Path:
    """The config.json of Qwen2.5-1.5B, alone."""
    config = known_config("Qwen2.5-1.5B-Instruct")
    config.tie_word_embeddings = tied
    config.save_pretrained(folder)
    return folder


def planned(folder: Path | str, *flags: str, ranks: int = 1) -> dict[str, dict[str, float]]:
    """The plan for GPUs with 80 GB, unless the flags say otherwise."""
    machine = ["--gpu_gb", "80", "--processes", str(ranks)]
    config = planner.read_flags(["--model", str(folder), *machine, *flags])
    return planner.plan(config, planner.find_config(config.model), config.processes)


def run_main(monkeypatch, capsys, *flags) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m tools.plan`, in this process."""
    monkeypatch.setattr(sys, "argv", ["tools.plan", *map(str, flags)])
    code = 0
    try:
        planner.main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [True, False])
def test_plan_is_near_what_an_update_takes(mesh, tmp_path, dtype, recompute):
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    shape = Qwen3Config(vocab_size=4096, **sizes, **heads, tie_word_embeddings=True)
    Qwen3ForCausalLM(shape).save_pretrained(tmp_path)
    case = memory.BASE | {"model": str(tmp_path), "dtype": dtype, "recompute": recompute, "tokens": 2048}
    config = memory.config_of(case)
    actor = memory.make_actor(config, mesh, 4096)
    short = memory.full_batch(64, config.device)
    full = memory.full_batch(2048, config.device)
    memory.update(actor, [short])
    held = memory.tensor_bytes(actor)
    phases = planner.plan(config, actor.model.config, 1, memory.TRAINED)
    assert phases["push"]["parameters"] + phases["push"]["Adam"] == pytest.approx(held, rel=0.01)
    updates = [parts for parts in phases.values() if "gradients" in parts]
    expected = max(sum(parts.values()) - parts["reserve"] for parts in updates)
    found = held + memory.peak(lambda: memory.update(actor, [short, full]))
    assert expected == pytest.approx(found, rel=0.15)


def test_plan_counts_parameters(tmp_path):
    # By hand: q 1536 x 1536 + 1536, k and v each 1536 x 256 + 256, o 1536 x 1536, MLP 3 x 1536 x 8960, two
    # norms of 1536: 46,797,824 per layer; 28 of them, a norm, an embedding of 151936 x 1536 = 233,373,696.
    tied = 28 * 46_797_824 + 1536 + 233_373_696
    assert planned(qwen_1_5b(tmp_path))["rollout"]["parameters"] == 4 * tied == 4 * 1_543_714_304
    untied = planned(qwen_1_5b(tmp_path, tied=False))
    assert untied["rollout"]["parameters"] == 4 * (tied + 233_373_696)
    assert untied["layers"]["Adam"] == 2 * untied["layers"]["gradients"] == 8 * (tied + 233_373_696)


def test_plan_counts_a_hybrid():
    # Qwen3.5-0.8B by hand. Linear layers: q, k and v 1024 x 6144 with 4 taps each, z 1024 x 2048, beta and
    # decay 1024 x 16, out 2048 x 1024, 16 decays and biases, a norm of 128. Attention: q with its gate
    # 1024 x 4096, k and v 1024 x 512, out 2048 x 1024, norms of 256. All: MLP 3 x 1024 x 3584, two norms.
    both = 3 * 1024 * 3584 + 2 * 1024
    linear = 1024 * (6144 + 2048 + 2 * 16 + 2048) + 4 * 6144 + 2 * 16 + 128 + both
    attention = 1024 * (4096 + 2 * 512 + 2048) + 2 * 256 + both
    root = 248320 * 1024 + 1024
    whole = 18 * linear + 6 * attention + root
    phases = planned("Qwen/Qwen3.5-0.8B")
    assert phases["rollout"]["parameters"] == 4 * whole == 4 * 752_393_024
    assert phases["push"]["gathered"] == 2 * (
        2 * root + linear
    )  # as for other models, with the largest layer
    assert phases["layers"]["gathered"] == 2 * (root + linear)
    split = planned("Qwen/Qwen3.5-0.8B", "--tp_size", "2", ranks=2)["rollout"]["parameters"]
    kept = 18 * (4 * 6144 + 2 * 16 + 128 + 2 * 1024) + 6 * (2 * 256 + 2 * 1024) + 1024
    assert split == 4 * (kept + (whole - kept) / 2)
    # SGLang keeps 5 states per sequence in 9/19 of its cache: 18 layers with 3 inputs of 6144 channels in
    # bf16 and 16 heads of 128 x 128 in fp32. The rest is for keys and values of 6 layers, 512 per token each.
    config = planner.read_flags(["--model", "Qwen/Qwen3.5-0.8B", "--gpu_gb", "80", "--processes", "1"])
    n = planner.sizes(config, planner.find_config(config.model), 1)
    free = 40e9 - 2 * whole
    states = 18 * (2 * 3 * 6144 + 4 * 16 * 128 * 128)
    assert free * 9 / 19 / (5 * states) < free * 10 / 19 / (1536 * 6 * 2 * 2 * 512)
    assert planner.cached(config, n) == pytest.approx(free * 9 / 19 / (5 * states))
    arguments = {"mem_fraction_static": 0.5, "disable_radix_cache": True, "mamba_full_memory_ratio": 4}
    more = replace(config, sglang_args=json.dumps(arguments))  # now there is less for keys than for states
    assert planner.cached(more, n) == pytest.approx(free / 5 / (1536 * 6 * 2 * 2 * 512))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_plan_knows_what_autograd_saves_in_a_hybrid(tmp_path, kind, dtype):
    length = 512
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = [kind, {"linear_attention": "full_attention", "full_attention": "linear_attention"}[kind]]
    Qwen3_5TextConfig(**sizes, layer_types=kinds).save_pretrained(tmp_path)
    model = train.empty_model(str(tmp_path)).to_empty(device="cpu").to(getattr(torch, dtype))
    parameters = {value.untyped_storage().data_ptr() for value in model.parameters()}
    saved = {}  # keeps them alive, or their addresses would be used again

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    states = torch.randn(1, length, 128, dtype=getattr(torch, dtype), requires_grad=True)
    angles = [torch.ones(1, length, 8, dtype=states.dtype)] * 2
    bounds = torch.tensor([0, length], dtype=torch.int32)
    layout = {"bounds": bounds, "key_bounds": bounds, "keys": slice(None), "longest": length}
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.model.layers[0](states, position_embeddings=angles, attention_mask=None, **layout)
    found = sum(storage.nbytes() for storage in saved.values()) / length
    config = planner.read_flags(["--model", str(tmp_path), "--device", "cpu", "--dtype", dtype])
    n = planner.sizes(config, planner.find_config(config.model), 1)
    by_layer = {"linear_attention": planner.saved_by_linear_layer, "full_attention": planner.saved_by_layer}
    n.seen = 1  # no prompt is shared here
    assert by_layer[kind](n) == pytest.approx(found, rel=0.03)


def test_plan_divides_what_is_sharded(tmp_path):
    folder = qwen_1_5b(tmp_path)
    one = planned(folder)["layers"]
    four = planned(folder, ranks=4)["layers"]
    copies = planned(folder, "--dp_replicate", "2", ranks=4)["layers"]
    split = planned(folder, "--tp_size", "2", ranks=4)["layers"]
    for name in ("parameters", "gradients", "Adam"):
        assert four[name] == one[name] / 4
        assert copies[name] == one[name] / 2  # HSDP: two copies, each on two ranks
        assert split[name] == pytest.approx(one[name] / 4, rel=1e-3)  # except for the norms
    assert four["activations"] == one["activations"]  # each rank has a full micro-batch of its own
    assert one["activations"] / 2 < split["activations"] < one["activations"]  # norms are on all ranks
    whole, halved = (planned(folder, "--tp_size", tp, ranks=2)["log-probs"] for tp in ("1", "2"))
    assert halved["log-probs"] < whole["log-probs"]
    assert halved["gathered"] < 0.6 * whole["gathered"]


@pytest.mark.parametrize("tied", [True, False])
def test_plan_counts_the_embedding_s_gradients_over_tp(tmp_path, tied):
    # As measured with tp 2, in halves of the embedding. Tied: the weights, the head's gradient, and the
    # embedding's for all rows (2), for this rank's, the sum. Untied: weights of both (2), and no sum.
    half = 151936 * 1536 / 2
    folder = qwen_1_5b(tmp_path, tied)
    parts = planned(folder, "--tp_size", "2", "--dtype", "float32", ranks=2)["reduce"]
    assert parts["under way"] == pytest.approx(4 * (6 * half + 46_797_824 / 2), rel=1e-3)


def test_plan_knows_what_is_held_when(tmp_path):
    folder = qwen_1_5b(tmp_path)
    phases = planned(folder)
    assert phases["rollout"]["engine"] == 0.5 * 80e9 + planner.SGLANG_REST  # mem_fraction_static of the card
    assert phases["push"]["engine"] == phases["rollout"]["engine"]
    assert phases["log-probs"]["engine"] == 0
    moved = planned(folder, "--offload", "true")
    assert "parameters" not in moved["rollout"]
    kept = {"parameters", "engine", "gathered"}  # Adam's moments stay away during the push
    assert {part: moved["push"][part] for part in kept} == {part: phases["push"][part] for part in kept}
    assert "Adam" not in moved["push"]
    root = 2 * (233_373_696 + 1536)  # embedding and norm in bf16
    layer = 2 * 46_797_824
    # The root twice: FSDP's copy and the clone, or the clone and the flat copy; and the bucket before.
    assert phases["push"]["gathered"] == 2 * root + layer
    assert all(parts["engine"] == 0 for parts in planned(folder, "--engine", "http://a:1").values())
    local = planned(folder, "--engine", "local", "--tp_size", "2", ranks=2)
    assert local["layers"]["engine"] == pytest.approx(2 * 1_543_714_304, rel=1e-3)
    assert local["layers"]["engine"] < local["rollout"]["engine"]  # where it has a cache, too


def test_plan_has_the_flags_of_train():
    config = planner.read_flags(["--gpu_gb", "80", "--lr", "1"])
    assert (config.engine, config.dtype, config.device, config.lr) == ("sglang", "bfloat16", "cuda", 1)
    assert config.model == Config.model
    config = planner.read_flags(["--gpu_gb=80", "--sglang_args", '{"mem_fraction_static": 0.3}'])
    assert planner.sglang_share(config) == 0.3
    way = planner.describe(config, {"sglang_args": '{"mem_fraction_static": 0.6}'})
    assert way == """--sglang_args '{"mem_fraction_static": 0.6}'"""  # quoted for a shell
    assert {field.name for field in fields(Config)} < {field.name for field in fields(planner.PlanConfig)}


@pytest.mark.parametrize("flags", [(), ("--gradient_checkpointing", "false"), ("--engine", "http://a:1")])
def test_largest_budget_is_the_largest(tmp_path, flags):
    words = ["--model", str(qwen_1_5b(tmp_path)), "--gpu_gb", "80", "--processes", "2", *flags]
    config = planner.read_flags(words)
    model_config = planner.find_config(config.model)
    budget = planner.largest_budget(config, model_config)
    assert budget >= 1024
    assert planner.fits(config, model_config, tokens_per_micro_batch=budget)
    assert not planner.fits(config, model_config, tokens_per_micro_batch=budget + 1024)
    assert planner.largest_budget(replace(config, gpu_gb=12), model_config) == 0


def test_plan_names_what_to_change_when_a_gpu_is_too_small(monkeypatch, capsys, tmp_path):
    flags = ["--model", qwen_1_5b(tmp_path), "--processes", 2, "--gpu_gb", 24]
    flags += ["--engine", "http://elsewhere:30000", "--tokens_per_micro_batch", 65536]
    code, out, _ = run_main(monkeypatch, capsys, *flags)
    head, *ways = out[out.index("It does not fit") :].splitlines()
    assert code == 1 and "24 GB" in head
    assert {"--processes", "--tokens_per_micro_batch"} <= {way.split()[0] for way in ways}
    for way in ways:  # and what it names does help
        config = planner.read_flags([*map(str, flags), *way.replace("'", "").split(" ", 1)])
        assert planner.fits(config, planner.find_config(config.model)), way
    code, out, _ = run_main(monkeypatch, capsys, *flags[:-1], 4096)
    assert code == 0 and "It fits" in out


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--gpus", "80"], "--gpus 80 is unknown"),
        (["--model", "no/such/model"], "--model no/such/model"),
        (["--gpu_gb", "80", "--processes", "4", "--tp_size", "3", "--model", TINY], "--tp_size 3"),
        (["--gpu_gb", "80", "--engine", "vllm"], "--engine"),
        (["--gpu_gb", "80", "--sglang_args", "[1]"], "--sglang_args"),
        (["--device", "cuda"], "--gpu_gb"),
    ],
)
def test_what_cannot_be_planned_ends_in_one_line(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(planner.torch.cuda, "is_available", lambda: False)
    code, out, err = run_main(monkeypatch, capsys, *flags)
    assert code == 2 and said in err and err.count("\n") == 1 and not out


def test_completions_attend_to_copies_of_a_shared_prompt():
    # Eight of 512 tokens after a prompt of 512: 4,608 tokens, which see 8 times 1,024.
    flags = {"group_size": 8, "max_new_tokens": 512}
    assert planner.keys_per_token(planner.PlanConfig(**flags)) == 8192 / 4608
    assert planner.keys_per_token(planner.PlanConfig(**flags, share_prompts=False)) == 1
