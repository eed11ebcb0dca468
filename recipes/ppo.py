"""PPO with a critic, and two relatives that give credit to reasoning steps.

    torchrun --standalone --nproc_per_node=4 -m recipes.ppo --data openai/gsm8k/main

The critic is a second model of the actor's kind and sharding, with a head that predicts the return. The
advantage is how much better the policy did (GAE, arXiv:1506.02438 eq. 16, with lambda and gamma). V_t is the
value of the state in which token t was sampled, V = 0 after the last one, r_t its reward, minus --kl_coef's
penalty:

    ppo   Oat's (arXiv:2411.01493): delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lambda A_t+1
    tppo  OpenR's (arXiv:2410.09671; POAD, arXiv:2405.15821): the same, but gamma is 1 within a step
    appo  OpenR's: the same over steps: one value, one advantage, one ratio for all tokens of a step

A step is a turn; a single turn is split into its lines. OpenR sets gamma and lambda to 0.95 and entropy_coef
to 0.01. The value loss is 1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), R = A + V_old before
--normalize. Unlike Oat, --updates_per_step splits the prompts, so that each sample is used once. Unlike
OpenR, the critic is not a small head on a frozen model, and no update is skipped because of its divergence.
"""

from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from recipes.algorithms import COMMON, AlgorithmConfig
from recipes.critic import Critic, critic_metrics, gae, load_critic
from recipes.formulas import above_baseline, firsts, normalize_batch, number_units, token_penalties, trained
from recipes.problems import ProblemDataset, reward_fn
from recipes.trainer import AlgorithmTrainer, add_column, store
from train import Sample, UserError, flag, main

ACTIONS = dict(baseline="none", normalize="turns", ratio="step", aggregation="step", kl_estimator="k1")
CRITICS = {  # the rows of --critic
    "ppo": dict(baseline="none", normalize="tokens", aggregation="sequence", kl_estimator="k1"),
    "tppo": dict(baseline="none", normalize="tokens", aggregation="token", kl_estimator="k1"),
    "appo": ACTIONS,
}


@dataclass
class PPOConfig(AlgorithmConfig):
    """The flags of recipes/algorithms.py, and the critic's."""

    critic: Literal[tuple(CRITICS)] = flag("ppo", "row of the table of critics")
    critic_lr: float = flag(1e-6, "peak learning rate of the critic")
    gae_lambda: float = flag(1.0, "lambda of GAE; 1: return minus value, 0: one step ahead")
    value_clip: float = flag(0.2, "largest change of a value that still reduces its loss")

    def row(self) -> dict:
        return COMMON | CRITICS[self.critic]

    def __post_init__(self):
        if self.algo != "grpo":
            raise UserError(f"--algo {self.algo} is for recipes.algorithms; here, set --critic")
        super().__post_init__()
        if self.baseline != "none":
            raise UserError(f"--baseline must be none, not {self.baseline}: the critic is the baseline")
        if not 0 <= self.gae_lambda <= 1:
            raise UserError(f"--gae_lambda must be from 0 to 1, not {self.gae_lambda}")
        for name in ("critic_lr", "value_clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} must be above 0, not {getattr(self, name)}")


def token_advantages(sample: Sample, config: PPOConfig) -> np.ndarray:
    """Advantages [n] of a sample's trained tokens, from their column `value` and the rewards of its steps."""
    _, steps = number_units([sample])
    steps = steps.numpy()
    values = trained([sample])["value"].astype(float)
    is_last = np.diff(steps, append=steps[-1] + 1) > 0  # in its step
    rewards = -token_penalties(sample, config)
    rewards[is_last] += sample.rewards
    if config.critic == "appo":
        by_step = np.bincount(steps, rewards)
        before = values[np.unique(steps, return_index=True)[1]]
        advantages = gae(by_step, before, [config.gamma] * len(before), config.gae_lambda)
        return np.array(advantages)[steps]
    within = config.gamma if config.critic == "ppo" else 1.0
    discounts = np.where(is_last, config.gamma, within)
    return np.array(gae(rewards, values, discounts, config.gae_lambda))


class PPO(AlgorithmTrainer):
    """A Trainer with a critic, or without one where a recipe sets --critic none."""

    balanced = False  # the critic learns from the actor's samples, so they must stay

    def __init__(self, config, *arguments):
        add_column("value")
        add_column("return")
        super().__init__(config, *arguments)
        self.line_ends = [i for i in range(len(self.tokenizer)) if "\n" in self.tokenizer.decode([i])]
        self.critic = None
        if config.critic != "none":
            options = copy(config)
            options.lr = config.critic_lr
            self.critic = Critic(load_critic(self.path, self.mesh, config), self.mesh, options)

    def compare(self, samples: list[Sample]):
        """Sets advantages, values and returns."""
        config = self.config
        if not self.critic:
            super().compare(samples)
            return
        for sample in samples:
            if config.critic != "ppo" and len(sample.rewards) == 1:
                self.split_lines(sample)
        self.store_values(samples, "value", self.critic.model.values)
        owners, steps = number_units(samples)
        found = [np.zeros(0), *[token_advantages(sample, config) for sample in samples]]
        advantages = torch.from_numpy(np.concatenate(found))
        values = torch.from_numpy(trained(samples)["value"].astype(float))
        if config.critic == "appo":  # a step's value is that of its first token
            values = values[firsts(steps)][steps]
        store(samples, "return", advantages + values)
        advantages = above_baseline(advantages, owners, config)
        store(samples, "advantage", normalize_batch(advantages, steps, config.normalize, self.mesh["dp"]))

    def split_lines(self, sample: Sample):
        """Makes each line of a single turn a step; the reward stays with the last one."""
        own = sample.tokens["mask"] == 1
        ends = np.isin(sample.tokens["id"][own], self.line_ends)
        sample.tokens["turn"][own] = ends.cumsum() - ends
        steps = int(sample.tokens["turn"].max()) + 1
        sample.rewards = [0.0] * (steps - 1) + sample.rewards

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Updates the actor, then the critic, from the same samples in as many updates."""
        metrics = super().learn(samples)
        count = self.config.updates_per_step
        counted = [sample for sample in samples if sample.tokens["weight"].any()]
        history = []
        for i in range(count if self.critic else 0):
            share = [sample for sample in counted if sample.key[0] % count == i]
            history.append(self.critic.backward(self.pack(share), self.critic.loss))
            self.critic.optimizer_step()
        if history:
            means = {name: np.mean([found[name] for found in history]) for name in history[0]}
            metrics |= critic_metrics(means)
        return metrics


if __name__ == "__main__":
    main(PPOConfig, ProblemDataset, reward_fn, trainer=PPO)
