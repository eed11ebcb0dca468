"""GRPO in one file: train a Qwen model by reinforcement learning with verifiable rewards.

Each step samples a group of G completions of every prompt, rewards each with a number r, and raises the probability of
those that beat their own group (DeepSeekMath, arXiv:2402.03300):

    A_i    = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                       one advantage a completion, no critic
    rho_t  = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                    one ratio a token
    loss   = - sum_t w_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A)   w_t: how --algo weighs a token

Unlike the paper, on purpose: no KL term, so no reference model; sampling by the newest weights, which are pushed into
the engine after every step; counts over all ranks in w_t, so that neither ranks nor micro-batches change a gradient.

    torchrun --standalone --nproc_per_node=4 train.py             # four GPUs: Qwen2.5-3B-Instruct learns countdown
    torchrun --standalone --nproc_per_node=2 train.py             # no GPU: a tiny Qwen learns it within three minutes
    torchrun --standalone --nproc_per_node=4 train.py --model Qwen/Qwen3-1.7B --data openai/gsm8k/main --algo dr_grpo

Part I is the algorithm; for a task of your own edit `__getitem__` and `reward_fn` in section 2. Part II is the machine:
skip it on a first reading. Part III is the loop, and the place to start.
Sizes have one letter everywhere: B sequences, G completions a prompt, T tokens, N trained tokens, V vocabulary.
"""
import asyncio
import inspect
import itertools
import logging
import math
import numbers
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from heapq import heapreplace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from tqdm.asyncio import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.hf_argparser import HfArg

import rewards
from local_engine import LocalEngine
from tools.gate import Gate
from tools.inputs import (JSON, UserError, check_prompts, find_folder, find_model, find_tokenizer, load_rows,
                          lost_contact, parse_flags)
from tools.runlog import RunLog, end
from tools.sglang_links import Colocated, Servers, run
from tools.speed import peak_gb, speed
from tools.weights import export, whole_weights


# ================================================ Part I: the algorithm ===============================================
# ------------------------------------------------ 1. Config -----------------------------------------------------------
ALGORITHMS = {  # rows for --algo; A is made in `group_advantages`, the weight of a token in `token_weight`
    # GRPO, arXiv:2402.03300 eq. 3: A = (r - mean) / std; a completion weighs 1/B, each of its tokens 1/length of that
    "grpo": dict(baseline="mean", normalize="std", aggregation="sequence"),
    # Dr. GRPO, arXiv:2503.20783 sec. 3.2: A = r - mean; a token weighs 1 / (B max_new_tokens), whatever the length
    "dr_grpo": dict(baseline="mean", normalize="none", aggregation="constant"),
    # RLOO, arXiv:2402.14740 eq. 8: A = r - mean of the other G - 1 rewards; a completion is one action, so its sum
    "rloo": dict(baseline="leave_one_out", normalize="none", aggregation="constant"),
}
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
    model: str = HfArg(default="Qwen/Qwen2.5-3B-Instruct", help="folder or Hub name of a Qwen2, Qwen2.5 or Qwen3 model")
    data: str = HfArg(default="Jiayi-Pan/Countdown-Tasks-3to4:train[512:]",
                      help=".jsonl, .json or .parquet file, or owner/name[/config] on the Hub; may end in :split")
    eval_data: str = HfArg(default="Jiayi-Pan/Countdown-Tasks-3to4:train[:512]", help="as --data; '' for none")
    # rollout
    engine: str = HfArg(default="auto", help="sglang, on the trainer's GPUs; http://host:port[,http://...], SGLang "
                        "servers that run already; local; auto: sglang where it and a GPU are there, else local")
    prompts_per_step: int = HfArg(default=64, help="prompts a step, over all ranks")
    group_size: int = HfArg(default=8, help="completions a prompt (G)")
    max_new_tokens: int = HfArg(default=1024, help="longest turn of the policy, in tokens")
    max_turns: int = HfArg(default=1, help="turns of the policy in an episode; above 1, env_step answers each")
    temperature: float = HfArg(default=1.0, help="of sampling, and so of the trained log-probs")
    # algorithm
    algo: Literal[tuple(ALGORITHMS)] = HfArg(default="grpo", help="row of the table of algorithms")
    clip_low: float = HfArg(default=0.2, help="the ratio counts down to 1 - clip_low")
    clip_high: float = HfArg(default=0.28, help="the ratio counts up to 1 + clip_high")
    updates_per_step: int = HfArg(default=1, help="optimiser steps a rollout, each on its share of the prompts")
    # optimiser
    steps: int = HfArg(default=200, help="rollouts in all")
    lr: float = HfArg(default=1e-6, help="peak learning rate of AdamW")
    lr_schedule: Literal["constant_with_warmup", "cosine"] = HfArg(default="constant_with_warmup", help="of lr")
    warmup_steps: int = HfArg(default=5, help="optimiser steps from 0, the first, to the peak")
    max_grad_norm: float = HfArg(default=1.0, help="bound on the one norm over all ranks and parameters")
    # machine
    tp_size: int = HfArg(default=0, help="ranks that share each layer; 0: 2 on an even number of GPUs, else 1")
    dp_replicate: int = HfArg(default=1, help="whole copies of the sharded model, such as one a machine (HSDP)")
    device: Literal[("cuda", "cpu") if GPU else ("cpu",)] = HfArg(default="cuda" if GPU else "cpu", help="of the actor")
    dtype: Literal["bfloat16", "float32"] = HfArg(default="bfloat16" if GPU else "float32", help="of compute")
    tokens_per_micro_batch: int = HfArg(default=8192, help="budget of one packed forward and backward pass on a rank")
    gradient_checkpointing: bool = HfArg(default=True, help="recompute activations: slower, but far less memory")
    offload: bool = HfArg(default=False, help="keep the actor and Adam in CPU memory while the engine samples")
    compile: bool = HfArg(default=False, help="torch.compile each layer and the log-probs: a minute at the start")
    sglang_args: JSON = HfArg(default_factory=lambda: JSON(mem_fraction_static=0.5), help="JSON for sglang.Engine")
    bucket_mb: float = HfArg(default=512, help="weights on their way to SGLang at once, in MB; a tensor is never cut")
    engine_timeout: float = HfArg(default=1800, help="seconds that SGLang may be silent in before it counts as dead")
    gate: Literal["stop", "warn", "off"] = HfArg(default="stop", help="when engine and actor disagree on log-probs")
    # the run
    seed: int = HfArg(default=0, help="of the order of the data, and of samples (SGLang: see generate)")
    output_dir: str = HfArg(default="", help="where the run writes; empty: runs/<time>")
    eval_every: int = HfArg(default=10, help="steps between greedy evaluations, one of them before step 1; 0: never")
    save_every: int = HfArg(default=0, help="steps between exports of the model; the newest stays; 0: at the end")
    wandb: Literal["auto", "online", "offline", "off"] = HfArg(default="auto", help="auto: online when logged in")

    def __post_init__(self):
        for name in ("prompts_per_step", "max_new_tokens", "max_turns", "temperature", "updates_per_step", "steps",
                     "lr", "max_grad_norm", "tokens_per_micro_batch", "bucket_mb", "engine_timeout", "dp_replicate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"--{name} must be above 0, not {getattr(self, name)}")
        for name in ("clip_low", "clip_high", "warmup_steps", "eval_every", "save_every"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name} must be 0 or more, not {getattr(self, name)}")
        if self.group_size < 2:
            raise UserError(f"--group_size must be 2 or more, not {self.group_size}: a group is its own baseline")
        if self.engine == "auto":
            self.engine = "sglang" if self.device == "cuda" and find_spec("sglang") else "local"
        if self.engine not in ("sglang", "local") and not self.engine.startswith(("http://", "https://")):
            raise UserError(f"--engine must be auto, sglang, local or http://host:port, not {self.engine}")
        if self.engine != "local" and not find_spec("sglang"):
            raise UserError(f"--engine {self.engine}: sglang is not installed; requirements.txt has it")


# ------------------------------------------------ 2. The task: edit here ----------------------------------------------
COUNTDOWN = ("Make {target} from the numbers {nums}: use each exactly once, with + - * / and parentheses. Think in "
             "<think> </think> tags, then give the expression alone in <answer> </answer> tags, such as "
             "<answer>(1 + 2) / 3</answer>.")
MATH = "{}\nThink step by step, and put the final answer into \\boxed{{}}."


@dataclass
class Sample:
    """One episode: what the dataset asked, and what came of it. Lists are per token [T], the prompt's first."""
    messages: list[dict]                                    # the chat that becomes the prompt
    row: dict                                               # the dataset's row, for reward_fn
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)           # 1 where the policy made the token: these are trained
    logprobs: list[float] = field(default_factory=list)     # the engine's, at its temperature; 0 where mask is 0
    versions: list[int] = field(default_factory=list)       # how often weights had been pushed; 0 where mask is 0
    text: str = ""                                          # what the policy wrote, all turns
    truncated: bool = False                                 # stopped by a limit, not by itself
    reward: float = 0.0
    advantage: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # what else reward_fn wants averaged and logged

    def append(self, ids: list[int], mask: int, logprobs: list[float] | None = None, versions: list[int] | None = None):
        """Adds tokens as they are: nothing that was sampled is ever decoded and encoded again."""
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += versions or [0] * len(ids)


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
    """EDIT HERE: how good is sample.text? Any finite number; may be async; sample.metrics takes numbers to log."""
    row = sample.row
    if row.get("nums") is not None:
        sample.metrics |= rewards.countdown_habits(sample.text, row["target"])
        return rewards.countdown(sample.text, row["nums"], row["target"])
    if row.get("question") is not None:
        return rewards.gsm8k_last_number(sample.text, row["answer"])
    return rewards.math(sample.text, row["answer"])


async def env_step(sample: Sample) -> str | None:
    """EDIT HERE for --max_turns above 1: what follows the policy's turn, chat markup included, or None to end."""
    return None


# ------------------------------------------------ 3. Rollout ----------------------------------------------------------
def encode_prompt(tokenizer, sample: Sample) -> list[int]:
    """Ids [T] of the chat, with the header of the assistant's turn at the end."""
    return tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, return_dict=False)


async def rollout(sample: Sample, tokenizer, generate, env_step, max_turns: int, room: int) -> Sample:
    """Plays one episode, cut off where a turn would follow over `room` tokens. The mask is made with the token.

    `await generate(ids, turn)` is the policy: new ids [T], their log-probs [T], the versions of the weights that made
    them [T], and whether a limit cut it off.
    """
    if not sample.ids:
        sample.append(encode_prompt(tokenizer, sample), mask=0)
    for turn in range(max_turns):
        ids, logprobs, versions, sample.truncated = await generate(sample.ids, turn)
        sample.append(ids, 1, logprobs, versions)
        sample.text += tokenizer.decode(ids, skip_special_tokens=True)
        reply = None if sample.truncated or turn == max_turns - 1 else await env_step(sample)
        if reply is None:
            break
        sample.append(tokenizer.encode(reply, add_special_tokens=False), mask=0)
        if len(sample.ids) > room:
            sample.truncated = True
            break
    return sample


async def score(sample: Sample, reward_fn) -> float:
    """The reward, checked. Raises UserError when reward_fn raises, or returns no finite number."""
    try:
        reward = reward_fn(sample)
        reward = await reward if inspect.isawaitable(reward) else reward
    except Exception as error:
        raise UserError(f"reward_fn raised {type(error).__name__}: {error}; the row was {sample.row}") from error
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise UserError(f"reward_fn must return one finite number, not {reward!r}; the row was {sample.row}")
    return float(reward)


# ------------------------------------------------ 4. Advantages -------------------------------------------------------
def group_advantages(rewards: torch.Tensor, baseline: str, normalize: str) -> torch.Tensor:
    """Rewards [groups, G] -> advantages [groups, G]: each is measured against its own group. Formulas: ALGORITHMS."""
    size = rewards.shape[1]
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        advantages = advantages * size / (size - 1)     # r - mean of the others = (r - mean of all) G / (G - 1)
    if normalize == "std":
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-6)
    return advantages


# ------------------------------------------------ 5. Loss -------------------------------------------------------------
def token_weight(aggregation: str, length: int, sequences: int, max_new_tokens: int) -> float:
    """Weight of each of a sample's `length` trained tokens; `sequences` counts the samples of all ranks (B)."""
    return 1 / (sequences * {"sequence": length, "constant": max_new_tokens}[aggregation])


def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low: float, clip_high: float):
    """The clipped surrogate (PPO, arXiv:1707.06347 eq. 7) over N trained tokens; every tensor is [N].

    Returns the loss, a plain sum (the normalisation is in the weights), and where the clip cut the gradient off, [N].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -(weights * torch.minimum(free, clipped)).sum(), clipped < free


# ------------------------------------------------ 6. Batches ----------------------------------------------------------
@dataclass
class Batch:
    """A micro-batch: whole sequences laid end to end without padding, T tokens in all, of which N are trained."""
    ids: torch.Tensor                           # [1, T]
    positions: torch.Tensor                     # [1, T], from 0 in each sequence
    source: torch.Tensor                        # [N], in T: the token before a trained one, whose state predicts it
    targets: torch.Tensor                       # [N], the trained tokens
    engine_logprobs: torch.Tensor               # [N]
    advantages: torch.Tensor                    # [N]
    weights: torch.Tensor                       # [N]
    bounds: torch.Tensor                        # [sequences + 1], in T: where each begins, and the last one's end
    longest: int                                # of the sequences, in tokens
    old_logprobs: torch.Tensor | None = None    # [N]; None: the policy of this very pass


def pack(samples: list[Sample], budget: int, ranks: int) -> list[list[Sample]]:
    """Splits samples into micro-batches of about equal size and at most `budget` tokens, as many for each rank.

    A sample above the budget gets one of its own. The longest goes first, always to the emptiest micro-batch (Graham
    1969, doi:10.1137/0117039). Where samples are fewer than ranks, some stay empty.
    """
    samples = sorted(samples, key=lambda sample: len(sample.ids), reverse=True)
    fewest = math.ceil(sum(min(len(sample.ids), budget) for sample in samples) / budget / ranks)
    for count in itertools.count(fewest * ranks, ranks):
        packs, sizes = [[] for _ in range(count)], [(0, i) for i in range(count)]
        for sample in samples:
            size, i = sizes[0]
            heapreplace(sizes, (size + len(sample.ids), i))
            packs[i].append(sample)
        if all(size <= budget or len(packs[i]) == 1 for size, i in sizes):
            return [packs[i] for _, i in sorted(sizes, reverse=True)]   # those of a round are alike: ranks wait


def make_batch(samples: list[Sample], weights: list[float], device: str) -> Batch:
    """Lays samples end to end; weights[i] is the weight of each trained token of samples[i]."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    bounds = pad(lengths.cumsum(0), (1, 0))
    ids, logprobs, mask = (torch.tensor(list(itertools.chain.from_iterable(lists))) for lists in zip(
        *((sample.ids, sample.logprobs, sample.mask) for sample in samples)))
    trained = mask.nonzero()[:, 0]
    owner = torch.arange(len(samples)).repeat_interleave(lengths)
    advantages = torch.tensor([sample.advantage for sample in samples])
    positions = torch.arange(len(ids)) - bounds[owner]
    tensors = (ids[None], positions[None], trained - 1, ids[trained], logprobs[trained], advantages[owner[trained]],
               torch.tensor(weights)[owner[trained]], bounds.int())
    return Batch(*(tensor.to(device) for tensor in tensors), lengths.max().item())


# ================================================ Part II: the machine ================================================
# ------------------------------------------------ 7. Processes --------------------------------------------------------
def init_distributed(config: Config) -> dict[str, DeviceMesh]:
    """Joins torchrun's processes, or is alone; returns `make_meshes`. Raises UserError where sizes misfit."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)     # a hint on speed, each time
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"   # gloo everywhere: it carries Python objects
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):  # SGLang sets them, but only in the ranks that start it
            os.environ.setdefault(name, "0")
    patience = timedelta(seconds=3 * config.engine_timeout)     # ranks wait for each other longer than for SGLang
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **alone)     # to find each other takes seconds
    _set_pg_timeout(patience)
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    tp = config.tp_size or (2 if config.device == "cuda" and local % 2 == 0 else 1)
    if tp < 1 or local % tp:
        raise UserError(f"--tp_size {tp} does not divide the number of processes, {local} on a machine")
    if world // tp % config.dp_replicate:
        raise UserError(f"--dp_replicate {config.dp_replicate} does not divide the {world // tp} data-parallel ranks")
    if config.prompts_per_step < world // tp * config.updates_per_step:
        raise UserError(f"--prompts_per_step must be at least --updates_per_step times {world // tp} ranks")
    meshes = make_meshes(config.device, config.dp_replicate, world // tp // config.dp_replicate, tp)
    for mesh in meshes.values():
        for group in mesh.get_all_groups():
            _set_pg_timeout(patience, group)        # a new group starts with 30 minutes
    return meshes


def make_meshes(device: str, replicas: int, shards: int, tp: int) -> dict[str, DeviceMesh]:
    """All ranks as three meshes: each layer is split over "tp", the pieces are sharded over "fsdp", data over "dp".

    "fsdp" and "dp" are the same ranks; with replicas, "fsdp" has two dimensions: a copy of the model each, its shards.
    """
    mesh = init_device_mesh(device, (replicas, shards, tp), mesh_dim_names=("replicate", "shard", "tp"))
    both = mesh["replicate", "shard"]
    return {"dp": both._flatten("dp"), "tp": mesh["tp"], "fsdp": both if replicas > 1 else mesh["shard"]}


def reduce(values: list[float], mesh: DeviceMesh, op=dist.ReduceOp.SUM) -> list[float]:
    """Each number reduced over the ranks of a mesh."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op, mesh.get_group())
    return tensor.tolist()


def gather(items: list, mesh: DeviceMesh) -> list:
    """The items of all ranks of a mesh in one list, the same on each of them."""
    if mesh.size() == 1:
        return items
    parts = [None] * mesh.size()
    dist.all_gather_object(parts, items, mesh.get_group())
    return sum(parts, [])


# ------------------------------------------------ 8. Sharding ---------------------------------------------------------
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


def sharded_model(path: str, mesh: dict[str, DeviceMesh], config: Config):
    """The model of a Hugging Face folder, sharded over the mesh, in fp32: each rank's slices, not yet filled."""
    AttentionInterface.register("packed", packed_attention)
    with init_empty_weights():                          # no memory for parameters yet; buffers are real
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32,
                                                 attn_implementation="packed").train()
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


# ------------------------------------------------ 9. Log-probs --------------------------------------------------------
@torch.compiler.disable
def packed_attention(module, query, key, value, mask, scaling=None, bounds=None, longest=0, **_):
    """Causal attention inside each packed sequence, never across two: [1, heads, T, width] -> [1, T, heads, width]."""
    if query.is_cuda and query.dtype != torch.float32:      # one kernel for all sequences; it knows 16 bits only
        flat = (part[0].transpose(0, 1) for part in (query, key, value))
        return varlen_attn(*flat, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0),
                           enable_gqa=True)[None], None
    lengths = bounds.diff().tolist()
    parts = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
             for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2))]
    return torch.cat(parts, dim=2).transpose(1, 2), None


CHUNK = 2**26       # logits at once: 256 MB in fp32


def scaled_logits(states, head, start: int, temperature: float, vocab_size: int):
    """States [n, H] and a slice of the head [V / tp, H], from id `start` on -> logits / temperature, fp32 [n, V / tp].

    Ids from vocab_size on are padding: their logits are so low that their probability is 0.
    """
    logits = (states @ head.T).float().div_(temperature)
    logits[:, max(0, vocab_size - start):] = -1e30      # finite: times a probability of 0 it is still 0
    return logits


class HeadLogprobs(torch.autograd.Function):
    """Log-probs [N] and entropies [N] of targets [N] from states [N, H] and this rank's slice of the head [V / tp, H].

    No tensor is larger than [n, V / tp], for chunks of n rows; the backward pass makes the logits z of each again. With
    p = softmax(z) and h the entropy:  d logprob / dz_v = 1[v = target] - p_v,  d entropy / dz_v = -p_v (log p_v + h).
    """

    @staticmethod
    def forward(ctx, states, head, targets, temperature: float, vocab_size: int, tp: DeviceMesh):
        group, start = tp.get_group(), tp.get_local_rank() * len(head)
        rows, columns = CHUNK // len(head), []
        for states_, targets_ in zip(states.split(rows), targets.split(rows)):
            logits = scaled_logits(states_, head, start, temperature, vocab_size)
            top = logits.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            logits -= top[:, None]
            mine, place = owned(targets_, start, len(head))
            chosen = logits.gather(1, place)[:, 0] * mine
            odds = logits.exp()
            sums = torch.stack([odds.sum(1), (odds * logits).sum(1), chosen])
            dist.all_reduce(sums, group=group)
            norm = sums[0].log()
            columns.append((sums[2] - norm, norm - sums[1] / sums[0], top + norm))
        logprobs, entropies, norms = map(torch.cat, zip(*columns))
        ctx.save_for_backward(states, head, targets, norms, entropies)
        ctx.constants = temperature, vocab_size, start, group
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        states, head, *per_row = ctx.saved_tensors
        temperature, vocab_size, start, group = ctx.constants
        rows, grad_states, grad_head = CHUNK // len(head), [], torch.zeros_like(head, dtype=torch.float32)
        columns = (states, *per_row, grad_logprobs, grad_entropies)
        for states_, targets, norm, entropy, grad_logprob, grad_entropy in zip(*(part.split(rows) for part in columns)):
            log_p = scaled_logits(states_, head, start, temperature, vocab_size).sub_(norm[:, None])
            p = log_p.exp()
            grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprob[:, None]).mul_(p).neg_()
            mine, place = owned(targets, start, len(head))
            grad.scatter_add_(1, place, (grad_logprob * mine)[:, None])
            grad = grad.div_(temperature).to(states.dtype)
            grad_states.append(grad @ head)
            grad_head += grad.T @ states_       # in fp32: over many chunks bf16 would lose the small ones
        grad_states = torch.cat(grad_states)
        dist.all_reduce(grad_states, group=group)
        return grad_states, grad_head.to(head.dtype), None, None, None, None


def owned(targets, start: int, count: int):
    """Which targets [n] are among the `count` ids from `start` on [n], and their places there [n, 1] (else any)."""
    place = targets - start
    return (place >= 0) & (place < count), place.clamp(0, count - 1)[:, None]


def model_logprobs(model, tp: DeviceMesh, batch: Batch, temperature: float, vocab_size: int):
    """Log-probs [N] and entropies [N], fp32. A method of the model, so that FSDP gathers the weights for it."""
    states = model.model(batch.ids, position_ids=batch.positions, use_cache=False, bounds=batch.bounds,
                         longest=batch.longest).last_hidden_state[0, batch.source]
    head = model.lm_head.weight
    head = head.to_local() if isinstance(head, DTensor) else head
    return HeadLogprobs.apply(states, head, batch.targets, temperature, vocab_size, tp)


# ------------------------------------------------ 10. Actor -----------------------------------------------------------
class Actor:
    """The policy that learns: a sharded model and its optimiser."""

    def __init__(self, path: str, mesh: dict[str, DeviceMesh], config: Config, vocab_size: int):
        self.config, self.dp = config, mesh["dp"]
        self.on_the_way = dict(limit=config.bucket_mb * 2**20, device=config.device, dtype=getattr(torch, config.dtype))
        self.model = sharded_model(path, mesh, config)
        dcp.load(self.weights(), storage_reader=dcp.HuggingFaceStorageReader(path))    # each rank its slices
        self.logprobs = partial(self.model.logprobs, temperature=config.temperature, vocab_size=vocab_size)
        self.parameters = list(self.model.parameters())     # now: once gathered, FSDP shows other tensors
        self.optimizer = torch.optim.AdamW(self.parameters, config.lr, betas=(0.9, 0.99), weight_decay=0.0,
                                           fused=True)
        self.scheduler = get_scheduler(config.lr_schedule, self.optimizer, config.warmup_steps,
                                       config.steps * config.updates_per_step)

    def update(self, updates: list[list[Batch]]) -> dict[str, float]:
        """One optimiser step for each list of micro-batches, as many as on every rank. Metrics are over all ranks."""
        sums, worst, norms = torch.zeros(7, device=self.config.device), 0.0, []
        for batches in updates:
            for batch in tqdm(batches, desc="update", leave=False, disable=None if dist.get_rank() == 0 else True):
                logprobs, entropy = self.logprobs(batch)
                old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
                loss, clipped = policy_loss(logprobs, old_logprobs, batch.advantages, batch.weights,
                                            self.config.clip_low, self.config.clip_high)
                loss.backward()
                real = batch.weights > 0
                compared = real & (old_logprobs is not batch.engine_logprobs)
                gap = (old_logprobs - batch.engine_logprobs).abs() * compared
                parts = (loss.detach(), (entropy * real).sum(), (clipped & real).sum(), real.sum(), gap.sum(),
                         (gap.exp() * compared).sum(), compared.sum())
                sums += torch.stack(parts)
                worst = max(worst, gap.max())
            norms.append(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm, foreach=True))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        loss, entropy, clipped, tokens, gap, exp_gap, compared = reduce(sums.tolist(), self.dp)
        (worst,) = reduce([float(worst)], self.dp, dist.ReduceOp.MAX)
        return dict(loss=loss / len(updates), entropy=entropy / tokens, clip_fraction=clipped / tokens,
                    grad_norm=fmean(norm.full_tensor().item() for norm in norms), logprob_diff_max=worst,
                    logprob_diff=gap / (compared or 1), logprob_diff_exp=exp_gap / (compared or 1))

    def move(self, device: str):
        """Takes the weights and Adam's state to a device: out of the engine's way, or back."""
        self.model.to(device)
        for state in self.optimizer.state.values():
            state |= {name: value.to(device) for name, value in state.items()}
        if device == "cpu" and GPU:
            torch.cuda.empty_cache()

    def weights(self) -> dict[str, DTensor]:
        """The weights themselves, sharded and in fp32, by their names in a file; a tied head is in none."""
        tied = self.model.config.tie_word_embeddings
        return {name: value for name, value in self.model.state_dict().items()
                if not (tied and name == "lm_head.weight")}

    def whole_weights(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Names and whole tensors in the run's dtype, bucket by bucket; all ranks take them together."""
        return whole_weights(self.weights(), **self.on_the_way)

    def save(self, folder: Path):
        """Writes weights and config as a Hugging Face folder; all ranks call it, rank 0 writes."""
        export(self.weights(), folder, self.model.config, **self.on_the_way)


# ------------------------------------------------ 11. SGLang ----------------------------------------------------------
class SGLangEngine:
    """Samples with SGLang and keeps its weights new; `link` is the way to it: on the trainer's GPUs, or on servers."""
    exact = False       # its kernels are not the actor's: log-probs differ by more than the order of a sum

    def __init__(self, path: str, tokenizer, mesh: dict[str, DeviceMesh], config: Config):
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)    # else SGLang's process groups wait at torchrun's store
        self.config, self.version = config, 0
        self.share = slice(None) if mesh["tp"].get_local_rank() == 0 else slice(0)  # it asks for its whole group
        self.link = Colocated(path, mesh["tp"], config) if config.engine == "sglang" else Servers(config)
        self.loop, self.vocab_size = self.link.loop, AutoConfig.from_pretrained(path).vocab_size
        self.sampling = dict(stop_token_ids=[tokenizer.eos_token_id], top_p=1.0, top_k=-1, min_p=0.0,
                             repetition_penalty=1.0)    # said aloud: a server may have defaults of its own

    async def generate(self, ids: list[int], temperature: float, seed: int, limit: int = 0):
        """Samples one completion of at most `limit` tokens, by default max_new_tokens. Returns what `rollout` expects.

        SGLang heeds the seed in its deterministic mode only: --sglang_args '{"enable_deterministic_inference": true}'.
        """
        answer = await self.link.generate(input_ids=ids, return_logprob=True, sampling_params=self.sampling | dict(
            temperature=temperature, sampling_seed=seed, max_new_tokens=limit or self.config.max_new_tokens))
        meta, reason = answer["meta_info"], answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise UserError(f"SGLang aborted a request: {reason.get('message')}")
        logprobs, new_ids, *_ = map(list, zip(*meta["output_token_logprobs"]))
        versions = [self.version] * len(new_ids)
        for span in meta.get("weight_versions", []):    # servers: a push may come in the middle of a completion
            if span["version"].isdigit():
                versions[span["start"]:span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
        return new_ids, logprobs, versions, reason["type"] == "length"

    def sleep(self):
        """Leaves the GPUs to the update. A colocated SGLang forgets its weights and its cache: a push must follow."""
        self.link.sleep()

    def push(self, weights: Iterable[list[tuple[str, torch.Tensor]]]):
        """Wakes SGLang up with new weights, whole ones bucket by bucket; all ranks call it together."""
        self.version += 1
        self.link.begin()
        for bucket in weights:
            self.link.send(bucket, self.version)
        self.link.end()

    def close(self):
        """Ends SGLang's processes, or leaves the servers alone."""
        self.link.close()


# ================================================ Part III: the loop ==================================================
def prompt_order(step: int, rows: int, config: Config) -> list[tuple[int, int]]:
    """The prompts of a step, from 1 on, as (place in the run, row): every epoch is a permutation of its own."""
    places = range((step - 1) * config.prompts_per_step, step * config.prompts_per_step)
    orders = {epoch: torch.randperm(rows, generator=torch.Generator().manual_seed(hash((config.seed, epoch)))).tolist()
              for epoch in {place // rows for place in places}}
    return [(place, orders[place // rows][place % rows]) for place in places]


class Trainer:
    """Act, compare, learn, publish. A recipe may subclass it."""

    def __init__(self, config: Config, dataset_class, reward_fn, env_step):
        self.config, self.reward_fn, self.env_step, self.times = config, reward_fn, env_step, Counter()
        self.mesh = init_distributed(config)
        config.output_dir = find_folder(config.output_dir)
        path, context = find_model(config.model, self.mesh["tp"].size())
        self.tokenizer, self.room = find_tokenizer(path), context - config.max_new_tokens
        self.data = dataset_class(config.data)
        self.eval_data = dataset_class(config.eval_data) if config.eval_data and config.eval_every else []
        check_prompts([self.data, self.eval_data], partial(encode_prompt, self.tokenizer), self.room)
        engine_class = LocalEngine if config.engine == "local" else SGLangEngine
        self.engine = engine_class(path, self.tokenizer, self.mesh, config)
        self.actor = Actor(path, self.mesh, config, self.engine.vocab_size)
        self.gate = Gate(config, self.actor.model.config.tie_word_embeddings, self.probe, self.rescore)
        self.log = RunLog(asdict(config), __file__, self.tokenizer, enabled=dist.get_rank() == 0)

    def fit(self):
        """Runs all steps with evaluations between them, and leaves the model as a Hugging Face folder."""
        config = self.config
        self.swap(to="actor")
        self.publish(start=True)
        self.swap(to="engine")
        for step in range(config.steps + 1):            # step 0 only evaluates: the model as it came
            metrics, samples = self.step(step) if step else ({}, [])
            if self.eval_data and (step % config.eval_every == 0 or step == config.steps):
                played = self.act(self.eval_data, list(enumerate(range(len(self.eval_data)))), 1, temperature=0.0)
                metrics["eval_score"] = fmean(sample.reward for sample in gather(played, self.mesh["dp"]))
            self.log.write(step, metrics, samples)
            if config.save_every and 0 < step < config.steps and step % config.save_every == 0:
                self.save(f"step-{step}")
        self.save("model")
        self.log.close()
        self.engine.close()

    def step(self, step: int) -> tuple[dict[str, float], list[Sample]]:
        """One step of GRPO. Returns metrics and samples of all ranks."""
        config = self.config
        self.times = Counter({"time_reward": 0.0})
        with self.timed("step"):
            with self.timed("rollout"):
                prompts = prompt_order(step, len(self.data), config)
                samples = self.act(self.data, prompts, config.group_size, config.temperature)
            with self.timed("wait"):        # for the ranks that are not through
                samples = gather(samples, self.mesh["dp"])
            self.compare(samples)
            self.swap(to="actor")
            with self.timed("logprobs"):
                updates = self.batches(samples)
            with self.timed("update"):
                metrics = self.actor.update(updates)
            metrics |= self.publish()
            self.gate.judge_rollout(metrics["logprob_diff"])
            self.swap(to="engine")
        return metrics | self.speed(samples), samples

    def swap(self, to: str):
        """Frees the devices for the next phase: of the engine for the actor, with --offload the other way, too."""
        with self.timed("swap"):
            if to == "actor":
                self.engine.sleep()
            if self.config.offload:
                self.actor.move(self.config.device if to == "actor" else "cpu")

    def publish(self, start: bool = False) -> dict[str, float]:
        """Hands the actor's weights to the engine, and lets the gate see whether they arrived."""
        with self.timed("push"):
            self.engine.push(self.actor.whole_weights())
        with self.timed("gate"):
            return self.gate.check(start)

    def speed(self, samples: list[Sample]) -> dict[str, float]:
        """What a step's time and memory went into, over all ranks; idle is the share spent waiting for a rollout."""
        dp = self.mesh["dp"]
        (wait,) = reduce([self.times["time_wait"]], dp)
        (memory,) = reduce([peak_gb()], dp, dist.ReduceOp.MAX)
        return self.times | {"idle": wait / dp.size() / self.times["time_step"], "peak_gb": memory} | speed(
            self.actor.model.config, samples, self.times, dist.get_world_size())

    def save(self, name: str):
        """Exports the model into the run's folder. It gets its name when it is whole; only then the last one goes."""
        folder = Path(self.config.output_dir)
        self.actor.save(folder / "partial")
        if dist.get_rank() == 0:
            self.log.complete(folder / "partial")
            (folder / "partial").rename(folder / name)
            for older in folder.glob("step-*"):
                if older.name != name:
                    shutil.rmtree(older)

    @contextmanager
    def timed(self, phase: str):
        """Adds the seconds of a block to metric time_<phase>."""
        start = time.perf_counter()
        yield
        self.times[f"time_{phase}"] += time.perf_counter() - start

    def act(self, dataset, prompts: list[tuple[int, int]], size: int, temperature: float) -> list[Sample]:
        """Plays `size` episodes of each (place, row). Returns those of this data-parallel rank, prompt by prompt."""
        return self.play(self.episodes(dataset, prompts, size, temperature))

    def episodes(self, dataset, prompts: list[tuple[int, int]], size: int, temperature: float) -> list:
        """The episodes that this rank plays, not yet begun; a group's start from copies of one prompt."""
        mine, episodes = prompts[self.mesh["dp"].get_local_rank()::self.mesh["dp"].size()][self.engine.share], []
        for place, row in mine:
            prompt = dataset[row]
            prompt.append(encode_prompt(self.tokenizer, prompt), mask=0)
            episodes += [self.episode(deepcopy(prompt), (place, i), temperature) for i in range(size)]
        return episodes

    def play(self, episodes: list) -> list[Sample]:
        """Runs episodes, all at once, on this rank's share of an engine. Returns those of its tensor-parallel group."""
        bar = tqdm.gather(*episodes, desc="rollout", leave=False, disable=None if dist.get_rank() == 0 else True)
        return gather(run(self.engine.loop, bar), self.mesh["tp"])

    async def episode(self, sample: Sample, key: tuple[int, ...], temperature: float) -> Sample:
        """One rollout with its reward. Its randomness hangs on the run's seed and its key alone."""
        def generate(ids, turn):
            return self.engine.generate(ids, temperature, hash((self.config.seed, *key, turn)))

        await rollout(sample, self.tokenizer, generate, self.env_step, self.config.max_turns, self.room)
        with self.timed("reward"):      # a sum over samples, within time_rollout; waits of async rewards overlap
            sample.reward = await score(sample, self.reward_fn)
        return sample

    def probe(self, rows: list[int], temperature: float, limit: int) -> list[Sample]:
        """For the gate: what the engine of this rank makes of some prompts, at most `limit` tokens of each."""
        def started(i, row):
            return rollout(self.data[row % len(self.data)], self.tokenizer,
                           lambda ids, turn: self.engine.generate(ids, temperature, i, limit), None, 1, self.room)

        return self.play([started(i, row) for i, row in list(enumerate(rows))[self.engine.share]])

    @torch.no_grad()
    def rescore(self, samples: list[Sample], temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the gate: ids [N] of the tokens that an engine made, its log-probs [N], and the actor's [N]."""
        batch = make_batch(samples, [1.0] * len(samples), self.config.device)
        logprobs, _ = self.actor.logprobs(batch, temperature=temperature)
        self.actor.model.reshard()      # else what the root has gathered stays until a backward pass
        return batch.targets.cpu(), batch.engine_logprobs.cpu(), logprobs.cpu()

    def compare(self, samples: list[Sample]):
        """Sets the advantages of whole groups."""
        row = ALGORITHMS[self.config.algo]
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        advantages = group_advantages(rewards.view(-1, self.config.group_size), row["baseline"], row["normalize"])
        for sample, advantage in zip(samples, advantages.flatten().tolist()):
            sample.advantage = advantage

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
        """Packs the samples of one optimiser step. Those without advantage, and so without gradient, only count."""
        config, dp, aggregation = self.config, self.mesh["dp"], ALGORITHMS[self.config.algo]["aggregation"]
        trained = [sample for sample in samples if sample.advantage] or samples[:1]
        packs = pack(trained, config.tokens_per_micro_batch, dp.size())
        idle = make_batch(samples[:1], [0.0], config.device)     # FSDP wants as many passes on each rank
        return [make_batch(part, [token_weight(aggregation, sum(sample.mask), len(samples), config.max_new_tokens)
                                  for sample in part], config.device) if part else idle
                for part in packs[dp.get_local_rank()::dp.size()]]


def main(config_class=Config, dataset_class=RLDataset, reward_fn=reward_fn, env_step=env_step, trainer_class=Trainer):
    """Runs a training; a recipe hands over what it replaces."""
    try:
        trainer_class(parse_flags(config_class, TINY, sys.argv[1:]), dataset_class, reward_fn, env_step).fit()
    except (UserError, ConnectionError, TimeoutError, RuntimeError) as error:
        message, code = (lost_contact(error), 1) if isinstance(error, RuntimeError) else (str(error), 2)
        if not message:
            raise
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(2)       # torchrun ends us once rank 0 has said the same: one line, not one a rank
        end(message, code)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
