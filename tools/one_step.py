"""One step of GRPO with its numbers, computed by train.py and again in plain Python: makes docs/one_step.md.

    python -m tools.one_step

It fills in tools/one_step.jinja, and raises AssertionError where the two differ by more than rounding.
"""

import json
from copy import deepcopy
from math import exp, fsum, isclose, log, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from jinja2 import Template
from transformers import AutoModelForCausalLM

import train
from extras import add_flags, embedded, updates

HERE = Path(__file__).parent
FLAGS = {"engine": "local", "device": "cpu", "dtype": "float32", "eval_data": "", "updates_per_step": 3}
FLAGS |= {"prompts_per_step": 1, "group_size": 4, "lr": 4e-4, "warmup_steps": 0}
ROWS = ":train[4:5]"  # an easy problem, whose completions differ in length and in reward


# ------------------- What train.py computes: only this section knows its names and tensors ----------------
class ObservedTrainer(updates.extend(train.Trainer)):
    """Keeps what `learn` computes on its way, and the model before each update."""

    def loss(self, logprobs, entropy, batch):
        loss, stats = super().loss(logprobs, entropy, batch)
        logprobs.retain_grad()
        update = SimpleNamespace(batch=batch, new=logprobs, loss=loss.item())
        update.is_clipped = stats["clip_fraction"]
        self.updates.append(update)
        return loss, stats

    def check_engine(self, gap: float):  # between the backward pass and the optimizer
        super().check_engine(gap)
        self.updates[-1].weights = numbers(self.actor.parameters.values())
        self.updates[-1].gradient = numbers(weight.grad for weight in self.actor.parameters.values())
        self.updates[-1].path = self.folder / f"model{len(self.updates)}"
        self.actor.save(self.path, self.updates[-1].path)


def numbers(tensors) -> list[float]:
    return torch.cat([tensor.full_tensor().flatten() for tensor in tensors]).tolist()


@torch.no_grad()
def plain_logits(path: Path, samples: list, vocab: int) -> list[list[float]]:
    """The logits [N, V] from which the trained tokens were chosen, by transformers instead of train.py."""
    model = AutoModelForCausalLM.from_pretrained(path)
    rows = []
    for sample in samples:
        logits = model(torch.tensor(sample.tokens["id"][None].astype(int))).logits[0, :-1, :vocab]
        rows += logits[sample.tokens["mask"][1:] == 1].tolist()
    return rows


def observe(folder: Path) -> SimpleNamespace:
    """Lets a Trainer learn from the same group three times."""
    flags = json.loads(embedded.FILE.read_text().replace("ASSETS", str(embedded.FILE.parent))) | FLAGS
    flags |= {"data": flags["data"] + ROWS, "output_dir": str(folder)}
    trainer = ObservedTrainer(add_flags(train.Config)(**flags), train.RLDataset, train.reward_fn)
    trainer.updates = []
    trainer.publish()
    group = trainer.rollout()
    passes = [group, deepcopy(group), deepcopy(group)]
    for place, samples in enumerate(passes):  # as if of three prompts: an update learns from each
        for sample in samples:
            sample.key = (place, sample.key[1])
    metrics = trainer.learn(sum(passes, []))
    for update in trainer.updates:
        batch = update.batch
        columns = {"id": batch.targets, "old": batch.old_logprobs, "engine": batch.engine_logprobs}
        columns |= {"advantage": batch.advantages, "weight": batch.weights, "new": update.new}
        columns |= {"slope": update.new.grad, "is_clipped": update.is_clipped}
        owners = [sample.key[1] for sample in batch.samples for _ in range(sample.tokens["mask"].sum())]
        columns["completion"] = torch.tensor(owners)
        rows = zip(*(values.tolist() for values in columns.values()))
        update.tokens = [SimpleNamespace(**dict(zip(columns, row))) for row in rows]
        update.logits = plain_logits(update.path, batch.samples, trainer.engine.vocab_size)
    return SimpleNamespace(**vars(trainer), group=group, metrics=metrics)


# ------------------------------------------ The same in plain Python --------------------------------------
def check(name: str, by_hand: float, from_train: float, rounding: float = 2e-6) -> float:
    if not isclose(by_hand, from_train, rel_tol=1e-4, abs_tol=rounding):
        raise AssertionError(f"{name}: {by_hand} by hand, {from_train} in train.py")
    return by_hand


def logprob(logits: list[float], id: int) -> float:
    return logits[id] - log(fsum(map(exp, logits)))


def check_update(update, advantages: list[float], old_logits: list[list[float]], config):
    """Computes an update from advantages and logits; adds what the page shows to its tokens."""
    lengths = [sum(token.completion == i for token in update.tokens) for i in range(len(advantages))]
    for token, old_row, new_row in zip(update.tokens, old_logits, update.logits):
        advantage = check("advantage", advantages[token.completion], token.advantage)
        weight = check("weight", 1 / len(advantages) / lengths[token.completion], token.weight)
        old = check("old log-prob", logprob(old_row, token.id), token.old)
        token.by_hand = check("log-prob", logprob(new_row, token.id), token.new)
        check("engine's log-prob", old, token.engine)
        token.ratio = exp(token.by_hand - old)
        token.bounded = min(max(token.ratio, 1 - config.clip_low), 1 + config.clip_high)
        token.term = -weight * min(token.ratio * advantage, token.bounded * advantage)
        check("is_clipped", token.bounded * advantage < token.ratio * advantage, token.is_clipped)
        check("slope", 0.0 if token.is_clipped else -weight * token.ratio * advantage, token.slope)
    update.sums = [fsum(t.term for t in update.tokens if t.completion == i) for i in range(len(advantages))]
    check("loss", fsum(update.sums), update.loss)
    update.norm = sqrt(fsum(number**2 for number in update.gradient))
    update.scale = min(1.0, config.max_grad_norm / (update.norm + 1e-6))


def check_weights(seen):
    """Computes how far AdamW with betas 0.9 and 0.99 moves each weight of the model in each update."""
    gradients = zip(*([number * update.scale for number in update.gradient] for update in seen.updates))
    weights = zip(*(update.weights for update in seen.updates))
    for (start, middle, end), (g1, g2, _) in zip(weights, gradients):  # a weight near 1 is rounded by 6e-8
        m = (0.9 * 0.1 * g1 + 0.1 * g2) / (1 - 0.9**2)
        v = (0.99 * 0.01 * g1**2 + 0.01 * g2**2) / (1 - 0.99**2)
        check("first move of a weight", -seen.config.lr * g1 / (abs(g1) + 1e-8), middle - start, 2e-7)
        check("second move of a weight", -seen.config.lr * m / (sqrt(v) + 1e-8), end - middle, 2e-7)


def make_page() -> str:
    """Observes, checks and describes a step."""
    with TemporaryDirectory() as folder:
        seen = observe(Path(folder))
    rewards = [sample.reward for sample in seen.group]
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    advantages = [(reward - mean) / (std + 1e-6) for reward in rewards]
    for update in seen.updates:
        check_update(update, advantages, seen.updates[0].logits, seen.config)
    check_weights(seen)
    check("logged loss", fsum(sum(update.sums) for update in seen.updates) / 3, seen.metrics["loss"])
    check("logged norm", sum(update.norm for update in seen.updates) / 3, seen.metrics["grad_norm"])
    page = Template((HERE / "one_step.jinja").read_text(), keep_trailing_newline=True, trim_blocks=True)
    return page.render(vars(seen), mean=mean, std=std, advantages=advantages, exp=exp)


if __name__ == "__main__":
    (HERE.parent / "docs/one_step.md").write_text(make_page())
