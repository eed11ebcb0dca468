"""The formulas behind recipes/algorithms.py: a function for each column of its table.

Sizes: B samples of whole groups, N trained tokens. A step of an episode is a turn, unless a recipe has
numbered reasoning steps (the lines of an answer, for example) in the column `turn` of sample.tokens.
"""

import math

import numpy as np
import torch

from extras.variants import centered_advantages
from train import TOKEN, Sample, group_advantages, reduce_over


def trained(samples: list[Sample]) -> np.ndarray:
    """The trained tokens of samples, end to end, [N], with the columns of TOKEN."""
    parts = [sample.tokens[sample.tokens["mask"] == 1] for sample in samples]
    return np.concatenate([np.zeros(0, TOKEN), *parts])


def number_units(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample and the step of each trained token, both numbered from 0 over all samples, [N] each."""
    counts = [int(sample.tokens["mask"].sum()) for sample in samples]
    owners = np.repeat(np.arange(len(samples)), counts)
    turns = trained(samples)["turn"]
    begins = (np.diff(owners, prepend=-1) != 0) | (np.diff(turns, prepend=-1) != 0)
    return torch.from_numpy(owners), torch.from_numpy(begins.cumsum() - 1)


def firsts(units: torch.Tensor) -> torch.Tensor:
    """Where each unit begins, given numbers [N] that ascend from 0."""
    return units.diff(prepend=units.new_tensor([-1])).nonzero()[:, 0]


# ---------------------------------------------- returns --------------------------------------------------
def token_penalties(sample: Sample, config) -> np.ndarray:
    """Penalties of a sample's trained tokens, [n]: for divergence, and for length at the last one."""
    tokens = trained([sample])
    paid = np.zeros(len(tokens))
    if config.kl_coef and config.kl_in == "reward":
        logprobs = torch.from_numpy(tokens["logprob"].astype(float))
        ref_logprobs = torch.from_numpy(tokens["ref_logprob"].astype(float))
        paid += config.kl_coef * kl_divergence(logprobs, ref_logprobs, config.kl_estimator).numpy()
    if config.overlong_buffer:  # DAPO, arXiv:2503.14476 eq. 13
        buffer = config.overlong_buffer * config.max_new_tokens
        paid[-1] += max(0.0, (len(tokens) - config.max_new_tokens + buffer) / buffer)
    return paid


def token_returns(sample: Sample, config) -> np.ndarray:
    """The return of each trained token, [n]: G_k = r_k + gamma G_k+1 of its step k (GEM, arXiv:2510.01051).

    Penalties are part of a step's reward; a token is not charged for earlier tokens of its step.
    """
    paid = token_penalties(sample, config)
    steps = number_units([sample])[1].numpy()
    totals = np.bincount(steps, paid, len(sample.rewards))
    returns = np.zeros(len(sample.rewards))
    following = 0.0
    for k in reversed(range(len(sample.rewards))):
        following = sample.rewards[k] - totals[k] + config.gamma * following
        returns[k] = following
    paid_before = paid.cumsum() - paid
    begins = np.unique(steps, return_index=True)[1]
    paid_before -= paid_before[begins][steps]
    return returns[steps] + paid_before


# --------------------------------------------- advantages ------------------------------------------------
def above_baseline(returns: torch.Tensor, owners: torch.Tensor, config) -> torch.Tensor:
    """Returns [N] -> advantages [N] against the group; without a baseline each token keeps its own return."""
    size = config.group_size
    totals = returns[firsts(owners)]  # [B]
    if config.baseline == "none":
        if config.normalize != "group":
            return returns
        std = totals.view(-1, size).std(dim=1) + 1e-6
        return returns / std[owners // size]
    by_group = config.normalize == "group"
    advantages = (group_advantages if by_group else centered_advantages)(totals, size)
    if config.baseline == "leave_one_out" and not by_group:  # r - mean of the others = (r - mean) G / (G - 1)
        advantages = advantages * size / (size - 1)
    return advantages[owners]


def normalize_over(values: torch.Tensor, counted: torch.Tensor, mesh) -> torch.Tensor:
    """Values, centered and scaled by the mean and the std of `counted` on all ranks of a mesh."""
    total, count = reduce_over(mesh, [counted.sum().item(), len(counted)])
    mean = total / max(count, 1)
    (squares,) = reduce_over(mesh, [((counted - mean) ** 2).sum().item()])
    return (values - mean) / (math.sqrt(squares / max(count - 1, 1)) + 1e-6)


def normalize_batch(values: torch.Tensor, steps: torch.Tensor, normalize: str, mesh) -> torch.Tensor:
    """Values [N], scaled to mean 0 and std 1 over all tokens or all steps [N], according to --normalize."""
    if normalize == "tokens":
        return normalize_over(values, values, mesh)
    if normalize == "turns":
        return normalize_over(values, values[firsts(steps)], mesh)
    return values


# ------------------------------------------------ loss ---------------------------------------------------
def importance_ratio(log_ratio: torch.Tensor, batch, level: str) -> torch.Tensor:
    """pi / pi_old from its logarithm, [N] -> [N], of each token, or of the unit that contains it.

    A step's is the product of its tokens' (an action of OpenR's APPO, arXiv:2410.09671); a sequence's is
    their geometric mean (GSPO, arXiv:2507.18071 eq. 7).
    """
    if level == "token":
        return log_ratio.exp()
    units = batch.steps if level == "step" else batch.owners
    sums = log_ratio.new_zeros(int(units.max()) + 1).index_add(0, units, log_ratio)
    if level == "sequence":
        sums = sums / units.bincount()
    return sums.exp()[units]


def surrogate_loss(logprobs, ratio, advantages, config) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and where a clip removed its gradient, from tensors [N]; both [N].

    clip: PPO, arXiv:1707.06347 eq. 7, with the bound for A < 0 of arXiv:1912.09729 eq. 5.
    """
    never = torch.zeros_like(advantages, dtype=torch.bool)
    if config.surrogate == "reinforce":
        return -advantages * logprobs, never
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.surrogate == "cispo":
        return -bounded.detach() * advantages * logprobs, never
    unclipped = ratio * advantages
    clipped = bounded * advantages
    gain = torch.minimum(unclipped, clipped)
    is_clipped = clipped < unclipped
    if config.dual_clip:
        floor = torch.where(advantages < 0, config.dual_clip * advantages, -math.inf)
        is_clipped = is_clipped | (gain < floor)
        gain = torch.maximum(gain, floor)
    return -gain, is_clipped


def kl_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(policy || reference) at sampled tokens, [N] (joschu.net/blog/kl-approx.html)."""
    gap = logprobs - ref_logprobs
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap**2 / 2
    return torch.exp(-gap) - 1 + gap


def policy_loss(logprobs, entropy, batch, config) -> tuple[torch.Tensor, dict]:
    """The loss of a micro-batch, a weighted sum over tokens, and the metrics to average, [N] each."""
    ratio = importance_ratio(logprobs - batch.old_logprobs, batch, config.ratio)
    loss, is_clipped = surrogate_loss(logprobs, ratio, batch.advantages, config)
    engine_gap = batch.old_logprobs - batch.engine_logprobs
    stats = {"clip_fraction": is_clipped, "entropy": entropy.detach()}
    if config.tis_cap:  # truncated importance sampling, fengyao.notion.site/off-policy-rl
        loss = loss * engine_gap.exp().clamp(max=config.tis_cap)
    if config.kl_coef:
        kl = kl_divergence(logprobs, batch.ref_logprobs, config.kl_estimator)
        stats["kl"] = kl.detach()
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return (batch.weights * loss).sum(), stats
