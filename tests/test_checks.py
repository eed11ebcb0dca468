"""Tests of extras/checks.py: which mistakes end a run, and with which line."""

import asyncio
import errno
import io
import json
import math
import shutil
import signal
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from safetensors.torch import load_file, save_file
from transformers import BertConfig, Qwen3Config
from transformers.hf_argparser import HfArgumentParser

import train
from extras import checks, monitor, turns
from tests.conftest import COUNTDOWN, TINY, Config, parse_flags, random_model, run, some_samples
from train import RLDataset, Sample, UserError


@pytest.fixture(autouse=True)
def parser_errors(monkeypatch):
    monkeypatch.setattr(HfArgumentParser, "error", checks.raise_parser_error)


def checked_config(*arguments: str) -> Config:
    config = parse_flags(Config, list(arguments))
    checks.check_config(config)
    checks.check_processes(config)
    return config


# ---- Flags -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--learning_rate 1", "--learning_rate 1 is unknown; --help lists all flags"),
        ("--lr fast", "--lr: invalid float value: 'fast'"),
        ("--aggregation mean", "--aggregation: invalid choice: 'mean'"),
        ("--device tpu", "--device: invalid choice"),
        ("--prompts_per_step 1.5", "--prompts-per-step: invalid int value: '1.5'"),
        ("stray", "stray is unknown; --help"),
        ("--seed -1", "--seed must be from 0 to 4294967295 .*, not -1"),
        ("--seed 4294967296", "--seed must be from 0 to 4294967295 .*, not 4294967296"),
        (f"--seed {10**30}", "--seed must be from 0 to 4294967295"),
        ("--group_size 1", "--group_size must be 2 or more, not 1"),
        ("--group_size 0", "--group_size must be above 0"),
        ("--temperature 0", "--temperature must be above 0 and finite, not 0.0"),
        ("--lr nan", "--lr must be above 0"),
        ("--lr inf", "--lr must be above 0 and finite, not inf"),
        ("--clip_low -1", "--clip_low must be 0 or more"),
        ("--max_failures nan", "--max_failures must be 0 or more"),
        ("--eval_every -2", "--eval_every must be 0 or more"),
        ("--steps 0 --data x", "--steps 0 only evaluates: set --eval_data"),
        ("--steps 0 --eval_every 0", "--steps 0 only evaluates"),
        ("--engine vllm", "--engine must be sglang, local or http://host:port.*, not 'vllm'"),
        ("--sglang_args []", "--sglang_args must be a JSON object .* not '\\[\\]'"),
        ("--sglang_args {a}", "--sglang_args must be a JSON object"),
        ("--prompts_per_step 1 --updates_per_step 2", "--prompts_per_step must be at least 2, not 1"),
    ],
)
def test_bad_flags_are_named(arguments, said):
    with pytest.raises(UserError, match=said) as raised:
        checked_config(*arguments.split())
    assert "\n" not in str(raised.value)


def test_the_default_flags_pass():
    assert checked_config("--engine", "local").engine == "local"


def test_a_recipe_may_compare_no_groups():
    config = Config(engine="local", group_size=1)
    with pytest.raises(UserError, match="--group_size"):
        checks.check_config(config)
    config.compares_groups = False
    checks.check_config(config)
    config.compares_groups = lambda: True
    with pytest.raises(UserError, match="--group_size"):
        checks.check_config(config)


@pytest.mark.parametrize(
    "world, local, flags, said",
    [
        (2, 2, {"tp_size": 3}, "--tp_size 3 does not divide the number of processes, 2 per machine"),
        (4, 2, {"tp_size": 4}, "--tp_size 4 does not divide"),
        (4, 4, {"tp_size": 2, "dp_replicate": 4}, "--dp_replicate 4 does not divide the 2 data-parallel"),
        (
            4,
            4,
            {"prompts_per_step": 7, "updates_per_step": 2},
            "--prompts_per_step must be at least 8",
        ),
        (4, 4, {"prompts_per_step": 4, "updates_per_step": 2, "tp_size": 2}, ""),
    ],
)
def test_processes_that_do_not_fit(monkeypatch, world, local, flags, said):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    if not said:
        checks.check_processes(Config(**flags))
        return
    with pytest.raises(UserError, match=said):
        checks.check_processes(Config(**flags))


def test_sglang_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--engine sglang: SGLang is not installed; pip install"):
        checks.check_config(Config(engine="sglang"))


@pytest.mark.parametrize(
    "flags, name",
    [
        ({"engine": "http://user:pass@host:1,http://host:2"}, "--engine"),
        ({"engine": "http://host:2,http://key@host:1"}, "--engine"),
        ({"engine": "http://me:pass@[bad"}, "--engine"),
        ({"model": "https://me:pass@host/model"}, "--model"),
        ({"sglang_args": '{"api_key": "x"}'}, "--sglang_args contains api_key"),
    ],
)
def test_a_secret_in_a_flag_is_refused_before_it_is_written(flags, name):
    with pytest.raises(UserError, match=name) as raised:
        checks.check_config(Config(**{"engine": "local"} | flags))
    assert "pass" not in str(raised.value).replace("password", "")


WORDS = "none mean token clip True nan inf -1 0 1e400 {} null http:// [] local".split()
VALUES = strategies.one_of(
    strategies.text(max_size=12),
    strategies.integers().map(str),
    strategies.floats().map(str),
    strategies.sampled_from(WORDS),
)
NAMES = strategies.sampled_from([*(field.name for field in fields(Config)), "lrr", ""])


@settings(max_examples=80, deadline=None)
@given(strategies.lists(strategies.tuples(NAMES, VALUES), max_size=4))
def test_any_flags_make_a_config_or_one_line(given_flags):
    HfArgumentParser.error = checks.raise_parser_error
    try:
        checked_config(*[text for name, value in given_flags for text in (f"--{name}", value)])
    except UserError as error:
        assert "--" in str(error) or "unrecognized" in str(error)


# ---- GPU, output folder ----------------------------------------------------------------------------------
def test_a_gpu_that_torch_cannot_use_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: False)
    here = tmp_path / "nvidia0"
    here.touch()
    with pytest.raises(UserError, match="torch cannot use a GPU: .+; repair this, or set --device cpu"):
        checks.check_gpu(Config(device="cuda"), ["--device=cuda"])
    monkeypatch.setattr(checks, "GPU_FILE", tmp_path / "none")
    checks.check_gpu(Config(device="cpu"), [])
    monkeypatch.setattr(checks, "GPU_FILE", here)
    with pytest.raises(UserError, match="torch cannot use a GPU: "):
        checks.check_gpu(Config(device="cpu"), ["--lr", "1"])
    checks.check_gpu(Config(device="cpu"), ["--device", "cpu"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checks.check_gpu(Config(device="cpu"), [])


def test_output_folders_that_cannot_be_used(tmp_path):
    checks.check_output(Config(output_dir=str(tmp_path / "new/run")))
    assert not list(tmp_path.iterdir())
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=f"--output_dir {tmp_path} already holds a run; choose another"):
        checks.check_output(Config(output_dir=str(tmp_path)))
    checks.check_output(Config(output_dir=str(tmp_path), resume="auto"))
    folder = tmp_path / "metrics.jsonl/run"
    with pytest.raises(UserError, match=f"--output_dir {folder} cannot be written: .* is not a writable"):
        checks.check_output(Config(output_dir=str(folder)))
    for folder in ("x" * 256, "new/" + "x" * 256, "/".join(["y" * 250] * 20)):
        with pytest.raises(UserError, match=r"--output_dir cannot be written \(File name too long\): /"):
            checks.check_output(Config(output_dir=str(tmp_path / folder)))


# ---- Model, tokenizer, data ------------------------------------------------------------------------------
def test_bad_models_are_named(tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    (tmp_path / "nothing").mkdir()
    Qwen3Config().save_pretrained(tmp_path / "weightless")
    random_model(tmp_path / "window", "qwen2", use_sliding_window=True, sliding_window=4)
    random_model(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    cases = {
        "bert": "is a bert; it must be one of qwen2, qwen3",
        "nothing": "is neither a model folder nor on the Hub",
        "weightless": "has no weights",
        "window": "uses sliding-window attention",
        "fp8": "is quantized",
    }
    for name, said in cases.items():
        with pytest.raises(UserError, match=f"--model {tmp_path / name} {said}"):
            checks.check_model(Config(model=str(tmp_path / name)))
    with pytest.raises(UserError, match="--model nobody/nothing is neither a model folder nor on the Hub"):
        checks.check_model(Config(model="nobody/nothing"))


def test_sizes_that_do_not_fit_are_named(tmp_path):
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}
    folder = str(random_model(tmp_path, "qwen2", **heads))
    with pytest.raises(UserError, match="--tp_size 2 does not divide the model's num_attention_heads 3"):
        checks.check_model(Config(model=folder, tp_size=2))
    with pytest.raises(
        UserError,
        match="--max_new_tokens 256 leaves no room for a prompt in a context of 256 tokens; lower it",
    ):
        checks.check_model(Config(model=folder, max_new_tokens=256))
    assert checks.check_model(Config(model=folder, max_new_tokens=56)) == (folder, 200)


def truncate(file: Path, tensors: dict):
    file.write_bytes(file.read_bytes()[:-100])


def remove(file: Path, tensors: dict):
    del tensors[UP]
    save_file(tensors, file)


def reshape(file: Path, tensors: dict):
    save_file(tensors | {UP: tensors[UP].T.contiguous()}, file)


def lose_a_shard(file: Path, tensors: dict):
    names = {name: "2.safetensors" if name == UP else file.name for name in tensors}
    file.with_suffix(".safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    remove(file, tensors)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "damage, said",
    [
        (truncate, "model.safetensors is damaged .*not fully covered.*; download it again"),
        (lambda file, tensors: file.write_bytes(b"version https"), "model.safetensors is damaged"),
        (remove, f"model.safetensors lacks {UP}"),
        (reshape, rf"{UP} in model.safetensors has the shape \[32, 48\]; .* \[48, 32\]"),
        (lose_a_shard, f"2.safetensors lacks {UP}"),
    ],
)
def test_damaged_weights_are_named(tmp_path, damage, said):
    folder = random_model(tmp_path / "model")
    checks.check_weights(str(folder))
    file = folder / "model.safetensors"
    damage(file, load_file(file))
    with pytest.raises(UserError, match=f"--model {folder}: {said}"):
        checks.check_weights(str(folder))


def test_weights_that_can_be_loaded_pass(tmp_path, mesh):
    for tied in (True, False):
        folder = random_model(tmp_path / f"model{tied}", tied=tied)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        assert ("lm_head.weight" in tensors) is not tied
        head = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        save_file({"lm_head.weight": head, "further": torch.ones(2)}, folder / "second.safetensors")
        save_file(tensors, file)
        checks.check_weights(str(folder))
        train.load_policy(str(folder), mesh, Config(device="cpu"), 512)


def changed_tokenizer(folder: Path, **values) -> str:
    """The tiny tokenizer with other values in its tokenizer_config.json; None takes one away."""
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return str(folder)


def test_bad_tokenizers_are_named(tmp_path):
    assert checks.check_tokenizer(changed_tokenizer(tmp_path / "padless", pad_token=None)).pad_token is None
    with pytest.raises(UserError, match="no eos_token; name the token.*endless/tokenizer_config.json"):
        checks.check_tokenizer(changed_tokenizer(tmp_path / "endless", eos_token=None))
    (Path(changed_tokenizer(tmp_path / "broken")) / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="broken: its tokenizer cannot be loaded"):
        checks.check_tokenizer(str(tmp_path / "broken"))
    (Path(changed_tokenizer(tmp_path / "speechless")) / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="speechless: its tokenizer has no chat template; use an instruct"):
        checks.check_tokenizer(str(tmp_path / "speechless"))


def checked_dataset(tokenizer, source: str, dataset_class=RLDataset, room: int = 1000, **flags):
    return checks.checked(dataset_class, Config(**{"data": source} | flags), tokenizer, room)(source)


def test_bad_data_is_named(tmp_path, tokenizer):
    contents = {"empty": "", "foreign": '{"prompt": "hi"}\n', "broken": '{"nums": [1, 2\n', "list": "[1]"}
    said = {
        "empty": "has no rows",
        "foreign": "row 0 cannot be made a prompt: KeyError: 'target'; see",
    }
    for name, content in contents.items():
        source = str(tmp_path / f"{name}.jsonl")
        Path(source).write_text(content)
        with pytest.raises(UserError, match=f"--data {source}.*{said.get(name, '')}"):
            checked_dataset(tokenizer, source)
    for source in (str(tmp_path / "none.jsonl"), "nobody/nothing", f"{COUNTDOWN}/test.jsonl:test"):
        with pytest.raises(UserError, match=f"--data {source} cannot be read, or is empty: "):
            checked_dataset(tokenizer, source)
    source = str(tmp_path / "foreign.jsonl")
    with pytest.raises(UserError, match=f"--eval_data {source}"):
        checked_dataset(tokenizer, source, data="other", eval_data=source)


def test_only_the_first_rows_are_made_prompts(tmp_path, tokenizer):
    source = str(tmp_path / "hole.jsonl")
    rows = [{"nums": [1, 2], "target": 3}] * 20 + [{"nums": [1, 2]}]
    Path(source).write_text("\n".join(map(json.dumps, rows)))
    data = checked_dataset(tokenizer, source)
    assert len(data) == 21 and data.source == source and data[3].row == rows[3] and len(list(data.rows)) == 21
    with pytest.raises(UserError, match="row 20 cannot be made a prompt: KeyError"):
        data[20]
    with pytest.raises(IndexError):
        data[21]


def test_prompts_that_are_all_too_long(tokenizer):
    source = f"{COUNTDOWN}/test.jsonl"
    with pytest.raises(
        UserError, match=r"the first 8 prompts have \d+ tokens or more; .* room for 10 beside"
    ):
        checked_dataset(tokenizer, source, room=10)


@pytest.mark.parametrize(
    "returned, said",
    [
        ({"prompt": "Hi"}, "Odd.__getitem__ returned a dict for row 0; it must return a Sample"),
        (None, "Odd.__getitem__ returned None for row 0"),
        (
            Sample([], {}, state={"lock": threading.Lock()}),
            "row 0: sample.state cannot be copied .*lock.*env_",
        ),
        (Sample([], {"lock": threading.Lock()}), "row 0: sample.row cannot be copied for each completion"),
        (Sample("Hi", {}), "sample.messages of row 0 must be a list such as .*, not 'Hi'"),
        (Sample([{"text": "Hi"}], {}), "sample.messages of row 0 must be a list such as .* not .{'text'"),
    ],
)
def test_what_a_dataset_returns_is_checked(tokenizer, returned, said):
    class Odd(RLDataset):
        def __getitem__(self, index):
            return returned

    source = f"{COUNTDOWN}/test.jsonl"
    with pytest.raises(UserError, match=f"--data {source}: {said}") as raised:
        checked_dataset(tokenizer, source, Odd)
    assert "\n" not in str(raised.value)


def test_a_prompt_without_tokens_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(checks, "encode_prompt", lambda tokenizer, messages: [])
    with pytest.raises(UserError, match="the prompt of row 0 has no tokens; see the tokenizer"):
        checked_dataset(tokenizer, f"{COUNTDOWN}/test.jsonl")


@pytest.mark.parametrize("encoding, byte", [("latin-1", 14), ("utf-16", 0)])
def test_data_that_is_not_utf8_is_named(tmp_path, tokenizer, encoding, byte):
    source = str(tmp_path / "rows.jsonl")
    Path(source).write_text('{"question": "ça", "answer": "1"}\n', encoding)
    with pytest.raises(UserError, match=f"--data {source} is not UTF-8 at byte {byte}; save it as UTF-8"):
        checked_dataset(tokenizer, source)


def test_messages_that_do_not_fit_the_chat_template(tokenizer):
    class Mute(RLDataset):
        def __getitem__(self, index):
            return Sample([{"role": "user", "content": object()}], {})

    source = f"{COUNTDOWN}/test.jsonl"
    with pytest.raises(
        UserError, match=f"--data {source}: the prompt of row 0 does not fit the chat template"
    ):
        checked_dataset(tokenizer, source, Mute)


# ---- Errors while a run goes on --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "message, cause",
    [
        ("[../gloo/transport/tcp/pair.cc:554] Connection closed by peer [10.77.0.2]:14039.", "rank ended"),
        ("[/gloo/transport/tcp/unbound_buffer.cc:91] Timed out waiting 60000ms", "3 times --engine_timeout"),
        ("Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:144] no", "GLOO_SOCKET_IFNAME"),
        ("mat1 and mat2 shapes cannot be multiplied", ""),
    ],
)
def test_lost_contact_between_ranks_is_told_from_other_errors(message, cause):
    line = checks.explain(RuntimeError(message))
    assert cause in line and "\n" not in line and bool(line) == bool(cause)


def test_what_is_said_of_an_error():
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has\nx")
    line = checks.explain(out_of_memory)
    assert line.startswith("CUDA out of memory: lower --tokens_per_micro_batch") and "\n" not in line
    assert checks.explain(UserError("a\nb")) == "a b"
    assert checks.explain(ConnectionError("gone")) == "gone"
    assert checks.explain(TimeoutError()) == "TimeoutError"
    assert checks.explain(KeyboardInterrupt()) == "interrupted by Ctrl-C"
    assert checks.brief(ValueError("field 'a':\n  no int\nmore")) == "field 'a': no int"
    assert checks.explain(OSError(errno.ENOSPC, "No space left on device", "/a/b")).startswith(
        "No space left on device: /a/b"
    )
    assert checks.explain(KeyError("x")) == checks.explain(OSError(errno.ENOENT, "x")) == ""


def test_errors_become_one_line_and_torchrun_learns_them(tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))

    def told() -> str:
        return json.loads(report.read_text())["message"]["message"]

    with pytest.raises(UserError, match="^gone$"), checks.one_line_errors():
        raise ConnectionError("gone")
    assert told() == "gone"
    with pytest.raises(UserError, match="^interrupted"), checks.one_line_errors():
        raise KeyboardInterrupt
    with pytest.raises(KeyError), checks.one_line_errors():
        raise KeyError("the cause")
    assert told() == "KeyError: 'the cause'"
    with pytest.raises(UserError, match="--lr"):
        parse_flags(Config, ["--lr", "fast"])
    assert "--lr" in told()


class FakeTrainer:
    """What CheckedTrainer builds on, without a model; `results` are those of learn."""

    def __init__(self, config, dataset_class, reward_fn, env_step):
        self.config = config
        self.reward_fn = reward_fn
        self.folder = Path("folder")

    def open_log(self):
        pass

    def learn(self, samples):
        return {"grad_norm": self.norms.pop(0)}

    def sample(self, dataset, prompts, group_size, temperature):
        return [sample for place, sample in prompts if sample is not None]

    def write(self, step, metrics, samples):
        raise OSError(errno.ENOSPC, "No space left on device")

    score = train.Trainer.score
    episode = train.Trainer.episode
    play = turns.extend(train.Trainer).play


def checked_trainer(mesh, **flags):
    trainer = object.__new__(checks.extend(FakeTrainer))
    FakeTrainer.__init__(trainer, Config(**flags), None, None, None)
    trainer.mesh = mesh
    trainer.skipped_prompts = 0
    trainer.skipped_steps = 0
    return trainer


def made_samples(total: int, failed: int) -> list[Sample]:
    samples = [Sample([], {}, key=(i, 0)) for i in range(total)]
    for i, sample in enumerate(samples[total - failed :]):
        sample.failure = f"KeyError: {i}"
    return samples


def test_gradients_that_are_never_finite_end_a_run(mesh):
    trainer = checked_trainer(mesh)
    trainer.norms = [math.nan] * 4 + [1.0] + [math.inf] * 5
    for _ in range(9):
        trainer.learn(made_samples(2, 0))
    with pytest.raises(UserError, match="gradients of 5 steps in a row were not finite.*lower --lr"):
        trainer.learn(made_samples(2, 0))


def test_prompts_that_are_too_long_are_counted(mesh):
    trainer = checked_trainer(mesh)
    trainer.norms = [1.0, 1.0]
    samples = made_samples(4, 0)
    prompts = [(i, sample) for i, sample in enumerate([*samples, None])]
    assert trainer.learn(trainer.sample(None, prompts, 1, 1.0)) == {"grad_norm": 1.0, "skipped_prompts": 1}
    assert trainer.learn(trainer.sample(None, prompts[:4], 1, 1.0)) == {"grad_norm": 1.0}


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("nosuch", None, "--data .*nosuch is neither a .jsonl, .json or .parquet file nor owner/name"),
        ("rows.csv", "a,b", "--data .*rows.csv is neither a .jsonl"),
        ("/no/such/rows.txt", None, "--data /no/such/rows.txt is neither a .jsonl"),
        ("x" * 300, None, "--data x+ is neither a .jsonl"),
        (
            "rows.jsonl",
            '{"question": "a"}\n\n{"question": \n',
            "--data .*rows.jsonl: line 3 is not JSON: Expecting value",
        ),
    ],
)
def test_sources_that_cannot_be_read_are_named(tmp_path, monkeypatch, name, content, said):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    config = Config(data=name, eval_data="")
    with pytest.raises(UserError, match=said):
        checks.checked(RLDataset, config, None, 100)(name)


def test_a_reward_fn_that_blocks_is_announced(monkeypatch, capsys):
    def pause():
        time.sleep(0.5)  # "here"

    def slow(sample):
        pause()
        return sample

    async def waiting(sample):
        await asyncio.sleep(0.3)
        return sample

    monkeypatch.setattr(checks, "REMINDER_SECONDS", 0.1)
    assert checks.with_reminders(slow)(1.5) == 1.5
    lines = capsys.readouterr().out.splitlines()
    here = pause.__code__.co_firstlineno + 1
    said = f"reward_fn has been running for 0 s, now at {__file__}:{here}, and everything else waits for it"
    assert len(lines) == 3 and all(said in line for line in lines)  # after 0.1, 0.2 and 0.4 s
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert asyncio.run(checks.with_reminders(waiting)(2)) == 2
    thread = threading.Thread(target=checks.with_reminders(slow), args=(1,))  # where no signal is handled
    thread.start()
    thread.join()
    assert not capsys.readouterr().out


def test_an_alarm_of_reward_fn_stays_its_own(monkeypatch):
    def alarmed(sample):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(5)

    def ring(number, frame):
        raise InterruptedError

    monkeypatch.setattr(checks, "REMINDER_SECONDS", 1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(InterruptedError):
            checks.with_reminders(alarmed)(None)
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)


def test_steps_with_very_many_completions_are_announced(mesh, capsys):
    checked_trainer(mesh, prompts_per_step=100, group_size=1000).open_log()
    assert not capsys.readouterr().out
    checked_trainer(mesh, prompts_per_step=4, group_size=100_000).open_log()
    assert "Each step samples 400,000 completions (--prompts_per_step times" in capsys.readouterr().out


def test_a_dataset_is_a_class():
    with pytest.raises(UserError, match="takes a class, such as a subclass of RLDataset"):
        checks.checked(object(), Config(), None, 100)


def test_a_full_disk_is_named(mesh):
    with pytest.raises(UserError, match="folder cannot be written: No space left on device"):
        checked_trainer(mesh).write(1, {}, [])


def test_timeouts_name_their_flag(mesh, tokenizer):
    async def forever(sample):
        await asyncio.sleep(60)

    async def generate(ids, *_):
        return [5], [-1.0], 1, False

    async def impatient(sample):
        raise TimeoutError("the judge was busy")

    trainer = checked_trainer(mesh, reward_timeout=0.05, max_turns=2, device="cpu")
    trainer.engine = SimpleNamespace(generate=generate)
    trainer.reward_timeout = 0.05
    trainer.has_failed = False
    trainer.tokenizer = tokenizer
    trainer.prompt_limit = 99
    cases = [
        (forever, None, "reward_fn or env_step took over 0.05 s (--reward_timeout)"),
        (impatient, None, "the judge was busy"),
        (forever, forever, "reward_fn or env_step took over 0.05 s (--reward_timeout)"),
    ]
    for reward_fn, env_step, said in cases:
        trainer.reward_fn = reward_fn
        trainer.env_step = env_step
        sample = asyncio.run(trainer.episode(Sample([], {}), 1.0))
        assert said in sample.failure


# ---- Whole runs ------------------------------------------------------------------------------------------
def small_run(
    folder: Path, mesh, monkeypatch, *more: str, extras="variants compile offload monitor gate checks"
):
    """A trainer with these extras, on the embedded task."""
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    flags = "--steps 1 --prompts_per_step 4 --group_size 2 --max_new_tokens 8 --eval_every 1"
    config = parse_flags(Config, [*flags.split(), "--output_dir", str(folder), *more])
    config.eval_data += ":train[:4]"
    trainer_class = train.Trainer
    for name in extras.split():
        trainer_class = train.load_extra(name, "").extend(trainer_class)
    return trainer_class(config, RLDataset, lambda sample: sample.key[1] - 0.5, None)


def test_a_run_with_all_of_these_extras(tmp_path, monkeypatch, mesh, capsys):
    trainer = small_run(tmp_path / "run", mesh, monkeypatch, "--seed", "7", "--offload", "True")
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
    with pytest.raises(UserError, match="--output_dir .*/run already holds a run"):
        small_run(tmp_path / "run", mesh, monkeypatch, extras="checks")


def test_statistics_return_to_their_tokens():
    samples = some_samples(2, 2)
    batch = train.Batch(samples, "cpu")
    values = torch.arange(len(batch.targets)).float() + 1
    monitor.write_back(batch, {"weight": values})
    found = np.concatenate([sample.tokens["weight"][sample.tokens["mask"] == 1] for sample in samples])
    assert found.tolist() == values.tolist()
    assert not any(sample.tokens["weight"][sample.tokens["mask"] == 0].any() for sample in samples)


def test_trained_tokens_are_marked(tokenizer):
    sample = Sample([], {})
    for text, mask in (("1+2", 0), ("=", 1), ("3", 1), ("4", 0), ("5", 1)):
        sample.append(tokenizer.encode(text), mask=mask)
    assert monitor.marked(sample.tokens, tokenizer) == "1+2«=3»4«5»"


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


@pytest.mark.slow
def test_one_process_ends_with_code_2_and_one_line_before_it_writes(tmp_path):
    done = run("train.py", "--lrr", "1", "--output_dir", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--lrr" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_screen_without_the_characters_ends_nothing(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    checks.extend(FakeTrainer)
    print("«😀» \ud800", flush=True)
    assert screen.buffer.getvalue() == b"\\xab\\U0001f600\\xbb \\ud800\n"
