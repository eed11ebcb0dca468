"""Tests of extras/checks.py: which mistakes end a run, and with which line; and a run with all extras."""

import asyncio
import errno
import io
import json
import math
import re
import shutil
import sys
import threading
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from safetensors.torch import load_file, save_file
from transformers import BertConfig
from transformers.hf_argparser import HfArgumentParser

import extras
import train
from extras import checks, embedded, turns
from tests.conftest import COUNTDOWN, TINY, Config, random_model, run
from train import RLDataset, Sample, UserError

TEST = f"{COUNTDOWN}/test.jsonl"
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def line_of(check, *arguments, **options) -> str:
    """The line that a check says of a mistake, or ""."""
    try:
        check(*arguments, **options)
        return ""
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


# ---- Flags -----------------------------------------------------------------------------------------------
def checked_config(*arguments: str) -> Config:
    parser_class = checks.one_line_parser(HfArgumentParser)
    config = train.parse_flags(Config, embedded.add_flags(list(arguments)), parser_class)
    checks.check_config(config)
    checks.check_processes(config)
    return config


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--learning_rate 1", "--learning_rate 1 is unknown; --help lists all flags"),
        ("--lr fast", "--lr: invalid float value: 'fast'; --help lists all flags"),
        ("--aggregation mean", "--aggregation: invalid choice: 'mean'"),
        ("--prompts_per_step 1.5", "--prompts-per-step: invalid int value: '1.5'"),
        ("stray", "stray is unknown; --help"),
        ("--seed -1", "--seed must be from 0 to 4294967295 .*, not -1"),
        ("--seed 4294967296", "--seed must be from 0 to 4294967295 .*, not 4294967296"),
        ("--group_size 1", "--group_size must be 2 or more"),
        ("--temperature 0", "--temperature must be above 0 and finite, not 0.0"),
        ("--lr inf", "--lr must be above 0 and finite, not inf"),
        ("--clip_low -1", "--clip_low must be 0 or more"),
        ("--max_failures nan", "--max_failures must be 0 or more"),
        ("--adam_beta2 1", "--adam_beta2 must be at least 0 and below 1, not 1.0"),
        ("--adam_beta1 -.1", "--adam_beta1 must be at least 0 and below 1, not -0.1"),
        ("--weight_decay inf", "--weight_decay must be 0 or more and finite, not inf"),
        ("--steps 0 --data x", "--steps 0 only evaluates: set --eval_data"),
        ("--steps 0 --eval_every 0", "--steps 0 only evaluates"),
        ("--engine vllm", "--engine must be sglang, local or http://host:port.*, not 'vllm'"),
        ("--sglang_args []", "--sglang_args must be a JSON object .* not '\\[\\]'"),
        ("--sglang_args {a}", "--sglang_args must be a JSON object"),
        ('--sglang_args {"admin_api_key":"x"}', "--sglang_args holds a key or a password, .*: leave it out$"),
        ("--chat_template_kwargs []", "--chat_template_kwargs must be a JSON object .* not '\\[\\]'"),
        ("--chat_template_kwargs {a}", "--chat_template_kwargs must be a JSON object"),
        ("--prompts_per_step 1 --updates_per_step 2", "--prompts_per_step must be at least 2:"),
        ("--engine local", "^$"),
    ],
)
def test_bad_flags_are_named(arguments, said):
    assert re.search(said, line_of(checked_config, *arguments.split()))


def test_a_recipe_without_groups_and_a_machine_without_sglang(monkeypatch):
    alone = Config(engine="local", group_size=1)
    alone.compares_groups = False  # as a recipe's algorithm may say
    checks.check_config(alone)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    said = line_of(checks.check_config, Config(engine="sglang"))
    assert said.startswith("--engine sglang: SGLang is not installed; pip install")


WORDS = "none mean token clip True nan inf -1 0 1e400 {} null http:// [] local".split()
NUMBERS = strategies.one_of(strategies.integers(), strategies.floats()).map(str)
VALUES = strategies.one_of(strategies.text(max_size=12), NUMBERS, strategies.sampled_from(WORDS))
NAMES = strategies.sampled_from([*(field.name for field in fields(Config)), "lrr", ""])


@settings(max_examples=80, deadline=None)
@given(strategies.lists(strategies.tuples(NAMES, VALUES), max_size=4))
def test_any_flags_make_a_config_or_one_line(given_flags):
    arguments = [text for name, value in given_flags for text in (f"--{name}", value)]
    assert re.search("--|unrecognized|^$", line_of(checked_config, *arguments))


@pytest.mark.parametrize(
    "world, local, flags, said",
    [
        (2, 2, {"tp_size": 3}, "--tp_size 3 does not divide the 2 processes per machine"),
        (4, 2, {"tp_size": 4}, "--tp_size 4 does not divide"),
        (4, 4, {"tp_size": 2, "dp_replicate": 4}, "--dp_replicate 4 does not divide 2 data-parallel"),
        (4, 4, {"prompts_per_step": 7, "updates_per_step": 2}, "--prompts_per_step must be at least 8"),
        (2, 2, {"device": "cuda"}, "torchrun started 2 processes on 1 GPUs; set --nproc_per_node=1"),
        (4, 4, {"prompts_per_step": 4, "updates_per_step": 2, "tp_size": 2}, "^$"),
    ],
)
def test_processes_that_do_not_fit(monkeypatch, world, local, flags, said):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert re.search(said, line_of(checks.check_processes, Config(**flags)))


# ---- GPU, output folder ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "device, arguments, is_here, visible, is_refused",
    [
        ("cuda", ["--device=cuda"], False, "0", True),
        ("cpu", ["--lr", "1"], True, "0", True),  # the default, though there is a GPU
        ("cpu", [], False, "0", False),
        ("cpu", ["--device", "cpu"], True, "0", False),
        ("cpu", [], True, "", False),
    ],
)
def test_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch, device, arguments, is_here, visible, is_refused):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "GPU_FILE", tmp_path if is_here else tmp_path / "none")
    said = line_of(checks.check_gpu, Config(device=device), arguments)
    assert said.startswith("torch cannot use a GPU; repair this, or set --device cpu: ") == is_refused
    assert bool(said) == is_refused


def test_output_folders_that_cannot_be_used(tmp_path):
    def said(folder, **flags) -> str:
        return line_of(checks.check_output, Config(output_dir=str(folder), **flags))

    assert not said(tmp_path / "new/run") and not list(tmp_path.iterdir())
    (tmp_path / "metrics.jsonl").touch()
    assert said(tmp_path).startswith(f"--output_dir {tmp_path} already holds a run; choose another")
    assert not said(tmp_path, resume="auto")
    for name in ("metrics.jsonl/run", "x" * 256, "/".join(["y" * 250] * 20)):
        assert re.match(
            "--output_dir .* cannot be written: .*(not a writable|too long)", said(tmp_path / name)
        )


# ---- Model, tokenizer ------------------------------------------------------------------------------------
def change_json(file: Path, **values):
    """Sets values in a file, or removes those that are None."""
    found = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def change_up_proj(file: Path, change):
    """Puts change(weight) in the place of the weight UP."""
    tensors = load_file(file)
    save_file(tensors | change(tensors.pop(UP)), file)


@pytest.fixture(scope="module")
def good_model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("good"))


def check_all(folder) -> int:
    """The longest prompt that fits."""
    path, room = checks.check_model(Config(model=str(folder), max_new_tokens=56))
    checks.check_weights(path)
    checks.check_tokenizer(path)
    return room


@pytest.mark.parametrize(
    "name, damage, said",
    [
        (
            "",
            lambda folder: BertConfig().save_pretrained(folder),
            "is a bert; it must be one of qwen2, qwen3",
        ),
        ("config.json", Path.unlink, "is neither a model folder nor on the Hub"),
        ("config.json", partial(change_json, use_sliding_window=True), "uses sliding-window attention"),
        ("config.json", partial(change_json, quantization_config={"quant_method": "fp8"}), "is quantized"),
        (WEIGHTS, Path.unlink, "has no weights"),
        (WEIGHTS, lambda file: file.write_bytes(file.read_bytes()[:-100]), "is damaged; .*not fully covered"),
        (WEIGHTS, lambda file: file.write_bytes(b"version"), f"{WEIGHTS} is damaged; download it again"),
        (WEIGHTS, partial(change_up_proj, change=lambda weight: {}), rf"{UP} is missing; .* \[48, 32\]"),
        (
            WEIGHTS,
            partial(change_up_proj, change=lambda weight: {UP: weight.T.contiguous()}),
            rf"{UP} is \[32, 48\]; .* \[48, 32\]",
        ),
        ("tokenizer.json", lambda file: file.write_text("{"), "its tokenizer cannot be loaded"),
        ("chat_template.jinja", Path.unlink, "has no chat template; use an instruct"),
        ("tokenizer_config.json", partial(change_json, eos_token=None), "names no eos_token"),
    ],
)
def test_damaged_models_are_named(tmp_path, good_model, name, damage, said):
    folder = shutil.copytree(good_model, tmp_path / "model")
    damage(folder / name)
    assert re.match(f"--model {folder}.*{said}", line_of(check_all, folder))


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"tp_size": 3}, "--tp_size 3 does not divide the model's num_attention_heads 4"),
        ({"max_new_tokens": 256}, "--max_new_tokens must be below 256, the model's"),
        ({"model": "nobody/nothing"}, "--model nobody/nothing is neither a model folder nor on the Hub"),
    ],
)
def test_flags_that_do_not_fit_the_model(good_model, flags, said):
    assert check_all(good_model) == 200
    assert line_of(checks.check_model, Config(**{"model": str(good_model)} | flags)).startswith(said)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_can_be_loaded_pass(tmp_path, mesh, tied):
    folder = random_model(tmp_path, tied=tied)
    tensors = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tied
    checks.check_weights(str(folder))
    head = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file({"lm_head.weight": head, "further": torch.ones(2)}, folder / "second.safetensors")
    save_file(tensors, folder / "model.safetensors")
    check_all(folder)
    train.load_policy(str(folder), mesh, Config(device="cpu"), 512)


# ---- Data ------------------------------------------------------------------------------------------------
def checked_dataset(tokenizer, source: str, dataset_class=RLDataset, room: int = 1000, **flags):
    return checks.checked(dataset_class, Config(**{"data": source} | flags), tokenizer, room)(source)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("empty.jsonl", "", "has no rows"),
        ("a.jsonl", '{"prompt": "hi"}\n', "row 0 .* by RLDataset.__getitem__: KeyError: 'target'"),
        ("a.jsonl", '{"target": 1}\n\n{"target": \n', "line 3 is not JSON: .*Expecting value"),
        ("a.json", "[1]", "row 0 cannot be made a prompt"),
        ("a.jsonl", '{"question": "ça"}'.encode("latin-1"), "cannot be read.* 'utf-8' codec .* position 14"),
        ("a.jsonl", '{"question": "a"}'.encode("utf-16"), "cannot be read, .* 'utf-8' codec"),
        ("none.jsonl", None, "cannot be read, or is empty: FileNotFoundError"),
        ("nobody/nothing", None, "cannot be read, or is empty"),
        (f"{TEST}:test", None, "cannot be read, or is empty"),
        ("nosuch", None, "is neither a .jsonl, .json or .parquet file nor on the Hub"),
        ("/no/such/rows.txt", None, "is neither a .jsonl"),
    ],
)
def test_bad_data_is_named(tmp_path, monkeypatch, tokenizer, name, content, said):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for source, flags in (("--data", {}), ("--eval_data", {"data": "other", "eval_data": name})):
        assert re.match(f"{source} {name}.*{said}", line_of(checked_dataset, tokenizer, name, **flags))


@pytest.mark.parametrize(
    "returned, said",
    [
        ({"prompt": "Hi"}, "Odd.__getitem__ must return a Sample, not {'prompt': 'Hi'}"),
        (Sample([], {"lock": threading.Lock()}), "row 0 .* by Odd.__getitem__: TypeError: .*lock"),
        (Sample("Hi", {}), "row 0: sample.messages do not fit the chat template"),
        (Sample([{"text": "Hi"}], {}), "row 0: sample.messages do not fit .*: KeyError: 'role'"),
        (Sample([{"role": "user", "content": 1j}], {}), "row 0: sample.messages do not fit"),
        (Sample([{"role": "user", "content": "Hi"}], {}), r"the first 8 prompts have \d+ tokens .*; 2 fit"),
    ],
)
def test_what_a_dataset_returns_is_checked(tokenizer, returned, said):
    class Odd(RLDataset):
        def __getitem__(self, index):
            return returned

    assert re.match(f"--data {TEST}: {said}", line_of(checked_dataset, tokenizer, TEST, Odd, room=2))
    given = line_of(checks.checked, object(), Config(), None, 100)
    assert "takes a class, such as a subclass of RLDataset" in given


def test_only_the_first_rows_are_made_prompts(tmp_path, tokenizer):
    source = str(tmp_path / "hole.jsonl")
    rows = [{"nums": [1, 2], "target": 3}] * 20 + [{"nums": [1, 2]}]
    Path(source).write_text("\n".join(map(json.dumps, rows)))
    data = checked_dataset(tokenizer, source)
    assert len(data) == 21 and data.source == source and data[3].row == rows[3] and len(list(data.rows)) == 21
    assert re.search("row 20 cannot be made a prompt .*: KeyError", line_of(data.__getitem__, 20))
    with pytest.raises(IndexError):
        data[21]


# ---- Errors while a run goes on --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "error, said",
    [
        (UserError("a\nb"), "a b$"),
        (ConnectionError("gone"), "gone$"),
        (TimeoutError(), "TimeoutError$"),
        (KeyboardInterrupt(), "interrupted by Ctrl-C$"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nx"), "CUDA out of memory: lower --tokens_per"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "No space left on device: /a/b; free"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded: a file of this run; free space"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x"), "File name too long: /x; .*--output_dir"),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:554] Connection closed by peer"), "another rank ended"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "$"),
        (OSError(errno.ENOENT, "x"), "$"),
        (KeyError("x"), "$"),
    ],
)
def test_what_is_said_of_an_error(error, said):
    line = checks.explain(error)
    assert re.match(said, line) and "\n" not in line


def test_errors_become_one_line_and_torchrun_learns_them(tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    cases = [
        (ConnectionError("gone"), UserError, "gone"),
        (KeyboardInterrupt(), UserError, "interrupted by Ctrl-C"),
        (KeyError("the cause"), KeyError, "KeyError: 'the cause'"),
    ]
    for error, raised, said in cases:
        with pytest.raises(raised), checks.one_line_errors():
            raise error
        assert json.loads(report.read_text())["message"]["message"] == said
    assert "--lr" in line_of(checked_config, "--lr", "fast") and "--lr" in report.read_text()


class Core(train.Trainer):
    """A Trainer without a model: `norms` are those of its gradients, and no sample is sampled."""

    def learn(self, samples):
        return {"grad_norm": self.norms.pop(0)}

    def sample(self, dataset, prompts, group_size, temperature):
        return [sample for place, sample in prompts if sample is not None]


def checked_trainer(mesh, core: type = Core, **values):
    trainer = object.__new__(checks.extend(core))
    vars(trainer).update({"mesh": mesh, "skipped_prompts": 0, "skipped_steps": 0} | values)
    return trainer


def test_gradients_that_are_never_finite_end_a_run(mesh):
    trainer = checked_trainer(mesh, norms=[math.nan] * 4 + [1.0] + [math.inf] * 5)
    for _ in range(9):
        trainer.learn([])
    said = line_of(trainer.learn, [])
    assert re.match("the gradients of 5 steps in a row were not finite.*lower --lr", said)


def test_prompts_that_are_too_long_are_counted(mesh):
    trainer = checked_trainer(mesh, norms=[1.0, 1.0])
    prompts = [(i, Sample([], {})) for i in range(4)]
    with_long = trainer.sample(None, [*prompts, (4, None)], 1, 1.0)
    assert trainer.learn(with_long) == {"grad_norm": 1.0, "skipped_prompts": 1}
    assert trainer.learn(trainer.sample(None, prompts, 1, 1.0)) == {"grad_norm": 1.0}


def test_timeouts_name_their_flag(mesh, tokenizer):
    async def forever(sample):
        await asyncio.sleep(60)

    async def impatient(sample):
        raise TimeoutError("the judge was busy")

    async def generate(ids, *_):
        return [5], [-1.0], 1, False

    trainer = checked_trainer(mesh, turns.extend(train.Trainer), tokenizer=tokenizer, prompt_limit=99)
    trainer.config = Config(reward_timeout=0.05, max_turns=2, device="cpu")
    trainer.engine = SimpleNamespace(generate=generate)
    late = "reward_fn or env_step took over 0.05 s (--reward_timeout)"
    cases = [(forever, None, late), (impatient, None, "the judge was busy"), (None, forever, late)]
    for trainer.reward_fn, trainer.env_step, said in cases:
        sample = asyncio.run(trainer.episode(Sample([], {}), 1.0))
        assert said in sample.failure


def test_a_reward_fn_that_blocks_shows_where(monkeypatch, tmp_path):
    async def waiting(sample):
        await asyncio.sleep(0.5)
        return sample

    monkeypatch.setattr(checks, "REMINDER_SECONDS", 0.1)
    with (tmp_path / "stderr").open("w+") as shown:
        monkeypatch.setattr(sys, "__stderr__", shown)
        assert asyncio.run(checks.with_reminders(waiting)(2)) == 2  # it blocks nothing
        with pytest.raises(ZeroDivisionError):
            checks.with_reminders(lambda sample: 1 / sample)(0)
        time.sleep(0.3)
        assert not (tmp_path / "stderr").read_text()
        assert checks.with_reminders(lambda sample: re.match("(a|aa)+$", sample))("a" * 32 + "b") is None
    assert (tmp_path / "stderr").read_text().count("in test_a_reward_fn_that_blocks_shows_where") >= 2


@pytest.mark.parametrize("name", "gpu config processes output model weights tokenizer".split())
def test_every_check_precedes_the_run(monkeypatch, name):
    def refuse(*arguments):
        raise UserError(name)

    monkeypatch.setattr(checks, f"check_{name}", refuse)
    config = Config(model=str(TINY), data=TEST, engine="local", device="cpu", max_new_tokens=8)
    assert line_of(checks.extend(Core), config, RLDataset, None, None) == name


# ---- Whole runs ------------------------------------------------------------------------------------------
def test_a_run_with_all_extras(tmp_path, monkeypatch, mesh, capsys):
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)
    flags = "--steps 1 --prompts_per_step 4 --group_size 2 --max_new_tokens 8 --eval_every 1 --seed 7"
    flags += f" --max_failures 0.5 --offload True --output_dir {tmp_path}/run --eval_data {TEST}:train[:4]"
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    config_class, trainer_class = extras.extend(train.Config, train.Trainer)
    config = train.parse_flags(config_class, sys.argv[1:], trainer_class.parser_class)
    wrong = line_of(train.parse_flags, config_class, ["--lr", "x"], trainer_class.parser_class)
    assert "--lr: invalid float value" in wrong
    arguments = (config, RLDataset, lambda sample: sample.key[1] - 0.5, None)
    trainer = trainer_class(*arguments)
    assert trainer.max_failures == 0.5 and trainer.reward_fn.__wrapped__ is arguments[2]
    assert np.random.get_state()[1][0] == 7  # the seed
    trainer.fit()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1] and "skipped_prompts" not in records[1]
    assert records[0]["gate_diff"] < 1e-4 and records[0]["time_gate"] > 0
    phases = {name: records[1][f"time_{name}"] for name in "rollout logprobs update push reward step".split()}
    assert all(seconds > 0 for seconds in phases.values())
    parts = [phases[name] for name in ("rollout", "logprobs", "update", "push")]
    assert sum(parts) < phases["step"] and phases["reward"] < phases["rollout"]
    tokens = 8 * records[1]["response_length"]
    assert records[1]["rollout_tokens_per_s"] == pytest.approx(tokens / phases["rollout"])
    assert records[1]["train_tokens_per_s"] > 0 and records[1]["peak_gb"] > 0.1
    assert records[1]["idle_rollout"] == records[1]["idle_update"] == 0  # one rank waits for nobody
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [len(samples), sum("ids" in sample for sample in samples)] == [8, 4]  # two groups of two
    for sample in samples[:4]:
        assert len(sample["entropy"]) == len(sample["logprobs"]) == sample["metrics"]["response_length"]
        assert np.max(sample["logprob_diff"]) <= records[1]["logprob_diff_max"] + 1e-9 < 1e-4
        assert np.min(sample["entropy"]) >= 0
    assert (tmp_path / "run/train.py").read_bytes() == Path(train.__file__).read_bytes()
    printed = capsys.readouterr().out
    assert "(the first sample, reward -0.5; tokens in « » are trained)" in printed
    assert printed.count("\n«") == 1 and printed.count("»") == 2
    assert "/run already holds a run" in line_of(trainer_class, *arguments)


FAILING = """
import sys
sys.path.insert(0, ".")
import train

def broken(sample):
    raise KeyError("the\\ncause")

if __name__ == "__main__":
    train.main(reward_fn=broken)
"""


def test_two_processes_end_with_one_line_and_code_2(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    flags = ["--output_dir", tmp_path / "run", "--eval_every", 0, "--prompts_per_step", 4, "--group_size", 2]
    done = run(script, *flags, "--max_new_tokens", 4, processes=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert done.stdout.count("A sample failed; its group is left out of the loss:") == 2  # on each rank
    assert "8 of 8 samples failed, too many: " in lines[0] and 'raise KeyError("the' in lines[0]
    assert "8 of 8 samples failed" in done.stderr.partition("Root Cause")[2]  # the last block of torchrun
    assert "exitcode  : 2" in done.stderr and not done.stdout.count("train.py: ")


def test_a_screen_without_the_characters_ends_nothing(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    checks.extend(Core)
    print("«😀» \ud800", flush=True)
    assert screen.buffer.getvalue() == b"\\xab\\U0001f600\\xbb \\ud800\n"
