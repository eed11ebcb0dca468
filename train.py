"""GRPO in one file: train a Qwen model by reinforcement learning with verifiable rewards.

Each step samples a group of G completions of every prompt, rewards each with a number r, and raises the probability of
those that beat their own group (DeepSeekMath, arXiv:2402.03300):

    A_i    = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                       one advantage a completion, no critic
    rho_t  = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                    one ratio a token
    loss   = - sum_t w_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A)   w_t: how --algo weighs a token

Unlike the paper, on purpose: no KL term and no reference model unless asked for; sampling by the newest weights, which
are pushed into the engine after every step; counts over all ranks in w_t, so that no split changes a gradient.

    torchrun --standalone --nproc_per_node=4 train.py             # four GPUs: Qwen2.5-3B-Instruct learns countdown
    torchrun --standalone --nproc_per_node=2 train.py             # no GPU: a tiny Qwen learns it within three minutes
    torchrun --standalone --nproc_per_node=4 train.py --model Qwen/Qwen3-1.7B --data openai/gsm8k/main --algo dr_grpo

Part I is the algorithm; for a task of your own edit `__getitem__` and `reward_fn` in section 2. Part II is the machine:
skip it on a first reading. Part III is the loop, and the place to start.
Sizes have one letter everywhere: B sequences, G completions a prompt, T tokens, N trained tokens, V vocabulary.
"""
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tqdm.asyncio import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, get_scheduler, set_seed

import rewards
from local_engine import LocalEngine
from tools.checkpoint import find_run, flags_of, load_checkpoint, random_states, save_checkpoint, save_model
from tools.checks import check_config
from tools.gate import Gate, Probe
from tools.inputs import (JSON, UserError, check_prompts, find_model, find_tokenizer, flag, load_rows, make_prompt,
                          parse_flags, prompt_order)
from tools.judges import Judges
from tools.kernels import HeadLogprobs, packed_attention
from tools.markup import encode, encode_prompt
from tools.packing import by_sample, hand_back, laid_out, lay_out, pack, per_sample
from tools.ranks import Stop, Stopped, gather, init_distributed, reduce
from tools.runlog import RunLog, one_line_errors
from tools.scoring import ask, best_of, check_failures, check_skipped, check_turn, without_failures
from tools.sglang_links import Colocated, Servers, run
from tools.speed import Stopwatch, speed, update_metrics
from tools.weights import export, move, whole_weights


# ================================================ Part I: the algorithm ===============================================
# ------------------------------------------------ 1. Config -----------------------------------------------------------
# Rows for --algo. r_i is the return of completion o_i (with gamma = 1 its reward), G its group, B all the completions
# of an optimiser step, rho_t the ratio of a token, clip() its bounds. Each column is a flag, too, with a function each.
ALGORITHMS = {
    # GRPO, arXiv:2402.03300 eq. 3 and sec. 4.1.2: A = (r_i - mean_G r) / std_G r;
    #   1/B sum_i 1/|o_i| sum_t min(rho_t A, clip(rho_t) A)
    "grpo": dict(baseline="mean", normalize="group", ratio="token", surrogate="clip", aggregation="sequence"),
    # Dr. GRPO, arXiv:2503.20783 sec. 3.2: A = r_i - mean_G r;  1/B sum_i 1/max_new_tokens sum_t (the same)
    "dr_grpo": dict(baseline="mean", normalize="none", ratio="token", surrogate="clip", aggregation="constant"),
    # DAPO, arXiv:2503.14476 eq. 8: 1/(sum_i |o_i|) sum_i sum_t (the same), clip-higher; eq. 11: groups without signal
    #   are sampled anew; eq. 13: r_i falls over the last fifth of max_new_tokens; sec. 3.4: what was cut off is masked
    "dapo": dict(baseline="mean", normalize="group", ratio="token", surrogate="clip", aggregation="token",
                 dynamic_sampling=4, overlong_buffer=0.2, mask_truncated=True),
    # GSPO, arXiv:2507.18071 eq. 5 and 7: rho = (pi(o_i) / pi_old(o_i))^(1/|o_i|), one for all tokens of o_i
    "gspo": dict(baseline="mean", normalize="group", ratio="sequence", surrogate="clip", aggregation="sequence",
                 clip_low=3e-4, clip_high=4e-4),
    # CISPO, arXiv:2506.13585 eq. 4 and 5: 1/(sum_i |o_i|) sum_i sum_t stop_gradient(clip(rho_t)) A log pi(o_t)
    "cispo": dict(baseline="mean", normalize="group", ratio="token", surrogate="cispo", aggregation="token",
                  clip_low=1.0, clip_high=4.0),
    # RLOO, arXiv:2402.14740 eq. 8: A = r_i - mean of the other G - 1; a completion is one action, so the sum over t
    "rloo": dict(baseline="leave_one_out", normalize="none", ratio="token", surrogate="clip", aggregation="constant"),
    # REINFORCE++, arXiv:2501.03262 sec. 3: A_t = r_i - kl_coef sum_{s >= t} kl_s, centred and scaled over all tokens
    "reinforce_pp": dict(baseline="none", normalize="tokens", ratio="token", surrogate="clip", aggregation="token",
                         kl_in="reward", kl_estimator="k1"),
    # REINFORCE with return batch normalisation, GEM, arXiv:2510.01051: G_k = r_k + gamma G_k+1 for each turn k,
    #   A = (G_k - mean) / std over all turns of the batch
    "rebn": dict(baseline="none", normalize="turns", ratio="token", surrogate="clip", aggregation="constant"),
    # REINFORCE, Williams 1992, doi:10.1007/BF00992696: 1/B sum_i 1/max_new_tokens sum_t r_i log pi(o_t)
    "reinforce": dict(baseline="none", normalize="none", surrogate="reinforce", aggregation="constant"),
}
COMMON = dict(ratio="token", clip_low=0.2, clip_high=0.28, kl_in="loss", kl_estimator="k3", dynamic_sampling=0,
              overlong_buffer=0.0, mask_truncated=False)      # where a row says nothing
GPU = torch.cuda.is_available()
ASSETS = Path(__file__).parent / "assets"
TINY = dict(  # what a bare `train.py` runs on a machine without a GPU
    model=f"{ASSETS}/tiny", data=f"{ASSETS}/countdown/train.jsonl", eval_data=f"{ASSETS}/countdown/test.jsonl",
    steps=30, eval_every=5, prompts_per_step=32, updates_per_step=2, max_new_tokens=64, lr=1e-4,
    gradient_checkpointing=False)


@dataclass
class Config:
    """Every knob of a run, a flag each; `--help` lists them."""
    # the task
    model: str = flag("Qwen/Qwen2.5-3B-Instruct", "folder or Hub name of a Qwen2, Qwen2.5 or Qwen3 model")
    data: str = flag("Jiayi-Pan/Countdown-Tasks-3to4:train[512:]", "file or owner/name[/config], maybe with :split")
    eval_data: str = flag("Jiayi-Pan/Countdown-Tasks-3to4:train[:512]", "as --data; '' for none")
    # rollout
    engine: str = flag("auto", "sglang, on the trainer's GPUs; http://host:port[,http://...], SGLang servers that run "
                       "already; local; auto: sglang where it and a GPU are there, else local")
    prompts_per_step: int = flag(64, "prompts a step, over all ranks")
    group_size: int = flag(8, "completions a prompt (G)")
    max_new_tokens: int = flag(1024, "longest turn of the policy, in tokens")
    max_turns: int = flag(1, "turns of the policy in an episode; above 1, env_step answers each")
    temperature: float = flag(1.0, "of sampling, and so of the trained log-probs")
    # algorithm
    algo: Literal[tuple(ALGORITHMS)] = flag("grpo", "row of the table of algorithms")
    # where the default is None, the row says
    baseline: Literal["none", "mean", "leave_one_out"] | None = flag(None, "of a group; none: each turn for itself")
    normalize: Literal["none", "group", "turns", "tokens"] | None = flag(None, "over what advantages have a std of 1")
    ratio: Literal["token", "step", "sequence"] | None = flag(None, "what has one ratio pi / pi_old")
    surrogate: Literal["clip", "cispo", "reinforce"] | None = flag(None, "what is maximised for a token")
    aggregation: Literal["sequence", "step", "token", "constant"] | None = flag(None, "what weighs the same in a loss")
    clip_low: float | None = flag(None, "the ratio counts down to 1 - clip_low")
    clip_high: float | None = flag(None, "the ratio counts up to 1 + clip_high")
    dual_clip: float = flag(0.0, "bound on the ratio of tokens with A < 0, such as 3; 0: none")
    gamma: float = flag(1.0, "discount of rewards from turn to turn")
    kl_coef: float = flag(0.0, "of the divergence from the first policy; 0 loads no reference model")
    kl_estimator: Literal["k1", "k2", "k3"] | None = flag(None, "of that divergence")
    kl_in: Literal["loss", "reward"] | None = flag(None, "where that divergence is charged")
    entropy_coef: float = flag(0.0, "of the bonus for entropy in the loss")
    tis_cap: float = flag(0.0, "truncated importance sampling, engine against actor: largest weight, such as 2; 0: off")
    dynamic_sampling: int | None = flag(None, "more rollouts a step, at most, for groups without signal")
    overlong_buffer: float | None = flag(None, "share of max_new_tokens over which the reward falls by 1")
    mask_truncated: bool | None = flag(None, "no gradient from completions that were cut off")
    updates_per_step: int = flag(1, "optimiser steps a rollout, each on its share of the prompts")
    # optimiser
    steps: int = flag(200, "rollouts in all")
    lr: float = flag(1e-6, "peak learning rate of AdamW")
    lr_schedule: Literal["constant_with_warmup", "cosine"] = flag("constant_with_warmup", "of lr")
    warmup_steps: int = flag(5, "optimiser steps from 0, the first, to the peak")
    max_grad_norm: float = flag(1.0, "bound on the one norm over all ranks and parameters")
    # machine
    tp_size: int = flag(0, "ranks that share each layer; 0: 2 on an even number of GPUs, else 1")
    dp_replicate: int = flag(1, "whole copies of the sharded model, such as one a machine (HSDP)")
    device: Literal[("cuda", "cpu") if GPU else ("cpu",)] = flag("cuda" if GPU else "cpu", "of the actor")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16" if GPU else "float32", "of compute")
    tokens_per_micro_batch: int = flag(8192, "budget of one packed forward and backward pass on a rank")
    gradient_checkpointing: bool = flag(True, "recompute activations: slower, but far less memory")
    offload: bool = flag(False, "keep the actor and Adam in CPU memory while the engine samples")
    compile: bool = flag(False, "torch.compile each layer and the log-probs: a minute at the start")
    sglang_args: JSON = flag(JSON(mem_fraction_static=0.5), "JSON for sglang.Engine")
    bucket_mb: float = flag(512, "weights on their way to SGLang at once, in MB; a tensor is never cut")
    engine_timeout: float = flag(1800, "seconds that SGLang may be silent in before it counts as dead")
    gate: Literal["stop", "warn", "off"] = flag("stop", "when engine and actor disagree on log-probs")
    # the run
    seed: int = flag(0, "of the order of the data, and of samples (SGLang: see generate)")
    output_dir: str = flag("", "where the run writes; empty: runs/<time>")
    eval_every: int = flag(10, "steps between evaluations, one of them before step 1; 0: never")
    eval_samples: int = flag(1, "completions a prompt in an evaluation: n of avg@n, the largest k of pass@k")
    eval_temperature: float = flag(0.0, "of evaluations; 0: greedy")
    eval_only: bool = flag(False, "evaluate the model as it is, and end")
    target: float = flag(0.0, "end when eval_score reaches it, and write what that took; 0: none")
    save_every: int = flag(0, "steps between checkpoints; 0: only when SIGTERM or Ctrl-C ends the run")
    keep_checkpoints: int = flag(2, "the newest that stay")
    resume: str = flag("", "checkpoint or run to go on from, with its flags; auto: the one in --output_dir, if any")
    reward_workers: int = flag(int(sys.platform == "linux"), "processes a rank for reward_fn; 0: the rank itself")
    reward_timeout: float = flag(60.0, "seconds for reward_fn, a sample, and for env_step, a turn")
    max_reward_failures: float = flag(0.1, "share of a step's samples that may fail before the run ends")
    max_skipped_steps: int = flag(5, "steps in a row whose gradient may be not finite before the run ends")
    wandb: Literal["auto", "online", "offline", "off"] = flag("auto", "auto: online when logged in")

    def __post_init__(self):
        chosen = COMMON | ALGORITHMS[self.algo]
        given = {name for name, value in vars(self).items() if value is not None and value != chosen.get(name)}
        for name in chosen.keys() - given:
            setattr(self, name, chosen[name])
        if self.engine == "auto":
            self.engine = "sglang" if self.device == "cuda" and find_spec("sglang") else "local"
        check_config(self, given)


# ------------------------------------------------ 2. The task: edit here ----------------------------------------------
COUNTDOWN = ("Make {target} from the numbers {nums}: use each exactly once, with + - * / and parentheses. Think in "
             "<think> </think> tags, then give the expression alone in <answer> </answer> tags, such as "
             "<answer>(1 + 2) / 3</answer>.")
MATH = "{}\nThink step by step, and put the final answer into \\boxed{{}}."


@dataclass
class Sample:
    """One episode: what the dataset asked, and what came of it. Lists are per token [T], the prompt's first."""
    messages: list[dict]                                    # the chat that becomes the prompt; markup in it is text
    row: dict                                               # the dataset's row, for reward_fn
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)           # 1 where the policy made the token: these are trained
    logprobs: list[float] = field(default_factory=list)     # the engine's, at its temperature; 0 where mask is 0
    versions: list[int] = field(default_factory=list)       # how often weights had been pushed; 0 where mask is 0
    steps: list[int] = field(default_factory=list)          # the turn that a token is part of, from 0; see reward_fn
    text: str = ""                                          # what the policy wrote, all turns
    turns: list[str] = field(default_factory=list)          # the same turn by turn
    state: dict = field(default_factory=dict)               # for env_step and reward_fn to remember things in
    key: tuple[int, ...] = ()                               # the prompt's place in the run, the number in its group
    truncated: bool = False                                 # stopped by a limit, not by itself
    failure: str = ""                                       # why it cannot be learned from, nor can its group
    rewards: list[float] = field(default_factory=list)      # one a step
    advantages: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)  # the first policy's, where --kl_coef asks for it
    entropy: list[float] = field(default_factory=list)      # where it was trained on; and the actor's log-probs then,
    logprob_diff: list[float] = field(default_factory=list)  # less the engine's: to look at, not to learn from
    metrics: dict[str, float] = field(default_factory=dict)  # what else reward_fn wants averaged and logged

    @property
    def reward(self) -> float:
        """Of the whole episode."""
        return sum(self.rewards)

    def append(self, ids: list[int], mask: int, logprobs: list[float] | None = None, versions: list[int] | None = None,
               step: int = 0):
        """Adds tokens as they are: nothing that was sampled is ever decoded and encoded again."""
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += versions or [0] * len(ids)
        self.steps += [step] * len(ids)


class RLDataset(torch.utils.data.Dataset):
    """Rows of a file or of a Hub dataset, as prompts."""

    def __init__(self, source: str):
        self.source, self.rows = source, load_rows(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """EDIT HERE: from a row to a prompt. `row` is all that reward_fn will know."""
        row = self.rows[index]
        columns = {name for name, value in row.items() if value is not None}
        if {"nums", "target"} <= columns:
            content = COUNTDOWN.format(**row)
        elif {"question", "answer"} <= columns:
            content = MATH.format(row["question"])
        elif {"problem", "answer"} <= columns:
            content = MATH.format(row["problem"])
        else:
            raise UserError(f"{self.source}: row {index} has {sorted(columns)}; it needs nums and target, question and "
                            "answer, or problem and answer; for other columns edit RLDataset.__getitem__")
        return Sample([{"role": "user", "content": content}], row)


def reward_fn(sample: Sample) -> float:
    """EDIT HERE: how good is sample.text? Any finite number; may be async; sample.metrics takes numbers to log.

    A list of numbers is one for each turn, or for each step where this function has set sample.steps [T] anew.
    """
    row = sample.row
    if row.get("nums") is not None:
        sample.metrics |= rewards.countdown_habits(sample.text, row["target"])
        return rewards.countdown(sample.text, row["nums"], row["target"])
    if row.get("question") is not None:
        return rewards.gsm8k_last_number(sample.text, row["answer"])
    return rewards.math(sample.text, row["answer"])


async def env_step(sample: Sample) -> str | None:
    """EDIT HERE for --max_turns above 1: what follows the policy's turn, chat markup included, or None to end.

    It sees every turn that was not cut off, the last one, too; after that one its answer is not played. What a tool
    said goes through `user_turn` of recipes/turns.py, or it could forge markup.
    """
    return None


# ------------------------------------------------ 3. Rollout ----------------------------------------------------------
async def rollout(sample: Sample, tokenizer, generate, env_step, max_turns: int, room: int) -> Sample:
    """Plays one episode, cut off where a turn would follow over `room` tokens. The mask is made with the token.

    `await generate(ids, turn)` is the policy: new ids [T], their log-probs [T], the versions of the weights that made
    them [T], and whether a limit cut it off.
    """
    if not sample.ids:
        sample.append(encode_prompt(tokenizer, sample), mask=0)
    for turn in range(max_turns):
        ids, logprobs, versions, sample.truncated = await generate(sample.ids, turn)
        sample.failure = check_turn(ids, logprobs, versions)
        if sample.failure:      # a turn has one token at least, and each a log-prob: of this one nothing is learned
            ids, logprobs, versions = ids or [tokenizer.eos_token_id], None, None
        sample.append(ids, 1, logprobs, versions, step=turn)
        sample.turns.append(tokenizer.decode(ids, skip_special_tokens=True))
        sample.text += sample.turns[-1]
        goes_on = env_step and not sample.truncated and not sample.failure
        reply = await env_step(sample) if goes_on else None
        if reply is None or turn == max_turns - 1:
            break
        sample.append(encode(tokenizer, reply), mask=0, step=turn)
        if len(sample.ids) > room:
            sample.truncated = True
            break
    return sample


# ------------------------------------------------ 4. Batches ----------------------------------------------------------
@dataclass
class Batch:
    """A micro-batch: whole sequences laid end to end without padding, T tokens in all, of which N are trained."""
    ids: torch.Tensor                           # [1, T]
    positions: torch.Tensor                     # [1, T], from 0 in each sequence
    bounds: torch.Tensor                        # [sequences + 1], in T: where each begins, and the last one's end
    longest: int                                # of the sequences, in tokens
    source: torch.Tensor                        # [N], in T: the token before a trained one, whose state predicts it
    targets: torch.Tensor                       # [N], the trained tokens
    sequences: torch.Tensor                     # [N], from 0: whose they are
    steps: torch.Tensor                         # [N], from 0: the step that each is part of, over all sequences
    engine_logprobs: torch.Tensor               # [N]
    advantages: torch.Tensor                    # [N]
    ref_logprobs: torch.Tensor                  # [N]
    weights: torch.Tensor                       # [N], in the loss: 1, until it is known what for
    old_logprobs: torch.Tensor | None = None    # [N]; None: those of the very pass that the loss is made of
    samples = ()                                # whose they are; no field, nor what follows: FSDP looks into all fields
    entropy = logprob_diff = None               # [N], of the pass that was trained on


def make_batch(samples: list[Sample], device: str) -> Batch:
    """Lays samples end to end; an empty list of theirs, such as advantages not yet known, stands for zeros."""
    tokens = lay_out(samples)
    lists = dict(engine_logprobs="logprobs", advantages="advantages", ref_logprobs="ref_logprobs")
    for name, of_sample in lists.items():
        tokens[name] = laid_out(samples, of_sample)[tokens["source"] + 1].float()
    longest = max(len(sample.ids) for sample in samples)
    batch = Batch(longest=longest, **{name: value.to(device) for name, value in tokens.items()})
    batch.samples = samples
    return batch


# ------------------------------------------------ 5. Advantages -------------------------------------------------------
def returns_to_go(rewards: list[float], gamma: float) -> list[float]:
    """Rewards of a sample's steps -> their returns: G_k = r_k + gamma G_k+1 (GEM, arXiv:2510.01051)."""
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + gamma * returns[-1])
    return returns[:0:-1]


def penalties(tokens: Batch, config: Config) -> torch.Tensor:
    """What each trained token pays, [N]: for divergence, if --kl_in is reward; the last of a completion for length."""
    paid = torch.zeros(len(tokens.steps), dtype=torch.float64)
    if config.kl_coef and config.kl_in == "reward":
        paid += config.kl_coef * kl_divergence(tokens.engine_logprobs, tokens.ref_logprobs, config.kl_estimator)
    if config.overlong_buffer:
        lengths, buffer = tokens.sequences.bincount(), config.overlong_buffer * config.max_new_tokens
        paid[lengths.cumsum(0) - 1] += ((lengths - config.max_new_tokens + buffer) / buffer).clamp(min=0)
    return paid


def token_returns(samples: list[Sample], tokens: Batch, config: Config) -> torch.Tensor:
    """The return of each trained token, [N]: its step's, without what earlier tokens of the step have paid."""
    paid, returns = penalties(tokens, config), []
    of_step = iter(paid.new_zeros(int(tokens.steps[-1]) + 1).index_add(0, tokens.steps, paid).tolist())
    for sample in samples:
        returns += returns_to_go([reward - next(of_step) for reward in sample.rewards], config.gamma)
    before = paid.cumsum(0) - paid                      # by all tokens before; the next line begins anew at each step
    before -= before[firsts(tokens.steps)][tokens.steps]
    return torch.tensor(returns, dtype=torch.float64)[tokens.steps] + before


def above_baseline(returns: torch.Tensor, sequences: torch.Tensor, size: int, baseline: str) -> torch.Tensor:
    """Returns [N] of whole groups' tokens, sequences [N] -> [N]: for each completion, its return less its group's.

    Without a baseline each token keeps its own return.
    """
    if baseline == "none":
        return returns
    totals = returns[firsts(sequences)].view(-1, size)
    above = totals - totals.mean(1, keepdim=True)
    above[(totals == totals[:, :1]).all(1)] = 0         # without the rounding of the mean: such a group teaches nothing
    if baseline == "leave_one_out":
        above = above * size / (size - 1)               # r - mean of the others = (r - mean of all) G / (G - 1)
    return above.flatten()[sequences]


def normalized(values: torch.Tensor, sequences: torch.Tensor, steps: torch.Tensor, size: int, normalize: str):
    """Values [N] of whole groups' tokens, their sequences and steps [N] -> values with a std of 1, [N].

    Over a group; or over all tokens, or turns, and then with a mean of 0, too.
    """
    if normalize == "none":
        return values
    if normalize == "group":
        std = values[firsts(sequences)].view(-1, size).std(1) + 1e-6
        return values / std[sequences // size]
    counted = values[firsts(steps)] if normalize == "turns" else values
    return (values - counted.mean()) / (counted.std().nan_to_num() + 1e-6)


def firsts(units: torch.Tensor) -> torch.Tensor:
    """Numbers [N] that ascend from 0 -> where each begins, [units]."""
    return units.diff(prepend=units[:1] - 1).nonzero()[:, 0]


# ------------------------------------------------ 6. Loss -------------------------------------------------------------
def token_weights(batch: Batch, aggregation: str, samples: list[Sample], max_new_tokens: int) -> torch.Tensor:
    """The weight of each trained token of a micro-batch, [N], in an optimiser step over these samples, of all ranks."""
    if aggregation == "constant":
        return torch.full_like(batch.weights, 1 / (len(samples) * max_new_tokens))
    if aggregation == "token":
        return torch.full_like(batch.weights, 1 / sum(sum(sample.mask) for sample in samples))
    total, units = {"sequence": (len(samples), batch.sequences),
                    "step": (sum(len(sample.rewards) for sample in samples), batch.steps)}[aggregation]
    return 1 / (total * units.bincount()[units])


def importance_ratio(log_ratio: torch.Tensor, batch: Batch, level: str) -> torch.Tensor:
    """pi / pi_old of each token from its logarithm, [N] -> [N]: of the token, or of what it is a part of.

    Of a step it is the product (an action of OpenR's APPO); of a sequence the geometric mean (GSPO, eq. 7).
    """
    if level == "token":
        return log_ratio.exp()
    units = batch.steps if level == "step" else batch.sequences
    sums = log_ratio.new_zeros(units.max() + 1).index_add(0, units, log_ratio)
    return (sums / units.bincount() if level == "sequence" else sums).exp()[units]


def surrogate_loss(logprobs, ratio, advantages, surrogate: str, low: float, high: float, dual_clip: float):
    """The loss of each token, [N], and where the clip cut its gradient off, [N]; all tensors are [N].

    clip: PPO, arXiv:1707.06347 eq. 7, with the bound for A < 0 of arXiv:1912.09729 eq. 5. Others: see ALGORITHMS.
    """
    if surrogate == "reinforce":
        return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)
    bounded = ratio.clamp(1 - low, 1 + high)
    if surrogate == "cispo":
        return -bounded.detach() * advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)
    free, clipped = ratio * advantages, bounded * advantages
    gain, cut = torch.minimum(free, clipped), clipped < free
    if dual_clip:
        floor = torch.where(advantages < 0, dual_clip * advantages, -math.inf)
        gain, cut = torch.maximum(gain, floor), cut | (gain < floor)
    return -gain, cut


def kl_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(pi, pi_ref) from tokens that pi sampled, [N] (Schulman 2020, joschu.net/blog/kl-approx.html)."""
    gap = logprobs - ref_logprobs
    return {"k1": gap, "k2": gap ** 2 / 2, "k3": torch.exp(-gap) - 1 + gap}[estimator]


def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch, config: Config):
    """The loss of a micro-batch, a plain sum as the weights normalise it, and where the clip cut the gradient off, [N].

    Log-probs and entropy [N] are the policy's.
    """
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = importance_ratio(logprobs - old_logprobs, batch, config.ratio)
    loss, cut = surrogate_loss(logprobs, ratio, batch.advantages, config.surrogate, config.clip_low, config.clip_high,
                               config.dual_clip)
    if config.tis_cap:      # Yao et al. 2025, fengyao.notion.site/off-policy-rl
        loss = loss * (old_logprobs - batch.engine_logprobs).exp().clamp(max=config.tis_cap)
    if config.kl_coef and config.kl_in == "loss":
        loss = loss + config.kl_coef * kl_divergence(logprobs, batch.ref_logprobs, config.kl_estimator)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return (batch.weights * loss).sum(), cut


# ================================================ Part II: the machine ================================================
# ------------------------------------------------ 7. Sharding ---------------------------------------------------------
def apply_tensor_parallel(model, mesh: DeviceMesh):
    """Megatron's split (arXiv:1909.08053 sec. 3) as DTensors; `find_model` has seen that the heads divide."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),   # a slice of the vocabulary, as the head
        "model.layers.*.self_attn.q_proj": column,      # whole heads
        "model.layers.*.self_attn.k_proj": column,
        "model.layers.*.self_attn.v_proj": column,
        "model.layers.*.self_attn.o_proj": row,
        "model.layers.*.mlp.gate_proj": column,
        "model.layers.*.mlp.up_proj": column,
        "model.layers.*.mlp.down_proj": row,
        "lm_head": column,
    }
    if model.config.model_type == "qwen3":              # these norms see this rank's heads: [B, T, heads / tp, width]
        per_head = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"model.layers.*.self_attn.q_norm": per_head, "model.layers.*.self_attn.k_norm": per_head}
    parallelize_module(model, mesh, plan)
    for name, module in model.named_modules():          # the other norms see whole activations
        if name.endswith("layernorm") or name == "model.norm":
            distribute_module(
                module, mesh, None,
                lambda module, args, mesh: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),),
                lambda module, output, mesh: output.to_local())


def empty_model(path: str):
    """The model of a Hugging Face folder, in fp32, without memory for its parameters; buffers are real."""
    AttentionInterface.register("packed", packed_attention)
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32,
                                                attn_implementation="packed").train()


def shard(model, mesh: dict[str, DeviceMesh], config: Config):
    """Splits an empty model over the mesh, and gives each rank memory for its slices, not yet filled."""
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh["tp"])
    if model.config.tie_word_embeddings:                # both of the above make two parameters of one
        model.lm_head.weight = model.model.embed_tokens.weight
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if config.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=mesh["fsdp"], mp_policy=precision)
        unit.set_gradient_divide_factor(1.0)            # gradients are summed over ranks: the loss has divided already
        unit.set_force_sum_reduction_for_comms(True)    # ... in the way that gloo knows, too
    model.logprobs = partial(model_logprobs, model, mesh["tp"])
    register_fsdp_forward_method(model, "logprobs")
    buffers = dict(model.named_buffers())
    model.to_empty(device=config.device)
    for name, value in buffers.items():                 # to_empty wiped the rotary table
        model.get_buffer(name).copy_(value)
    return model


# ------------------------------------------------ 8. Log-probs --------------------------------------------------------
def model_logprobs(model, tp: DeviceMesh, batch: Batch, temperature: float, vocab_size: int):
    """Log-probs [N] and entropies [N], fp32. A method of the model, so that FSDP gathers the weights for it."""
    states = model.model(batch.ids, position_ids=batch.positions, use_cache=False, bounds=batch.bounds,
                         longest=batch.longest).last_hidden_state[0, batch.source]
    head = model.lm_head.weight
    head = head.to_local() if isinstance(head, DTensor) else head
    return HeadLogprobs.apply(states, head, batch.targets, temperature, vocab_size, tp)


# ------------------------------------------------ 9. Actor ------------------------------------------------------------
class Policy:
    """A model, sharded over the mesh, that says how likely tokens are; as it is, the reference of --kl_coef."""

    def __init__(self, path: str, mesh: dict[str, DeviceMesh], config: Config, vocab_size: int):
        self.config, self.mesh = config, mesh
        self.model = self.build(path)
        dcp.load(self.weights(), storage_reader=dcp.HuggingFaceStorageReader(path))    # each rank its slices
        self.logprobs = partial(self.model.logprobs, temperature=config.temperature, vocab_size=vocab_size)

    def build(self, path: str):
        """The sharded model, not yet filled."""
        return shard(empty_model(path), self.mesh, self.config)

    def weights(self) -> dict[str, DTensor]:
        """The weights themselves, sharded and in fp32, by their names in a file; a tied head is in none."""
        tied = self.model.config.tie_word_embeddings
        return {name: value for name, value in self.model.state_dict().items()
                if not (tied and name == "lm_head.weight")}


class Actor(Policy):
    """The policy that learns: a sharded model and its optimiser."""
    summarize = staticmethod(update_metrics)

    def __init__(self, path: str, mesh: dict[str, DeviceMesh], config: Config, vocab_size: int):
        super().__init__(path, mesh, config, vocab_size)
        self.on_the_way = dict(limit=config.bucket_mb * 2**20, device=config.device, dtype=getattr(torch, config.dtype))
        self.parameters = dict(self.model.named_parameters())   # now: once gathered, FSDP shows other tensors
        self.optimizer = torch.optim.AdamW(self.parameters.values(), config.lr, betas=(0.9, 0.99), weight_decay=0.0,
                                           fused=True)
        self.skipped = 0                                        # steps in a row without a finite gradient
        self.scheduler = get_scheduler(config.lr_schedule, self.optimizer, config.warmup_steps,
                                       config.steps * config.updates_per_step)

    def update(self, updates: list[list[Batch]]) -> dict[str, float]:
        """One optimiser step for each list of micro-batches, as many as on every rank. Metrics are over all ranks."""
        sums, worst, norms = Counter(), 0.0, []
        for batches in updates:
            for batch in tqdm(batches, desc="update", leave=False, disable=None if dist.get_rank() == 0 else True):
                loss, counts, gap = self.loss(batch)
                loss.backward()
                for name, value in (counts | {"loss": loss.detach()}).items():
                    sums[name] += value
                worst = max(worst, gap)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm, foreach=True)
            if norm.full_tensor().isfinite():           # else nothing of this update counts
                self.optimizer.step()
                self.scheduler.step()
                norms.append(norm.full_tensor().item())
            self.optimizer.zero_grad()
        totals = dict(zip(sums, reduce(torch.stack([*sums.values()]).tolist(), self.mesh["dp"])))
        (worst,) = reduce([float(worst)], self.mesh["dp"], dist.ReduceOp.MAX)
        self.skipped = 0 if norms else self.skipped + 1
        return self.summarize(totals, len(updates)) | {
            "logprob_diff_max": worst, "grad_norm": fmean(norms or [math.nan]), "skipped": len(updates) - len(norms)}

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """The loss of a micro-batch, sums over its tokens for `update_metrics`, and the largest gap to the engine."""
        logprobs, entropy = self.logprobs(batch)
        batch.entropy, batch.logprob_diff = entropy.detach(), logprobs.detach() - batch.engine_logprobs
        loss, cut = policy_loss(logprobs, entropy, batch, self.config)
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        real = batch.weights > 0
        compared = real & (old_logprobs is not batch.engine_logprobs)
        gap = (old_logprobs - batch.engine_logprobs).abs() * compared
        sums = dict(tokens=real, entropy=entropy.detach() * real, cut=cut & real, compared=compared, gap=gap,
                    exp_gap=gap.exp() * compared)
        if self.config.kl_coef:
            sums["kl"] = kl_divergence(logprobs.detach(), batch.ref_logprobs, "k3") * real
        return loss, {name: value.sum().float() for name, value in sums.items()}, gap.max()

    def whole_weights(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Names and whole tensors in the run's dtype, bucket by bucket; all ranks take them together."""
        return whole_weights(self.weights(), **self.on_the_way)

    def save(self, folder: Path):
        """Writes weights and config as a Hugging Face folder; all ranks call it, rank 0 writes."""
        export(self.weights(), folder, self.model.config, **self.on_the_way)


# ------------------------------------------------ 10. SGLang ----------------------------------------------------------
class SGLangEngine:
    """Samples with SGLang and keeps its weights new; `link` is the way to it: on the trainer's GPUs, or on servers."""
    exact = False       # its kernels are not the actor's: log-probs differ by more than the order of a sum

    def __init__(self, path: str, tokenizer, mesh: dict[str, DeviceMesh], config: Config):
        self.config, self.version = config, 0
        self.share = slice(None) if mesh["tp"].get_local_rank() == 0 else slice(0)  # it asks for its whole group
        self.link = Colocated(path, mesh["tp"], config) if config.engine == "sglang" else Servers(config)
        self.loop, self.vocab_size = self.link.loop, AutoConfig.from_pretrained(path).vocab_size
        self.sleep, self.close = self.link.sleep, self.link.close   # asleep it forgets all: a push must follow
        self.sampling = dict(stop_token_ids=[tokenizer.eos_token_id], top_p=1.0, top_k=-1, min_p=0.0,
                             repetition_penalty=1.0)    # said aloud: a server may have defaults of its own

    async def generate(self, ids: list[int], temperature: float, seed: int, limit: int = 0):
        """Samples one completion of at most `limit` tokens, by default max_new_tokens. Returns what `rollout` expects.

        SGLang heeds the seed in its deterministic mode only: --sglang_args '{"enable_deterministic_inference": true}'.
        """
        sampling = self.sampling | dict(temperature=temperature, sampling_seed=seed,
                                        max_new_tokens=limit or self.config.max_new_tokens)
        return await self.link.generate(self.version, input_ids=ids, return_logprob=True, sampling_params=sampling)

    def push(self, weights: Iterable[list[tuple[str, torch.Tensor]]]):
        """Wakes SGLang up with new weights, whole ones bucket by bucket; all ranks call it together."""
        self.version += 1
        self.link.begin()
        for bucket in weights:
            self.link.send(bucket, self.version)
        self.link.end()


# ================================================ Part III: the loop ==================================================
class Trainer:
    """Act, compare, learn, publish. A recipe may subclass it."""

    def __init__(self, config: Config, dataset_class, reward_fn, env_step):
        self.config, self.env_step = config, partial(ask, env_step, seconds=config.reward_timeout)
        self.timed, self.stop = Stopwatch(), Stop()
        self.data = dataset_class(config.eval_data if config.eval_only else config.data)
        self.eval_data = dataset_class(config.eval_data) if config.eval_data and config.eval_every else []
        self.judges = Judges(reward_fn, config)         # before there are threads, which a fork would lose
        self.mesh = init_distributed(config)
        path, context = find_model(config.model, self.mesh["tp"].size())
        self.tokenizer, self.room = find_tokenizer(path), context - config.max_new_tokens
        check_prompts([self.data, self.eval_data], partial(encode_prompt, self.tokenizer), self.room)
        self.checkpoint, self.state = find_run(config)
        self.draws = self.state["draws"]
        engine_class = LocalEngine if config.engine == "local" else SGLangEngine
        self.engine = engine_class(path, self.tokenizer, self.mesh, config)
        self.actor = Actor(path, self.mesh, config, self.engine.vocab_size)
        self.reference = Policy(path, self.mesh, config, self.engine.vocab_size) if config.kl_coef else None
        self.learners = {"actor": self.actor}           # what a checkpoint holds
        set_seed(config.seed + dist.get_rank())         # for an env_step that draws; not sooner: SGLang draws its ports
        probe = Probe(self, rollout, make_batch)
        self.gate = Gate(config, self.actor.model.config.tie_word_embeddings, probe.play, probe.score)
        self.log = RunLog(asdict(config), __file__, self.tokenizer, len(self.data), dist.get_rank() == 0,
                          self.checkpoint and self.checkpoint.parent, self.state.get("log"))

    def fit(self):
        """Runs all steps with evaluations between them, and leaves the model as a Hugging Face folder."""
        config = self.config
        last = 0 if config.eval_only else config.steps
        self.start()
        try:
            for step in range(self.state["step"] + 1, last + 1):    # step 0 only evaluates: the model as it came
                metrics, samples = self.step() if step else ({}, [])
                if self.eval_data and (step % config.eval_every == 0 or step == last):
                    metrics |= self.evaluate()
                self.log.write(step, metrics, samples)
                check_failures(samples, config.max_reward_failures)
                check_skipped(self.actor.skipped, config.max_skipped_steps)
                self.state = dict(step=step, draws=self.draws, version=self.engine.version, random=random_states(),
                                  log=self.log.state())
                if config.save_every and step and step % config.save_every == 0:
                    self.save_checkpoint()
                if config.target and metrics.get("eval_score", -math.inf) >= config.target:
                    self.log.reached(step, metrics["eval_score"])
                    break
                if step < last:
                    self.stop.check()
            if not config.eval_only:
                save_model(config, self.save)
        except Stopped as stopped:
            self.save_checkpoint()
            self.log.stopped(str(stopped), self.state["step"])
        self.log.close()
        self.engine.close()

    def start(self):
        """Takes over a checkpoint, if there is one, and hands the engine its first weights."""
        self.swap(to="actor")
        if self.checkpoint:
            load_checkpoint(self.checkpoint, self.state, self.learners)
            self.engine.version = self.gate.pushes = self.state["version"] - 1      # the next push is that one again
        self.publish(start=True)
        self.swap(to="engine")
        self.stop.listen()

    def evaluate(self) -> dict[str, float]:
        """The mean reward on the evaluation data (avg@n); with several samples a prompt, that of the best of k, too."""
        size, prompts = self.config.eval_samples, list(enumerate(range(len(self.eval_data))))
        played = gather(self.act(self.eval_data, prompts, size, self.config.eval_temperature), self.mesh["dp"])
        check_failures(played, self.config.max_reward_failures)
        failures = sum(bool(sample.failure) for sample in played)
        scores = [0.0 if sample.failure else sample.reward for sample in played]
        groups = [scores[i:i + size] for i in range(0, len(scores), size)]
        return {"eval_score": fmean(scores), "eval_failures": failures} | best_of(groups)

    def step(self) -> tuple[dict[str, float], list[Sample]]:
        """One step of GRPO. Returns metrics and samples of all ranks."""
        self.timed.clear()
        with self.timed("step"):
            samples = self.rollout()
            self.swap(to="actor")
            metrics = self.learn(samples) | self.publish()
            self.gate.judge_rollout(metrics["logprob_diff"])
            self.swap(to="engine")
        return metrics | speed(self.actor.model.config, samples, self.timed, self.mesh["dp"]), samples

    def rollout(self) -> list[Sample]:
        """The samples of a step, of all ranks; with --dynamic_sampling of groups that teach, if enough of them come."""
        config, size, chosen, others = self.config, self.config.group_size, [], []
        for _ in range(1 + config.dynamic_sampling):
            self.draws += 1
            with self.timed("rollout"), self.stop.may_drop():
                prompts = prompt_order(self.draws, len(self.data), config)
                played = self.act(self.data, prompts, size, config.temperature)
            with self.timed("wait"):        # for the ranks that are not through
                played = sorted(gather(played, self.mesh["dp"]), key=lambda sample: sample.key)
                self.stop.check()
            for group in (played[i:i + size] for i in range(0, len(played), size)):
                rewards_found = {sample.reward for sample in without_failures(group)}
                teaches = not config.dynamic_sampling or len(rewards_found) > 1
                (chosen if teaches else others).extend(group)
            if len(chosen) >= len(played):
                break
            check_failures(played, config.max_reward_failures)      # now: groups that are drawn anew leave no trace
        return (chosen + others)[:len(played)]

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Compares the samples with each other, and updates the actor."""
        with self.timed("logprobs"):
            if self.reference:
                found = self.token_values(samples, lambda batch: self.reference.logprobs(batch)[0])
                for sample, logprobs in zip(samples, found):
                    sample.ref_logprobs = logprobs
            self.compare(samples)
            updates = self.batches(samples)
        with self.timed("update"):
            metrics = self.actor.update(updates)
            hand_back(samples, sum(updates, []), ("entropy", "logprob_diff"), self.mesh["dp"])
        return metrics

    def swap(self, to: str):
        """Frees the devices for the next phase: of the engine for the actor, with --offload the other way, too."""
        with self.timed("swap"):
            if to == "actor":
                self.engine.sleep()
            if self.config.offload:
                for model in filter(None, (*self.learners.values(), self.reference)):
                    move(model, self.config.device if to == "actor" else "cpu")

    def publish(self, start: bool = False) -> dict[str, float]:
        """Hands the actor's weights to the engine, and lets the gate see whether they arrived."""
        with self.timed("push"):
            self.engine.push(self.actor.whole_weights())
        with self.timed("gate"):
            return self.gate.check(start)

    def save(self, folder: Path):
        """Exports the model as a Hugging Face folder."""
        self.actor.save(folder)
        self.log.add_tokenizer(folder)

    def save_checkpoint(self):
        """Writes what self.state, of the last whole step, goes with."""
        save_checkpoint(self.config, self.state, self.learners, self.save)

    def act(self, dataset, prompts: list[tuple[int, int]], size: int, temperature: float) -> list[Sample]:
        """Plays `size` episodes of each (place, row). Returns those of this data-parallel rank, prompt by prompt."""
        return self.play(self.episodes(dataset, prompts, size, temperature))

    def episodes(self, dataset, prompts: list[tuple[int, int]], size: int, temperature: float) -> list:
        """The episodes that this rank plays, not yet begun; a group's start from copies of one prompt."""
        mine, episodes = prompts[self.mesh["dp"].get_local_rank()::self.mesh["dp"].size()][self.engine.share], []
        for place, row in mine:
            prompt = make_prompt(dataset, row, partial(encode_prompt, self.tokenizer), self.room)
            episodes += [self.episode(replace(deepcopy(prompt), key=(place, i)), temperature) for i in range(size)]
        return episodes

    def play(self, episodes: list) -> list[Sample]:
        """Runs episodes, all at once, on this rank's share of an engine. Returns those of its tensor-parallel group."""
        with_bar = partial(tqdm.gather, desc="rollout", leave=False, disable=None if dist.get_rank() == 0 else True)
        return gather(run(self.engine.loop, self.stop.together(episodes, with_bar)), self.mesh["tp"])

    async def episode(self, sample: Sample, temperature: float) -> Sample:
        """One rollout with its reward. Its randomness hangs on the run's seed and its key alone."""
        def generate(ids, turn):
            return self.engine.generate(ids, temperature, hash((self.config.seed, *sample.key, turn)))

        await rollout(sample, self.tokenizer, generate, self.env_step, self.config.max_turns, self.room)
        seconds = await self.judges.judge(sample)
        self.timed["time_reward"] += seconds        # a sum over samples, while others are still sampled
        return sample

    @torch.no_grad()
    def token_values(self, samples: list[Sample], model) -> list[list[float]]:
        """What model(batch), [N], says of samples that all ranks have, a list [T] for each. Ranks share the work."""
        batches = self.share(samples, samples[0])
        return per_sample(samples, batches, [model(batch) for batch in batches], self.mesh["dp"])

    def compare(self, samples: list[Sample]):
        """Sets the advantages of whole groups; a failure's is compared with nothing."""
        samples = without_failures(samples) or samples
        config, tokens = self.config, make_batch(samples, "cpu")
        groups = dict(sequences=tokens.sequences, size=config.group_size)
        advantages = above_baseline(token_returns(samples, tokens, config), **groups, baseline=config.baseline)
        advantages = normalized(advantages, steps=tokens.steps, **groups, normalize=config.normalize)
        for sample, values in zip(samples, by_sample(tokens, advantages)):
            sample.advantages = values

    def batches(self, samples: list[Sample]) -> list[list[Batch]]:
        """The micro-batches of this rank for each optimiser step, from the samples of all ranks."""
        config, count = self.config, self.config.updates_per_step
        groups = [samples[i:i + config.group_size] for i in range(0, len(samples), config.group_size)]
        updates = [self.micro_batches(sum(groups[i::count], [])) for i in range(count)]
        for i, batches in enumerate(updates):
            for batch in batches:
                batch.old_logprobs = self.old_logprobs(batch, i)
        return updates

    @torch.no_grad()
    def old_logprobs(self, batch: Batch, update: int) -> torch.Tensor | None:
        """Where the ratio of the loss starts, [N]. The first optimiser step is on-policy: None, its own pass."""
        if update == 0:
            return None
        return batch.engine_logprobs if self.engine.exact else self.actor.logprobs(batch)[0]

    def micro_batches(self, samples: list[Sample]) -> list[Batch]:
        """Packs the samples of one optimiser step. Those that leave no gradient only count in the weights."""
        config = self.config
        counted = [sample for sample in without_failures(samples)
                   if not (config.mask_truncated and sample.truncated)]
        always = config.entropy_coef or config.kl_coef and config.kl_in == "loss"
        batches = self.share([sample for sample in counted if always or any(sample.advantages)], samples[0])
        for batch in batches:
            batch.weights *= token_weights(batch, config.aggregation, counted or samples, config.max_new_tokens)
        return batches

    def share(self, samples: list[Sample], filler: Sample) -> list[Batch]:
        """This rank's micro-batches of samples that all ranks have.

        FSDP wants as many on each rank: one that gets none runs the filler, with a weight of 0.
        """
        dp = self.mesh["dp"]
        packs = pack(samples, self.config.tokens_per_micro_batch, dp.size())
        mine = packs[dp.get_local_rank()::dp.size()]
        batches = [make_batch(part or [filler], self.config.device) for part in mine]
        for part, batch in zip(mine, batches):
            batch.weights *= bool(part)
        return batches


def main(config_class=Config, dataset_class=RLDataset, reward_fn=reward_fn, env_step=env_step, trainer_class=Trainer):
    """Runs a training; a recipe hands over what it replaces."""
    with one_line_errors():
        trainer_class(parse_flags(config_class, TINY, sys.argv[1:], flags_of), dataset_class, reward_fn, env_step).fit()
    dist.barrier()          # nobody leaves before rank 0 has written everything
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
