"""How long does a training step take beside TRL's GRPOTrainer?

    python -m bench.trl_step [--rounds 7] [--cases "15+36 64+64 256+64"] [--micro_batches "32 64 128"]

Requires trl==1.16.0. On both sides and on one thread of a CPU a step is: 8 completions of each of the same 32
prompts by the embedded model, their rewards, two optimizer steps; all in fp32. Ours is one process with the
local engine, including its push and all extras. TRL samples with transformers' `generate`; its loop runs one
rollout at a time, in turn with ours, for several sizes of its micro-batches (the fastest is recorded), and
once more with its defaults, micro-batches of 8 and gradient checkpointing. A learning rate of 1e-9 leaves the
policy as it is, so that every round has the same work for both; the prompts are compared.

A case is the tokens of a prompt and of a completion. 15+36 is the embedded job: its completions end where the
model ends them, after 36 tokens on average. In other cases newlines fill the prompts, no completion ends
early, and rewards differ within every group, so that all samples are trained.

Seconds are CPU seconds, which other load on the machine disturbs less than wall time. A second table, on the
screen, has the positions that went through the model, including padding.
"""

import json
import shutil
import sys
import tempfile
import threading
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

import torch
from datasets import Dataset
from transformers import TrainerCallback

from bench.cost import Clock, make_trainer
from bench.measure import ASSETS, in_turn, options, ratio, record, show
from train import Config, RLDataset, Sample, encode_prompt, reward_fn, shuffled

DEFAULT = 8  # TRL's own size of a micro-batch; by default it also recomputes activations
JOB = "15+36"  # the case of the embedded job as it is
OFF = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
OFF |= {"eval_strategy": "no", "use_cpu": True, "bf16": False, "use_vllm": False, "shuffle_dataset": False}
GRPO = {"loss_type": "grpo", "scale_rewards": "group", "num_iterations": 1, "beta": 0.0, "weight_decay": 0.0}
GRPO |= {"lr_scheduler_type": "constant", "adam_beta1": 0.9, "adam_beta2": 0.99}
PARTS = ("rollout", "old log-probs", "update", "rest")


class FilledDataset(RLDataset):
    """The rows of a file as prompts of `length` tokens; 0: as they are."""

    def __init__(self, source: str, tokenizer, length: int):
        super().__init__(source)
        self.tokenizer = tokenizer
        self.length = length

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        missing = self.length - len(encode_prompt(self.tokenizer, sample.messages))
        sample.messages[0]["content"] += "\n" * missing  # each is a token
        return sample


def varied_reward(sample: Sample) -> float:
    """From 0 to 6, by chance."""
    return zlib.crc32(sample.text.encode()) % 7


def make_model(folder: Path, case: str) -> str:
    """The embedded model; if completions must not end, its end is a token that it does not write."""
    if case == JOB:
        return str(ASSETS / "tiny")
    shutil.copytree(ASSETS / "tiny", folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"eos_token": "<|endoftext|>"} if "tokenizer" in name else {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(content))
    return str(folder)


class Side:
    """A trainer whose steps are recorded: CPU seconds and positions by part, prompts, tokens, rewards."""

    def __init__(self):
        self.clock = Clock()
        self.positions = Counter()  # that models embedded, by part
        self.records = []

    def count(self, model):
        """Counts the positions that a model embeds from now on."""

        def add(module, arguments):
            self.positions[self.clock.stack[-1]] += arguments[0].numel()

        model.get_input_embeddings().register_forward_pre_hook(add)

    def turn(self):
        """One step."""
        self.clock.clear()
        self.positions.clear()
        self.records.append({})
        with self.clock.part("rest"):
            self.step()
        self.records[-1] |= {"seconds": dict(self.clock.cpu), "positions": dict(self.positions)}

    def note(self, samples: list[Sample], tokens: list[int]):
        """Records what was sampled, to show that both sides have the same work."""
        prompts = [sample.messages for sample in samples]
        reward = fmean(sample.reward for sample in samples)
        self.records[-1] |= {"prompts": prompts, "tokens": fmean(tokens), "reward": reward}


class Ours(Side):
    """Our trainer with all extras."""

    def __init__(self, folder: str, model: str, prompt: int, reward):
        super().__init__()
        self.trainer = make_trainer(folder, warmup_steps=0, model=model)
        self.trainer.reward_fn = reward
        self.trainer.data = FilledDataset(self.trainer.config.data, self.trainer.tokenizer, prompt)
        self.count(self.trainer.engine.model)
        self.count(self.trainer.actor.model)
        self.clock.attach(self.trainer, "rollout", "rollout")
        self.clock.attach(self.trainer, "reward_fn", "rest")
        self.clock.attach(self.trainer, "micro_batches", "old log-probs")
        self.clock.attach(self.trainer.actor, "backward", "update")
        self.clock.attach(self.trainer.actor, "optimizer_step", "update")

    def step(self):
        _, samples = self.trainer.step()
        self.note(samples, [int(sample.tokens["mask"].sum()) for sample in samples])


class Theirs(Side, TrainerCallback):
    """TRL's trainer. Its loop has a thread of its own and waits for its turn after each rollout's updates."""

    def __init__(self, trl, config: Config, samples: list[Sample], rounds: int, micro_batch: int, reward):
        super().__init__()
        self.reward_fn = reward
        self.updates = config.updates_per_step
        self.go = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.error = None
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.trainer = trl.GRPOTrainer(
            config.model,
            self.reward,
            self.arguments(trl, config, rounds, micro_batch),
            train_dataset=Dataset.from_list([{"prompt": one.messages} | one.row for one in samples]),
            callbacks=[self],
        )
        self.count(self.trainer.model)
        self.clock.attach(self.trainer, "_generate_and_score_completions", "old log-probs")
        self.clock.attach(self.trainer, "_generate", "rollout")
        self.clock.attach(self.trainer, "_calculate_rewards", "rest")
        self.clock.attach(self.trainer, "training_step", "update")
        self.clock.attach(self.trainer, "_clip_grad_norm", "update")

    def arguments(self, trl, config: Config, rounds: int, micro_batch: int):
        """The config as TRL's arguments. The others keep TRL's defaults; no other values were faster here."""
        share = config.prompts_per_step * config.group_size // config.updates_per_step
        return trl.GRPOConfig(
            output_dir=f"{config.output_dir}/trl",
            **OFF,
            gradient_checkpointing=config.gradient_checkpointing,
            max_steps=rounds * config.updates_per_step,
            generation_batch_size=share * config.updates_per_step,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=share // micro_batch,
            num_generations=config.group_size,
            max_completion_length=config.max_new_tokens,
            temperature=config.temperature,
            **GRPO,
            epsilon=config.clip_low,
            epsilon_high=config.clip_high,
            max_grad_norm=config.max_grad_norm,
            learning_rate=config.lr,
        )

    def reward(self, prompts, completions, completion_ids, nums, target, **_) -> list[float]:
        """Our reward_fn in TRL's form."""
        samples = []
        for messages, turns, numbers, goal in zip(prompts, completions, nums, target):
            sample = Sample(messages, {"nums": numbers, "target": goal}, turns=[turns[0]["content"]])
            sample.reward = self.reward_fn(sample)
            samples.append(sample)
        self.note(samples, [len(ids) for ids in completion_ids])
        return [sample.reward for sample in samples]

    def train(self):
        """What the thread runs."""
        torch.set_num_threads(1)  # a thread has a number of its own
        try:
            self.trainer.train()
        except BaseException as error:
            self.error = error
        self.done.release()

    def on_train_begin(self, args, state, control, optimizer, **_):
        """Everything is there: now it waits for the first turn."""
        self.clock.attach(optimizer, "step", "update")
        self.go.acquire()

    def on_step_end(self, args, state, control, **_):
        """After a rollout's last update it is the others' turn."""
        if state.global_step % self.updates == 0:
            self.done.release()
            self.go.acquire()

    def step(self):
        """Lets the thread run until its next turn. It starts after all trainers have been constructed."""
        if not self.thread.ident:
            self.thread.start()
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error


def rows_of(case: str, sides: dict[str, Side], times: dict) -> tuple[list[dict], list[dict]]:
    """Both tables of a case: medians over the rounds."""
    seconds = []
    positions = []
    for name, side in sides.items():
        assert [one["prompts"] for one in side.records] == [one["prompts"] for one in sides["ours"].records]
        records = side.records[1:]  # the first one warmed up
        row = {"case": case, "step of": name, "CPU s": median(times[name]["cpu"])}
        for part in PARTS:
            row[part] = median(one["seconds"].get(part, 0.0) for one in records)
        row["CPU / ours"] = ratio(times[name]["cpu"], times["ours"]["cpu"])
        row["wall / ours"] = ratio(times[name]["wall"], times["ours"]["wall"])
        seconds.append(row)
        row = {"case": case, "step of": name}
        for part in PARTS[:3]:
            row[part] = median(one["positions"].get(part, 0) for one in records)
        row["tokens per completion"] = fmean(one["tokens"] for one in records)
        row["reward"] = fmean(one["reward"] for one in records)
        positions.append(row)
    return seconds, positions


def measure_case(case: str, rounds: int, micro_batches: str) -> tuple[list[dict], list[dict]]:
    """The rows of a case, ours first and TRL's defaults last. Threads remain: each needs its own process."""
    import trl

    prompt = 0 if case == JOB else int(case.split("+")[0])
    reward = reward_fn if case == JOB else varied_reward
    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": Ours(folder, make_model(Path(folder, "model"), case), prompt, reward)}
        trainer, config = sides["ours"].trainer, sides["ours"].trainer.config
        assert case == JOB or config.max_new_tokens == int(case.split("+")[1])
        drawn = shuffled(len(trainer.data), config.seed)
        count = (rounds + 1) * config.prompts_per_step  # one round warms up
        samples = [trainer.data[row] for _, row in islice(drawn, count)]
        for size in map(int, micro_batches.split()):
            sides[f"TRL, micro-batches of {size}"] = Theirs(trl, config, samples, rounds + 1, size, reward)
        checkpointed = replace(config, gradient_checkpointing=True)
        sides["TRL, its defaults"] = Theirs(trl, checkpointed, samples, rounds + 1, DEFAULT, reward)
        times = in_turn({name: side.turn for name, side in sides.items()}, rounds)
    return rows_of(case, sides, times)


def main():
    """Measures, prints, writes."""
    micro_batches = "of TRL, in samples"
    cases = f"{JOB} 64+64 256+64"
    flags = options(__doc__, "trl_step", cases=(cases, "which"), micro_batches=("32 64 128", micro_batches))
    try:
        import trl

        trl.GRPOTrainer  # this imports it
    except (ImportError, RuntimeError) as error:
        sys.exit(f"bench.trl_step compares with TRL, which does not load ({error}): pip install trl==1.16.0")
    recorded = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for case in flags.cases.split():
            found = pool.submit(measure_case, case, flags.rounds, flags.micro_batches).result()
            for rows in found:
                show(rows)
            ours, *others, defaults = found[0]
            recorded += [ours, min(others, key=lambda row: row["CPU / ours"])]
            recorded += [defaults] if case == JOB else []
    record(flags.output, {"CPU seconds of a step, by part": recorded}, trl=trl.__version__)


if __name__ == "__main__":
    main()
