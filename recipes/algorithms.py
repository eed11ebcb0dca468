"""Relatives of GRPO: RLOO, GSPO, CISPO, DAPO, REINFORCE++ and others, as rows of a table.

    torchrun --standalone --nproc_per_node=4 -m recipes.algorithms --algo dapo
    torchrun --standalone --nproc_per_node=2 -m recipes.algorithms --algo rloo --normalize group

Each column of the table is also a flag, which overrides the row. r_i is the return of completion o_i (with
--gamma 1 its reward), G its group, B all completions of an optimizer step, rho_t the importance ratio of a
token, clip() its bounds. recipes/formulas.py has a function for each column, and recipes/trainer.py applies
them. A reward_fn may return a list, one number per turn.
"""

from dataclasses import dataclass
from typing import Literal

from extras import turns, updates, variants
from recipes.problems import ProblemDataset, reward_fn
from recipes.trainer import AlgorithmTrainer
from train import Config, UserError, flag, main

COMMON = dict(baseline="mean", normalize="none", gamma=1.0, aggregation="sequence", kl_in="loss")
COMMON |= dict(ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.28, kl_estimator="k3")
COMMON |= dict(dynamic_sampling=0, overlong_buffer=0.0, mask_truncated=False)
ALGORITHMS = {  # what a row leaves out is as in COMMON
    # GRPO, arXiv:2402.03300 eq. 3 and sec. 4.1.2: A = (r_i - mean_G r) / std_G r;
    #   1/B sum_i 1/|o_i| sum_t min(rho_t A, clip(rho_t) A)
    "grpo": dict(normalize="group"),
    # Dr. GRPO, arXiv:2503.20783 sec. 3.2: A = r_i - mean_G r;  1/B sum_i 1/max_new_tokens sum_t (the same)
    "dr_grpo": dict(aggregation="constant"),
    # DAPO, arXiv:2503.14476 eq. 8: 1/(sum_i |o_i|) sum_i sum_t (the same), clip-higher; eq. 11: groups
    #   without signal are sampled again; eq. 13: r_i falls over the last fifth of max_new_tokens; sec. 3.4:
    #   truncated completions are masked
    "dapo": dict(
        normalize="group", aggregation="token", dynamic_sampling=4, overlong_buffer=0.2, mask_truncated=True
    ),
    # GSPO, arXiv:2507.18071 eq. 5 and 7: rho = (pi(o_i) / pi_old(o_i))^(1/|o_i|), one for all tokens of o_i
    "gspo": dict(normalize="group", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    # CISPO, arXiv:2506.13585 eq. 4 and 5:
    #   1/(sum_i |o_i|) sum_i sum_t stop_gradient(clip(rho_t)) A log pi(o_t)
    "cispo": dict(normalize="group", surrogate="cispo", aggregation="token", clip_low=1.0, clip_high=4.0),
    # RLOO, arXiv:2402.14740 eq. 8: A = r_i - mean of the other G - 1; a completion is one action: sum over t
    "rloo": dict(baseline="leave_one_out", aggregation="constant"),
    # REINFORCE++, arXiv:2501.03262 sec. 3: A_t = r_i - kl_coef sum_{s >= t} kl_s, normalized over all tokens
    "reinforce_pp": dict(
        baseline="none", normalize="tokens", aggregation="token", kl_in="reward", kl_estimator="k1"
    ),
    # REINFORCE with return batch normalization, GEM, arXiv:2510.01051:
    #   G_k = r_k + gamma G_k+1 for each turn k, A = (G_k - mean) / std over all turns of the batch
    "rebn": dict(baseline="none", normalize="turns", aggregation="constant"),
    # REINFORCE, Williams 1992, doi:10.1007/BF00992696: 1/B sum_i 1/max_new_tokens sum_t r_i log pi(o_t)
    "reinforce": dict(baseline="none", surrogate="reinforce", aggregation="constant"),
}


@dataclass
class AlgorithmConfig(Config, variants.Flags, turns.Flags, updates.Flags):
    """The core's flags, and the columns of the table; None: as the row says."""

    algo: Literal[tuple(ALGORITHMS)] = flag("grpo", "row of the table of algorithms")
    baseline: Literal["none", "mean", "leave_one_out"] | None = flag(None, "what returns are compared to")
    normalize: Literal["none", "group", "turns", "tokens"] | None = flag(None, "scope of scaling to unit std")
    normalize_std: bool | None = flag(None, "True: --normalize group; False: --normalize none")
    ratio: Literal["token", "step", "sequence"] | None = flag(None, "unit of the importance ratio")
    surrogate: Literal["clip", "cispo", "reinforce"] | None = flag(None, "objective of a token")
    aggregation: Literal["sequence", "step", "token", "constant"] | None = flag(None, "loss average")
    clip_low: float | None = flag(None, "lower clip of the importance ratio: 1 - clip_low")
    clip_high: float | None = flag(None, "upper clip of the importance ratio: 1 + clip_high")
    dual_clip: float = flag(0.0, "bound of the ratio where A < 0, for example 3; 0: none")
    gamma: float | None = flag(None, "discount of rewards from turn to turn")
    kl_in: Literal["loss", "reward"] | None = flag(None, "where --kl_coef applies")
    kl_estimator: Literal["k1", "k2", "k3"] | None = flag(None, "estimator of the KL divergence")
    dynamic_sampling: int | None = flag(None, "limit of further rollouts per step, for groups with signal")
    overlong_buffer: float | None = flag(None, "share of max_new_tokens over which the reward falls by 1")
    mask_truncated: bool | None = flag(None, "no gradient from truncated completions")

    def row(self) -> dict:
        """The values for flags that are not given."""
        return COMMON | ALGORITHMS[self.algo]

    def __post_init__(self):
        if self.normalize_std is not None:
            self.normalize = self.normalize or ("group" if self.normalize_std else "none")
            if self.normalize_std != (self.normalize == "group"):
                raise UserError(f"--normalize_std contradicts --normalize {self.normalize}; set only one")
        row = self.row()
        given = {name for name in row if getattr(self, name) not in (None, row[name])}
        for name in row.keys() - given:
            setattr(self, name, row[name])
        self.normalize_std = self.normalize == "group"
        self.compares_groups = self.baseline != "none" or self.normalize == "group"
        self.check_ranges()
        self.refuse_idle(given)

    def check_ranges(self):
        """Raises UserError for numbers out of range."""
        for name in ("gamma", "clip_low", "clip_high", "dual_clip", "dynamic_sampling", "overlong_buffer"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name} must be 0 or more, not {getattr(self, name)}")
        if 0 < self.dual_clip <= 1:
            raise UserError(f"--dual_clip must be above 1, or 0 for none, not {self.dual_clip}")
        if self.overlong_buffer > 1:
            raise UserError(f"--overlong_buffer is a share of --max_new_tokens, not {self.overlong_buffer}")
        if self.overlong_buffer and self.max_turns > 1:
            raise UserError("--overlong_buffer must be 0 with several turns: it measures one completion")

    def refuse_idle(self, given: set[str]):
        """Raises UserError for a flag that was given and would have no effect."""
        no_ratio = self.surrogate == "reinforce"
        cases = {
            "clip_low": no_ratio and "--surrogate reinforce has no ratio",
            "clip_high": no_ratio and "--surrogate reinforce has no ratio",
            "ratio": no_ratio and "--surrogate reinforce has no ratio",
            "dual_clip": self.surrogate != "clip" and "only --surrogate clip has a bound for A < 0",
            "kl_estimator": not self.kl_coef and "--kl_coef is 0",
            "kl_in": not self.kl_coef and "--kl_coef is 0",
            "dynamic_sampling": not self.compares_groups and f"--algo {self.algo} does not compare groups",
        }
        for name, reason in cases.items():
            value = getattr(self, name)
            if reason and value and name in given | {"dual_clip"}:
                raise UserError(f"--{name} {value} would have no effect: {reason}")


if __name__ == "__main__":
    main(AlgorithmConfig, ProblemDataset, reward_fn, trainer=AlgorithmTrainer)
