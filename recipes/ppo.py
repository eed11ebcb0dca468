"""PPO with a critic, and two that give credit to reasoning steps: one value, one advantage for what a step did.

    torchrun --standalone --nproc_per_node=4 -m recipes.ppo --data openai/gsm8k/main --kl_coef 1e-4 --kl_in reward

A critic is a second model of the actor's kind and sharding, with a head that says what return it expects; how much
better the policy did is the advantage (GAE, arXiv:1506.02438 eq. 16, with lambda and gamma). V_t is the value of the
state in which token t was sampled, V = 0 after the last one, r_t the reward that came with it, less --kl_coef's:

    ppo   Oat's (arXiv:2411.01493): delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lambda A_t+1
    tppo  OpenR's (arXiv:2410.09671; POAD, arXiv:2405.15821): the same, but gamma counts where a step ends, 1 elsewhere
    appo  OpenR's: the same over steps instead of tokens: one value, one advantage, one ratio for all tokens of a step

A step is a line, or what reward_fn made of sample.steps; OpenR has gamma and lambda of 0.95 and an entropy_coef of
0.01. The value loss is 1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), R = A + V_old before whitening, which
is --normalize. Unlike Oat, here a prompt's completions need no more epochs: --updates_per_step splits the prompts.
Unlike OpenR, the critic is no small head on a frozen model, and no update is skipped for its divergence.
"""
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Literal

import torch

from recipes.critic import Critic, gae
from tools.inputs import UserError, find_model, flag
from tools.packing import by_sample, column
from tools.scoring import without_failures
from train import Config, Sample, Trainer, firsts, main, make_batch, normalized, penalties, token_weights

CRITICS = {  # what --algo would choose
    "ppo": dict(baseline="none", normalize="tokens", ratio="token", aggregation="sequence", kl_estimator="k1"),
    "tppo": dict(baseline="none", normalize="tokens", ratio="token", aggregation="token", kl_estimator="k1"),
    "appo": dict(baseline="none", normalize="turns", ratio="step", aggregation="step", kl_estimator="k1"),
}


@dataclass
class PPOConfig(Config):
    """What train.py has, and the critic."""
    critic: Literal[tuple(CRITICS)] = flag("ppo", "what has a value: each token, or each step (appo)")
    critic_lr: float = flag(1e-6, "peak learning rate of the critic")
    gae_lambda: float = flag(1.0, "1: the advantage is the return less the value; 0: one step ahead")
    value_clip: float = flag(0.2, "how far an update may move a value, at no cost")

    def __post_init__(self):
        if self.algo != "grpo":
            raise UserError(f"--algo {self.algo} is for train.py; here --critic chooses")
        for name, value in CRITICS[self.critic].items():
            if getattr(self, name) is None and (self.kl_coef or name != "kl_estimator"):
                setattr(self, name, value)
        super().__post_init__()
        if self.baseline != "none":
            raise UserError(f"--baseline {self.baseline} cannot be: the critic is the baseline")
        if not 0 <= self.gae_lambda <= 1:
            raise UserError(f"--gae_lambda must be from 0 to 1, not {self.gae_lambda}")
        for name in ("critic_lr", "value_clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} must be above 0, not {getattr(self, name)}")


def token_advantages(sample: Sample, values: list[float], penalties: list[float], config: PPOConfig) -> list[float]:
    """Advantages [N] of a sample's trained tokens from their values [N] and penalties [N]."""
    steps, left = list(compress(sample.steps, sample.mask)), iter(sample.rewards)
    ends = [step != following for step, following in zip(steps, [*steps[1:], None])]
    rewards = [(next(left) if end else 0.0) - penalty for end, penalty in zip(ends, penalties)]
    if config.critic == "ppo":
        return gae(rewards, values, [config.gamma] * len(steps), config.gae_lambda)
    if config.critic == "tppo":
        return gae(rewards, values, [config.gamma if end else 1.0 for end in ends], config.gae_lambda)
    order = list(dict.fromkeys(steps))
    of_step = [sum(reward for reward, step in zip(rewards, steps) if step == one) for one in order]
    values = [values[steps.index(one)] for one in order]
    advantages = gae(of_step, values, [config.gamma] * len(order), config.gae_lambda)
    return [advantages[order.index(step)] for step in steps]


class PPO(Trainer):
    """A Trainer with a critic."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        config = self.config
        path, _ = find_model(config.model, self.mesh["tp"].size())
        self.critic = Critic(path, self.mesh, replace(config, lr=config.critic_lr), self.engine.vocab_size)
        self.learners["critic"] = self.critic
        self.line_ends = {i for i in range(len(self.tokenizer)) if "\n" in self.tokenizer.decode([i])}

    def compare(self, samples: list[Sample]):
        """Sets the advantages of samples, and what the critic said and should have said; without groups that failed."""
        config = self.config
        if config.critic != "ppo":
            for sample in samples:
                self.split(sample)
        for sample, values in zip(samples, self.token_values(samples, self.critic.model.values)):
            sample.values, sample.returns = values, []
        samples = without_failures(samples) or samples
        tokens, advantages = make_batch(samples, "cpu"), []
        for sample, paid in zip(samples, penalties(tokens, config).split(tokens.sequences.bincount().tolist())):
            values = list(compress(sample.values, sample.mask))
            advantages += token_advantages(sample, values, paid.tolist(), config)
        values = column(tokens, "values").double()
        advantages = torch.tensor(advantages, dtype=torch.float64)
        before = values[firsts(tokens.steps)][tokens.steps] if config.critic == "appo" else values
        whitened = normalized(advantages, tokens.sequences, tokens.steps, config.group_size, config.normalize)
        for sample, *lists in zip(samples, by_sample(tokens, whitened), by_sample(tokens, advantages + before)):
            sample.advantages, sample.returns = lists

    def split(self, sample: Sample):
        """Makes each line a step, unless reward_fn has made steps of its own; the reward is then the last one's."""
        if len(sample.rewards) == 1:
            ended = [i in self.line_ends and bool(trained) for i, trained in zip(sample.ids, sample.mask)]
            sample.steps = [*accumulate([0, *ended[:-1]])]
            count = len(set(compress(sample.steps, sample.mask)))
            sample.rewards = [0.0] * (count - 1) + sample.rewards

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """The actor learns, then the critic, from the same samples in as many updates."""
        metrics, config, updates = super().learn(samples), self.config, []
        with self.timed("critic"):
            for i in range(config.updates_per_step):
                part = without_failures(samples)[i::config.updates_per_step]
                updates.append(self.share(part, samples[0]))
                for batch in updates[-1]:
                    batch.weights *= token_weights(batch, config.aggregation, part or samples, config.max_new_tokens)
            learned = self.critic.update(updates)
        return metrics | {name: learned[name] for name in ("value_loss", "value", "explained_variance")}


if __name__ == "__main__":
    main(PPOConfig, trainer_class=PPO)
