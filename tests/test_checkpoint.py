"""Tests of extras/checkpoint.py. Most train in this very process, a few steps of the embedded job."""

import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from extras import checkpoint as module
from extras import monitor, optimizer, updates, variants
from extras.checkpoint import (
    Lock,
    Stop,
    add_saved_flags,
    checkpoints,
    claim_run,
    load_checkpoint,
    random_states,
    read_state,
    restore_logs,
    save_checkpoint,
    set_random_states,
)
from tests.conftest import HERE, Config, alone, make_trainer, parse_flags, random_model, run
from tests.runs import EQUAL, count_lines, differences, read_metrics, read_tensors, start, wait_for
from train import UserError

SMALL = ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "32", "--steps", "4"]
SMALL += ["--eval_every", "2", "--eval_data", str(HERE / "assets/countdown/test.jsonl") + ":train[:8]"]
BESIDE = ["--lr_schedule", "cosine", "--kl_coef", "0.01"]  # whose factors and reference a resume restores
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)  # pages of it for a failed test
interruptions = []  # signals to send to this process from a reward of the fourth rollout


def reward_fn(sample) -> float:
    """A reward that draws from every generator that a checkpoint restores."""
    if interruptions and sample.key[0] >= 12:  # rows of the evaluation end at 7
        os.kill(os.getpid(), interruptions.pop())
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return train.reward_fn(sample) + 0.1 * noise


def make(*arguments):
    """A trainer in this process, alone, for a command line."""
    with pytest.MonkeyPatch.context() as patch:
        mesh = alone()
        patch.setattr(train, "init_distributed", lambda config: mesh)
        patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        trainer_class = updates.extend(optimizer.extend(variants.extend(monitor.extend(train.Trainer))))
        trainer_class = module.extend(trainer_class)
        config = parse_flags(Config, sys.argv[1:])
        return trainer_class(config, train.RLDataset, reward_fn, None)


def fit(*arguments):
    """Trains in this process. Returns the trainer."""
    trainer = make(*arguments)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        trainer.fit()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return trainer


def seed_generators():
    """The random states that the run `saved` begins with."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four steps with a checkpoint after the second and the fourth. Not to be changed.

    It has a schedule, and a reference, which is the initial policy after a resume, too.
    """
    seed_generators()
    folder = tmp_path_factory.mktemp("saved") / "run"
    fit(*SMALL, *BESIDE, "--save_every", 2, "--output_dir", folder)
    return folder


# ---- Resume ----------------------------------------------------------------------------------------------
def test_a_checkpoint_is_complete_and_holds_no_code(saved):
    assert [path.name for path in checkpoints(saved)] == ["checkpoint-2", "checkpoint-4"]
    assert not (saved / "partial").exists()
    folder = saved / "checkpoint-4"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors", ".jinja"}
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    final = AutoModelForCausalLM.from_pretrained(saved / "model")
    torch.testing.assert_close(model.state_dict(), final.state_dict(), rtol=0, atol=0)
    state = read_state(folder)
    assert (state["step"], state["prompts_drawn"], state["version"]) == (4, 16, 5)
    assert state["updates"] == {"actor": 8}  # --updates_per_step of the embedded job is 2
    assert len(read_tensors(saved)) > 100


def test_a_branch_equals_its_run_to_the_bit(tmp_path, saved):
    trainer = fit("--resume", saved / "checkpoint-2", "--output_dir", tmp_path / "branch")
    assert differences(saved, tmp_path / "branch") == EQUAL
    assert trainer.config.prompts_per_step == 4 and trainer.config.save_every == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_ended_by_a_signal_saves_and_resumes(tmp_path, saved, capsys, number):
    """The fourth rollout is dropped, and leaves no trace in the resumed run."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).write_text("of a run that was killed before its first checkpoint\n")
    seed_generators()
    interruptions.append(number)
    fit(*SMALL, *BESIDE, "--save_every", 2, "--output_dir", folder, "--resume", "auto")
    assert f"{number.name}: ended after step 3; --resume {folder} continues" in capsys.readouterr().out
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2", "checkpoint-3"]
    assert not (folder / "model").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("what a run wrote after its last checkpoint is cut off\n")
    fit("--resume", "auto", "--output_dir", folder)
    assert differences(saved, folder) == EQUAL
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-3", "checkpoint-4"]


def test_random_states_survive_json():
    before = json.loads(json.dumps(random_states()))

    def draw():
        return random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()

    first = draw()
    set_random_states(before)
    assert draw() == first


def test_resuming_adds_the_saved_flags_before_those_given_now(saved):
    arguments = ["--lr", "1", "--resume", "x", f"--resume={saved}", "--no_normalize_std"]
    arguments += ["--temperature=0.5"]
    found = parse_flags(Config, add_saved_flags(arguments))
    assert (found.prompts_per_step, found.steps, found.save_every) == (4, 4, 2)  # saved
    assert (found.lr, found.normalize_std, found.temperature) == (1.0, False, 0.5)  # given now
    assert (found.output_dir, found.resume) == ("", str(saved))
    assert add_saved_flags(["--lr", "1"]) == ["--lr", "1"]
    assert add_saved_flags(["--resume"]) == ["--resume"]


def test_the_place_in_the_data_and_the_learning_rate_follow_the_flags_given_now(tmp_path, saved):
    flags = ["--output_dir", tmp_path / "run", "--prompts_per_step", "3", "--steps", "9"]
    trainer = make("--resume", saved, *flags, "--lr", "1", "--warmup_steps", "16")
    assert trainer.actor.optimizer.param_groups[0]["lr"] == pytest.approx(9 / 16)  # for the 9th update
    trainer.sample = lambda dataset, prompts, *_: prompts
    places = [place for place, _ in trainer.rollout()]  # 4 steps of 4 prompts were drawn
    assert places == [16, 17, 18] and [place for place, _ in trainer.rollout()] == [19, 20, 21]
    trainer.lock.release()


# ---- What cannot be resumed ------------------------------------------------------------------------------
def claim(resume="", output_dir="") -> tuple:
    """Settles the folder of a run. Returns it and the checkpoint."""
    config = SimpleNamespace(resume=str(resume), output_dir=str(output_dir))
    lock, checkpoint = claim_run(config)
    lock.release()
    return config.output_dir, checkpoint


def test_no_run_is_written_over(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"runs/[\d_-]+", claim()[0])
    with pytest.raises(UserError, match="checkpoint-4 is later and would be lost"):
        claim(saved / "checkpoint-2")
    assert claim(saved / "checkpoint-2", "branch") == ("branch", saved / "checkpoint-2")
    assert claim(saved) == claim("auto", saved) == (str(saved), saved / "checkpoint-4")
    for resume in ("", saved):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other/metrics.jsonl").touch()
        with pytest.raises(UserError, match="--output_dir other already holds a run"):
            claim(resume, "other")
    assert claim("auto", "other") == ("other", None)  # it never reached a checkpoint
    (tmp_path / "other/model").mkdir()  # but this one was finished
    with pytest.raises(UserError, match="already holds a run"):
        claim("auto", "other")
    (tmp_path / "other/metrics.jsonl").unlink()
    with pytest.raises(UserError, match="--output_dir other has a folder model"):
        claim("", "other")
    for nothing in (tmp_path, "x" * 300):
        with pytest.raises(UserError, match="is neither a checkpoint nor a run"):
            claim(nothing)
    with pytest.raises(UserError, match="looks for checkpoints in --output_dir: set it, too"):
        claim("auto")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/run is not writable: Not a directory"):
        claim("", "file/run")


def test_damage_ends_in_one_line(tmp_path, saved, mesh):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    newest = copy / "checkpoint-4"
    (shard,) = (newest / "state").iterdir()
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    sizes = f"state/{shard.name} has .* bytes instead of {len(content)}"
    with pytest.raises(UserError, match=f"checkpoint-4 is damaged: {sizes}; try an older one"):
        add_saved_flags(["--resume", str(copy)])
    actor = make_trainer(Config(model="assets/tiny", device="cpu"), mesh).actor
    state = json.loads((newest / "state.json").read_text())
    shard.write_bytes(b"\xff" * len(content))  # as long as it was
    with pytest.raises(UserError, match="checkpoint-4 is damaged"):
        load_checkpoint(newest, state, {"actor": actor})
    shard.unlink()
    with pytest.raises(UserError, match="checkpoint-4 is damaged: .*No such file"):
        read_state(newest)
    for content in ("{", "[]", "{}"):
        (newest / "state.json").write_text(content)
        with pytest.raises(UserError, match="checkpoint-4 is damaged"):
            read_state(newest)
    assert read_state(copy / "checkpoint-2")["step"] == 2
    with pytest.raises(UserError, match="metrics.jsonl has .* bytes, less than the 1000000"):
        restore_logs(saved, copy, {"metrics.jsonl": 1000000})


def test_a_checkpoint_of_another_model_ends_in_one_line(tmp_path, saved, mesh):
    folder = random_model(tmp_path / "other", "qwen3", tied=True)
    actor = make_trainer(Config(model=str(folder), device="cpu"), mesh).actor
    state = read_state(saved / "checkpoint-4")
    with pytest.raises(UserError, match="is of another model: its actor.weight.model.embed_tokens.* is "):
        load_checkpoint(saved / "checkpoint-4", state, {"actor": actor})
    with pytest.raises(UserError, match="is of another model or recipe: it has no critic.weight"):
        load_checkpoint(saved / "checkpoint-4", state, {"critic": actor})


def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path, saved, mesh):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    actor = make_trainer(Config(model="assets/tiny", device="cpu"), mesh).actor
    state = {"step": 5, "random": {}}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (saved / "model/model.safetensors").stat().st_size + 1000  # enough for the model, not for Adam
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        with pytest.raises(UserError, match="partial could not be written: .*Earlier checkpoints are intact"):
            save_checkpoint(copy, state, {"actor": actor}, lambda to: actor.save("assets/tiny", to))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not (copy / "partial").exists()
    assert [path.name for path in checkpoints(copy)] == ["checkpoint-2", "checkpoint-4"]
    assert read_state(copy / "checkpoint-4")["step"] == 4
    (copy / "partial").mkdir()  # as a run leaves it that was killed
    save_checkpoint(copy, state, {"actor": actor}, lambda to: actor.save("assets/tiny", to))
    assert [path.name for path in checkpoints(copy)] == ["checkpoint-4", "checkpoint-5"]


# ---- Lock ------------------------------------------------------------------------------------------------
def test_a_lock_keeps_others_out_while_its_holder_lives(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").write_text("1 on another host")  # whose process was killed
    lock = Lock(folder)
    for resume in ("", "auto"):
        with pytest.raises(UserError, match=rf"{folder} is in use by process {os.getpid()} on \S+; wait for"):
            claim(resume, folder)
    Lock(tmp_path / "another").release()
    reading, writing = os.pipe()
    child = os.fork()  # a process that the holder started
    if child == 0:
        os.write(writing, b".")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    lock.file.close()  # as when the holder is killed
    Lock(folder).release()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not folder.exists()  # nothing else was in it


# ---- Signals ---------------------------------------------------------------------------------------------
def test_a_second_signal_ends_the_process_after_a_moment(monkeypatch, mesh):
    codes = []
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    stop = Stop()
    stop.check()  # nothing happened
    stop.handle(signal.SIGINT, None)
    clock.now += 1.9  # what a launcher forwards
    stop.handle(signal.SIGTERM, None)
    assert codes == [] and stop.signal == signal.SIGINT
    with pytest.raises(module.Stopped, match="SIGINT"):
        stop.check()
    clock.now += 0.2
    stop.handle(signal.SIGTERM, None)
    assert codes == [128 + signal.SIGTERM]


@pytest.mark.slow
def test_ctrl_c_to_torchrun_saves(tmp_path):
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 400, "--output_dir", folder]
    process = start(tmp_path / "log", "train.py", *flags, processes=2)
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: count_lines(metrics) > 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; torchrun forwards it once more
    process.wait(timeout=60)
    assert "ended after step" in (tmp_path / "log").read_text()
    (checkpoint,) = checkpoints(folder)
    assert count_lines(metrics) == read_state(checkpoint)["step"] + 1


# ---- Several processes. Those that are killed are in test_faults.py ----------------------------------------
@pytest.mark.slow
def test_each_step_may_have_another_number_of_ranks(tmp_path):
    """1, then 2 replicas, then 2 x 2 tensor-parallel ones, then 1 again: the steps of a run of 1."""
    whole, parts = tmp_path / "run", tmp_path / "parts"
    done = run("train.py", *SMALL, "--output_dir", whole)
    assert done.returncode == 0, done.stderr[-3000:]
    for step, (processes, tp, copies) in enumerate([(0, 1, 1), (2, 1, 2), (4, 2, 1), (0, 1, 1)], 1):
        flags = [*SMALL, "--steps", step, "--tp_size", tp, "--dp_replicate", copies, "--save_every", 1]
        done = run("train.py", *flags, "--resume", "auto", "--output_dir", parts, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
    expected, found = read_metrics(whole), read_metrics(parts)
    assert [record["step"] for record in found] == [0, 1, 2, 3, 4]
    for step, name in product([1, 2, 3, 4], ["loss", "grad_norm", "entropy", "reward"]):
        assert found[step][name] == pytest.approx(expected[step][name], abs=1e-5, rel=1e-4), (step, name)
