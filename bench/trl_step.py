"""How long does a training step take, compared with TRL's GRPOTrainer, and where does the time go?

    python -m bench.trl_step [--rounds 7] [--micro_batches 32,64,128] [--output assets/trl.json]

Needs trl==1.16.0. On both sides and on one thread of a CPU a step is: 8 completions of each of the same 32
prompts by the embedded model, their rewards, two optimizer steps; all in fp32. Ours is one process with the
local engine, including its push and all extras. TRL samples with transformers' `generate`; its loop runs one
rollout at a time, in turn with ours, for several sizes of its micro-batches, and the fastest one counts; and
once more with its defaults, micro-batches of 8 and gradient checkpointing. A learning rate of 1e-9 leaves the
policy as it is, so that every round has the same work for both.

Prints wall and CPU seconds and their ratios; by phase the CPU seconds (other load on the machine disturbs
them less), and the positions that went through the model, including padding.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from statistics import fmean, median

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # for the imports below, which read them once

import torch
from datasets import Dataset
from transformers import TrainerCallback

from bench import measure, overhead
from bench.measure import embedded_flags
from extras import add_flags
from train import Config, RLDataset, Sample, parse_flags, reward_fn

NEEDED = "trl==1.16.0"
DEFAULT = 8  # TRL's own size of a micro-batch; by default it also recomputes activations


class Phases:
    """CPU seconds of each phase, without phases inside it, and positions that models embedded meanwhile."""

    def __init__(self):
        self.stack, self.seconds, self.positions, self.since = (
            ["rest"],
            Counter(),
            Counter(),
            time.process_time(),
        )

    def tick(self):
        """Books the time since the last tick."""
        now = time.process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextmanager
    def phase(self, name: str):
        """What runs inside is this phase."""
        self.tick()
        self.stack.append(name)
        yield
        self.tick()
        self.stack.pop()

    def wrap(self, thing, method: str, name: str, without_grad: str = ""):
        """Makes every call of a method a phase, which may have another name without gradients."""
        inner = getattr(thing, method)

        @wraps(inner)
        def wrapped(*args, **options):
            with self.phase(name if torch.is_grad_enabled() else without_grad or name):
                return inner(*args, **options)

        setattr(thing, method, wrapped)

    def count(self, model):
        """Books the positions that a model embeds from now on."""
        model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: self.positions.update({self.stack[-1]: args[0].numel()})
        )

    @contextmanager
    def record(self, record: dict):
        """Books afresh, and puts what was booked into the record."""
        self.seconds.clear()
        self.positions.clear()
        self.since = time.process_time()
        yield
        self.tick()
        record |= dict(seconds=dict(self.seconds), positions=dict(self.positions))


class Ours:
    """Our trainer with all extras, which books its phases and keeps a record of each step."""

    def __init__(self, flags: dict):
        self.phases = Phases()
        self.records = []
        self.trainer = trainer = overhead.make_trainer(**flags)
        self.phases.count(trainer.engine.model)
        self.phases.count(trainer.actor.model)
        self.phases.wrap(trainer, "rollout", "rollout")
        self.phases.wrap(trainer, "reward_fn", "reward")
        self.phases.wrap(trainer.actor, "backward", "update")
        self.phases.wrap(trainer.actor, "step", "update")
        self.phases.wrap(trainer, "publish", "push")
        trainer.engine.sleep()
        trainer.publish()

    def turn(self):
        """One step."""
        self.records.append({})
        with self.phases.record(self.records[-1]):
            _, samples = self.trainer.step()
        prompts = []
        for sample in samples:
            prompts.append(sample.tokens["id"][: sample.tokens["mask"].argmax()].tolist())
        tokens = fmean(int(sample.tokens["mask"].sum()) for sample in samples)
        reward = fmean(sample.reward for sample in samples)
        self.records[-1] |= {"prompts": prompts, "tokens": tokens, "reward": reward}


class Theirs(TrainerCallback):
    """TRL's trainer. Its loop has its own thread, and waits for its turn after each rollout's updates."""

    def __init__(self, trl, config: Config, prompts: list, rounds: int, micro_batch: int):
        self.updates, self.phases, self.records = config.updates_per_step, Phases(), []
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        data = RLDataset(config.data)
        asked = []  # in the order of our trainer
        for _, row in prompts[: rounds * config.prompts_per_step]:
            asked.append(data[row])
        rows = [dict(prompt=sample.messages, **sample.row) for sample in asked]
        self.trainer = trl.GRPOTrainer(
            config.model,
            self.reward,
            self.arguments(trl, config, rounds, micro_batch),
            train_dataset=Dataset.from_list(rows),
            callbacks=[self],
        )
        self.phases.count(self.trainer.model)
        self.phases.wrap(self.trainer, "_generate", "rollout")
        self.phases.wrap(self.trainer, "_calculate_rewards", "reward")
        self.phases.wrap(self.trainer, "_generate_and_score_completions", "rest")
        self.phases.wrap(
            self.trainer, "_get_per_token_logps_and_entropies", "update", without_grad="logprobs"
        )
        self.phases.wrap(self.trainer, "training_step", "update")
        self.phases.wrap(self.trainer, "_clip_grad_norm", "update")
        self.tokenize, self.trainer._tokenize_prompts = self.trainer._tokenize_prompts, self.keep_prompts

    def arguments(self, trl, config: Config, rounds: int, micro_batch: int):
        """The config as TRL's arguments. The others keep TRL's defaults; no other values were faster here."""
        share = config.prompts_per_step * config.group_size // config.updates_per_step
        return trl.GRPOConfig(
            output_dir=f"{config.output_dir}/trl",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            gradient_checkpointing=config.gradient_checkpointing,
            shuffle_dataset=False,
            num_iterations=1,
            beta=0.0,
            max_steps=rounds * config.updates_per_step,
            generation_batch_size=share * config.updates_per_step,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=share // micro_batch,
            num_generations=config.group_size,
            max_completion_length=config.max_new_tokens,
            temperature=config.temperature,
            loss_type="grpo",
            scale_rewards="group",
            epsilon=config.clip_low,
            epsilon_high=config.clip_high,
            max_grad_norm=config.max_grad_norm,
            learning_rate=config.lr,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
        )

    def keep_prompts(self, prompts: list) -> tuple:
        """TRL's ids of the prompts, for the record."""
        self.records[-1]["prompts"], *others = self.tokenize(prompts)
        return self.records[-1]["prompts"], *others

    def reward(self, prompts, completions, completion_ids, nums, target, **_) -> list[float]:
        """Our reward_fn in TRL's form."""
        scores = []
        for messages, turns, *row in zip(prompts, completions, nums, target):
            row = dict(zip(("nums", "target"), row))
            scores.append(reward_fn(Sample(messages, row, turns=[turns[0]["content"]])))
        self.records[-1] |= dict(tokens=fmean(map(len, completion_ids)), reward=fmean(scores))
        return scores

    def train(self):
        """The thread."""
        torch.set_num_threads(1)
        try:
            self.trainer.train()
        except BaseException as error:
            self.error = error
        self.done.release()

    def on_train_begin(self, args, state, control, optimizer, **_):
        """Everything is there: now it waits for the first turn."""
        self.phases.wrap(optimizer, "step", "update")
        self.go.acquire()

    def on_step_end(self, args, state, control, **_):
        """After a rollout's last update it is the others' turn."""
        if state.global_step % self.updates == 0:
            self.done.release()
            self.go.acquire()

    def turn(self):
        """One rollout and its updates. The thread starts here, after all trainers have been constructed."""
        if not self.records:
            threading.Thread(target=self.train, daemon=True).start()
        self.records.append({})
        with self.phases.record(self.records[-1]):
            self.go.release()
            self.done.acquire()
        if self.error:
            raise self.error


def load_trl():
    """The module, or the end with one line that says what is missing."""
    try:
        import trl

        trl.GRPOTrainer  # this imports it
    except (ImportError, RuntimeError) as error:
        sys.exit(f"bench.trl_step compares with TRL, which does not load ({error}): pip install {NEEDED}")
    return trl


def middle(records: list[dict], kind: str) -> dict[str, float]:
    """The medians over records of what was booked by phase."""
    names = dict.fromkeys(name for record in records for name in record[kind])
    return {name: median(record[kind].get(name, 0) for record in records) for name in names}


def compare(sides: dict, times: dict) -> dict:
    """The numbers of each side: times, medians by phase, and what shows that the work was the same."""
    ours = times["ours"]
    numbers = {}
    for name, side in sides.items():
        asked = [record["prompts"] for record in side.records]
        assert asked == [record["prompts"] for record in sides["ours"].records], (
            f"{name} saw other prompts than ours"
        )
        records = side.records[1:]
        numbers[name] = times[name] | dict(
            ratio_wall=measure.ratio(times[name]["wall"], ours["wall"]),
            ratio_cpu=measure.ratio(times[name]["cpu"], ours["cpu"]),
            tokens=fmean(record["tokens"] for record in records),
            reward=fmean(record["reward"] for record in records),
            seconds=middle(records, "seconds"),
            positions=middle(records, "positions"),
        )
    return numbers


def report(numbers: dict, best: str):
    """Prints both tables."""
    measure.show(
        [
            {
                "step of": name,
                "wall (s)": median(one["wall"]),
                "CPU (s)": median(one["cpu"]),
                "wall / ours": one["ratio_wall"],
                "CPU / ours": one["ratio_cpu"],
                "tokens a completion": one["tokens"],
                "reward": one["reward"],
            }
            for name, one in numbers.items()
        ]
    )
    print(f"\nCPU by phase, ours and {best}:")
    ours, theirs = numbers["ours"], numbers[best]
    names = sorted(
        ours["seconds"].keys() | theirs["seconds"].keys(), key=lambda name: -theirs["seconds"].get(name, 0.0)
    )
    measure.show(
        [
            {
                "phase": name,
                "ours (s)": ours["seconds"].get(name, 0.0),
                "TRL (s)": theirs["seconds"].get(name, 0.0),
                "positions, ours": ours["positions"].get(name, 0),
                "positions, TRL": theirs["positions"].get(name, 0),
            }
            for name in names
        ]
    )
    print(f"\nTRL / ours: wall {theirs['ratio_wall']:.2f}, CPU {theirs['ratio_cpu']:.2f}")


def main():
    """Measures, prints, writes."""
    options = measure.options(__doc__, "trl", micro_batches=("32,64,128", "of TRL, in samples"))
    trl, rounds = load_trl(), options.rounds + 1  # one warms up
    with tempfile.TemporaryDirectory() as folder:
        flags = {"lr": 1e-9, "warmup_steps": 0, "steps": rounds, "output_dir": f"{folder}/run"}
        sys.argv = ["train.py"]
        config = parse_flags(add_flags(Config), embedded_flags(**flags))
        ours = Ours(flags)
        sides = {"ours": ours}
        prompts = ours.trainer.prompts
        for size in map(int, options.micro_batches.split(",")):
            sides[f"TRL, micro-batches of {size}"] = Theirs(trl, config, prompts, rounds, size)
        checkpointed = replace(config, gradient_checkpointing=True)
        sides["TRL, its defaults"] = Theirs(trl, checkpointed, prompts, rounds, DEFAULT)
        times = measure.in_turn({name: side.turn for name, side in sides.items()}, options.rounds)
    numbers = compare(sides, times)
    best = min(numbers.keys() - {"ours"}, key=lambda name: numbers[name]["ratio_cpu"])
    report(numbers, best)
    measure.write(
        options.output,
        trl=trl.__version__,
        best=best,
        ratio_wall=numbers[best]["ratio_wall"],
        ratio_cpu=numbers[best]["ratio_cpu"],
        steps=numbers,
    )


if __name__ == "__main__":
    main()
