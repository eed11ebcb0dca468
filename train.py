"""GRPO in one file: train a Qwen model by reinforcement learning with verifiable rewards.

Every step samples a group of G completions per prompt, scores each with reward_fn, and raises the
probability of those that beat their own group (DeepSeekMath, arXiv:2402.03300):

    A_i    = (r_i - mean(r)) / std(r)                         r: the G rewards of i's own group
    rho_it = pi(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)  one importance ratio per token
    loss   = - 1/B sum_i 1/|o_i| sum_t min(rho_it A_i, clip(rho_it, 1 - low, 1 + high) A_i)

Deviations from the paper: no KL term (extras/variants.py adds one), DAPO's higher upper clip
(arXiv:2503.14476), and one update per rollout, where pi_old = pi (extras/updates.py adds more).

    torchrun --standalone --nproc_per_node=4 train.py    # 4 GPUs: Qwen2.5-3B learns countdown
    torchrun --standalone --nproc_per_node=2 train.py    # no GPU: a tiny Qwen learns it in a minute

Part III is the loop: start there. Part I is the algorithm; edit `__getitem__` and `reward_fn` in section 2
for a task of your own. Part II is the machine: skip it on a first reading.
Sizes: B samples, G completions per prompt, T tokens, t of a part, N trained, H hidden size, V vocabulary.
Files in extras/ add flags: chat_template.py --chat_template_kwargs, checkpoint.py --resume
--save_every, checks.py --max_failures, compile.py --compile, details.py --token_groups, dither.py
--dither, gate.py --gate, head.py --fp32_logits, offload.py --offload, optimizer.py --lr_schedule
--adam_beta1 --adam_beta2 --weight_decay, reward_workers.py --reward_workers, shared_prompts.py
--share_prompts, turns.py --max_turns, updates.py --updates_per_step, variants.py --normalize_std
--aggregation --kl_coef --entropy_coef --tis_cap, wandb_log.py --wandb, watchdog.py --engine_timeout.
"""

import asyncio
import functools
import importlib
import inspect
import json
import math
import os
import re
import shutil
import sys
import time
import traceback
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Literal

import numpy as np
import pandas
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from datasets import ReadInstruction, load_dataset
from huggingface_hub import save_torch_state_dict, snapshot_download
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, distribute_module, parallel
from torch.nn.attention import bias, varlen
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from tqdm.asyncio import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.hf_argparser import HfArg, HfArgumentParser

import rewards

sys.modules.setdefault("train", sys.modules[__name__])  # else extras would import a script again
GPU = torch.cuda.is_available()
BOUND = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}  # largest mean |log-prob of actor - of engine|


# ========================= Part I: the algorithm. 1. Config ==========================
def flag(default, help: str):
    return HfArg(default=default, help=help)


@dataclass
class Config:
    """The settings of a run, each one a command-line flag; modules in extras/ add theirs."""

    # task and rollout
    model: str = flag("Qwen/Qwen2.5-3B-Instruct", "folder or Hub name of a Qwen2, 2.5, 3 or 3.5 model")
    data: str = flag("Jiayi-Pan/Countdown-Tasks-3to4:train[512:]", "file or Hub name [:split]")
    eval_data: str = flag("Jiayi-Pan/Countdown-Tasks-3to4:train[:512]", "as for --data; empty: no evaluation")
    engine: str = flag("sglang" if GPU else "local", "sglang, local (for CPUs), or URLs of servers")
    prompts_per_step: int = flag(64, "prompts per step, over all ranks")
    group_size: int = flag(8, "completions per prompt (G)")
    max_new_tokens: int = flag(1024, "longest completion, in tokens")
    temperature: float = flag(1.0, "sampling temperature, also applied to the trained log-probs")
    # algorithm and optimizer
    clip_low: float = flag(0.2, "lower clip of the importance ratio: 1 - clip_low")
    clip_high: float = flag(0.28, "upper clip of the importance ratio: 1 + clip_high")
    steps: int = flag(200, "training steps; 0: evaluation only")
    lr: float = flag(1e-6, "peak learning rate of AdamW")
    warmup_steps: int = flag(5, "optimizer steps of linear warm-up")
    max_grad_norm: float = flag(1.0, "gradient clipping threshold, global norm")
    # machine
    tp_size: int = flag(1, "tensor-parallel ranks per model copy, of the actor and of SGLang")
    dp_replicate: int = flag(1, "copies of the sharded model, for example one per machine (HSDP)")
    device: Literal["cuda", "cpu"] = flag("cuda" if GPU else "cpu", "device of the actor")
    dtype: Literal[tuple(BOUND)] = flag("bfloat16" if GPU else "float32", "compute dtype")
    tokens_per_micro_batch: int = flag(8192, "largest packed forward pass, in tokens per rank")
    gradient_checkpointing: bool = flag(True, "recomputation of activations in the backward pass")
    sglang_args: str = flag('{"mem_fraction_static": 0.5}', "JSON: more arguments of sglang.Engine")
    # run
    seed: int = flag(0, "seed of data order and sampling (SGLang: only in deterministic mode)")
    output_dir: str = flag("", "output folder; empty: a new one under runs/")
    eval_every: int = flag(10, "steps between evaluations, the first before step 1; 0: never")
    eval_temperature: float = flag(0.0, "sampling temperature of evaluations; 0: greedy")
    reward_timeout: float = flag(60.0, "seconds for one call of an async reward_fn")


# --------------------------- 2. The task: edit here ----------------------------------
COUNTDOWN = (
    "Make {target} from the numbers {nums}: use each exactly once, with + - * / and parentheses. Think in "
    "<think> </think> tags, then give the expression alone in <answer> </answer> tags, such as "
    "<answer>(1 + 2) / 3</answer>."
)

TOKEN = [  # columns of sample.tokens, a NumPy structured array with one row per token
    ("id", np.int32),
    ("turn", np.int32),  # the policy's turn that the token belongs to, from 0
    ("mask", np.uint8),  # 1: the policy wrote the token, and it is trained
    ("version", np.int32),  # how often the engine had got new weights when it sampled the token
    ("logprob", np.float32),  # the engine's, at --temperature; 0 where mask is 0
    ("advantage", np.float32),  # from Trainer.compare
    ("weight", np.float32),  # its share of the loss, from set_weights
]


@dataclass
class Sample:
    """One completion with its prompt and reward; an episode, if the policy has several turns."""

    messages: list[dict]  # the chat that becomes the prompt
    row: dict  # the dataset row, for reward_fn
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, TOKEN))  # [T], the prompt's first
    turns: list[str] = field(default_factory=list)  # what the policy wrote, turn by turn
    state: dict = field(default_factory=dict)  # scratch space for reward_fn
    metrics: dict[str, float] = field(default_factory=dict)  # further numbers to average and log
    key: tuple[int, int] = (0, 0)  # number of the prompt in the run, index in its group
    truncated: bool = False  # cut off by a length limit
    failure: str = ""  # why it could not be sampled or scored: its group is left out of the loss
    reward: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.turns)

    def append(self, ids, **columns):
        """Appends token ids [t] as they are, never re-tokenized; other columns are [t] or one value."""
        new = np.zeros(len(ids), TOKEN)
        for name, values in {"id": ids, **columns}.items():
            new[name] = values
        self.tokens = np.concatenate([self.tokens, new])


class RLDataset(torch.utils.data.Dataset):
    """The rows of a file or of a Hub dataset, as prompts."""

    def __init__(self, source: str):
        """source: "file[:split]" or "owner/name[/config][:split]", with splits like train[:100]."""
        self.source = source
        name, _, split = source.partition(":")
        if name.endswith((".json", ".jsonl")):  # `datasets` would convert dates and large integers
            text = Path(name).read_text(encoding="utf-8-sig").strip()
            lines = filter(str.strip, text.split("\n"))
            rows = json.loads(text if text.startswith("[") else f"[{','.join(lines)}]")
            parts = ReadInstruction.from_spec(split or "train").to_absolute({"train": len(rows)})
            self.rows = [row for part in parts for row in rows[part.from_ : part.to]]
        elif name.endswith(".parquet"):
            self.rows = load_dataset("parquet", data_files=name, split=split or "train")
        else:
            parts = name.split("/", 2)  # owner, name, config
            self.rows = load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """EDIT HERE: turn a row into a prompt."""
        row = dict(self.rows[index])
        return Sample([{"role": "user", "content": COUNTDOWN.format(**row)}], row)


def reward_fn(sample: Sample) -> float:
    """EDIT HERE: how good is sample.text? May be async; numbers in sample.metrics are logged."""
    return rewards.countdown(sample.text, sample.row["nums"], sample.row["target"])


# ----------------------------------- 3. Rollout --------------------------------------
def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids [t] of a chat, up to the policy's turn. No text in it can forge a special token."""
    text = json.dumps(messages, ensure_ascii=False)  # reaches every string, however nested
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            start, rest = map(re.escape, (token.content[:1], token.content[1:]))
            text = re.sub(f"{start}(?={rest})", "\\g<0>\u200b", text)  # a zero-width space splits it
    return tokenizer.apply_chat_template(json.loads(text), add_generation_prompt=True, return_dict=False)


async def call(function, sample: Sample, reward_timeout: float):
    """The result of a function of a sample; if it is async, it has reward_timeout seconds."""
    result = function(sample)
    if inspect.isawaitable(result):
        async with asyncio.timeout(reward_timeout):
            result = await result
    return result


async def rollout(sample: Sample, engine, tokenizer, config: Config, temperature: float, turn=0):
    """Samples a turn of the policy and appends it. Raises ValueError if it has no tokens."""
    seed = hash((config.seed, *sample.key, turn))  # whatever else is sampled, on any rank
    answer = await engine.generate(sample.tokens["id"], temperature, seed, config.max_new_tokens)
    ids, logprobs, versions, sample.truncated = answer
    if len(ids) == 0 or len(ids) != len(logprobs) or not np.isfinite(logprobs).all():
        raise ValueError("the engine returned no tokens, or log-probs that are missing or not finite")
    sample.append(ids, turn=turn, mask=1, logprob=logprobs, version=versions)
    sample.turns.append(tokenizer.decode(ids, skip_special_tokens=True))


# ---------------------------- 4. Advantages and loss ---------------------------------
def group_advantages(scores: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rewards [B] of whole groups -> advantages [B]: each completion against its own group."""
    groups = scores.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    variance = centered.square().sum(dim=1, keepdim=True) / (group_size - 1)
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # else rounding leaves an advantage
    return (centered / (variance.sqrt() + 1e-6)).masked_fill(all_equal, 0.0).flatten()


def set_weights(samples: list[Sample], batch_size: float):
    """Sets each trained token's share of the loss, 1/B 1/|o_i|; B counts the samples of all ranks."""
    for sample in samples:
        sample.tokens["weight"] = sample.tokens["mask"] / (batch_size * sample.tokens["mask"].sum())


def grpo_loss(logprobs, entropy, batch: "Batch", config: Config) -> tuple[torch.Tensor, dict]:
    """The loss of a micro-batch, a weighted sum over its tokens, and statistics [N] to log."""
    ratio = (logprobs - batch.old_logprobs).exp()  # 1 in the first update, yet with a gradient
    unclipped = ratio * batch.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    loss = -(batch.weights * torch.minimum(unclipped, clipped)).sum()
    return loss, {"clip_fraction": clipped < unclipped, "entropy": entropy.detach()}


# ----------------------------------- 5. Batches --------------------------------------
class Batch:
    """A micro-batch: samples end to end without padding, T tokens, of which N are trained."""

    def __init__(self, samples: list[Sample], device: str):
        filler = np.zeros(2, TOKEN)  # of weight 0, for ranks without samples
        filler["mask"][1] = 1
        parts = [sample.tokens for sample in samples] or [filler]
        tokens = np.concatenate(parts)
        trained = tokens["mask"].nonzero()[0]
        tensor = functools.partial(torch.tensor, device=device)
        self.samples = samples
        self.ids = tensor(tokens["id"].astype(np.int64)[None])  # [1, T]
        positions = np.concatenate([np.arange(len(part)) for part in parts])
        bounds = tensor(np.cumsum([0, *map(len, parts)], dtype=np.int32))  # [samples + 1], where each begins
        self.layout = {"position_ids": tensor(positions[None]), "longest": max(map(len, parts))}
        self.layout |= {"bounds": bounds, "key_bounds": bounds, "keys": slice(None)}
        self.source = tensor(trained - 1)  # [N], the tokens before the targets, which predict them
        self.targets = tensor(tokens["id"][trained].astype(np.int64))  # [N]
        self.advantages = tensor(tokens["advantage"][trained])  # [N]
        self.weights = tensor(tokens["weight"][trained])  # [N]
        self.engine_logprobs = tensor(tokens["logprob"][trained])  # [N]
        self.old_logprobs = None  # [N], of the actor before the first update of the step

    @staticmethod
    def pack(samples: list[Sample], budget: int, least: int) -> list[list[Sample]]:
        """At least `least` micro-batches, each of at most `budget` tokens or of one longer sample."""
        # The longest goes first, always into the emptiest (Graham 1969, doi:10.1137/0117039).
        for number in count(least):
            packs = [[] for _ in range(number)]
            sizes = np.zeros(number, int)
            for sample in sorted(samples, key=lambda sample: len(sample.tokens), reverse=True):
                emptiest = sizes.argmin()
                packs[emptiest].append(sample)
                sizes[emptiest] += len(sample.tokens)
            if all(size <= budget or len(part) == 1 for size, part in zip(sizes, packs)):
                return packs


# ====================== Part II: the machine. 6. Processes ============================
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


class UserError(Exception):
    """A mistake that the user can fix; main prints it as one line, without a traceback."""


def parse_flags(config_class, arguments: list[str], parser_class=HfArgumentParser):
    """Command line -> config_class. Raises UserError for flags that it does not know."""
    parser = parser_class(config_class, allow_abbrev=False, usage="train.py [--FLAG VALUE ...]")
    given = {argument.split("=")[0] for argument in arguments}
    if "--data" in given:
        parser.set_defaults(eval_data="")  # the default belongs to the default data
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = re.escape("--" + unknown[0].split("=")[0][2:].replace("-", "_").removeprefix("no_"))
        owner = unknown[0].startswith("--") and re.search(rf"\w+\.py(?=[^.]*{name}\b)", __doc__)
        needed = f"requires extras/{owner[0]} and __init__.py" if owner else ""
        raise UserError(f"{' '.join(unknown)} {needed or 'is unknown; --help lists all flags'}")
    if not GPU and "--model" not in given:
        raise UserError("no GPU, and no assets/embedded.json for CPUs: set --model and --data")
    return config_class(**vars(values))


def init_distributed(config: Config) -> dict[str, DeviceMesh]:
    """Starts torch.distributed. Meshes: "dp" splits prompts, "fsdp" shards, "tp" splits layers."""
    if config.engine == "sglang":  # its memory saver cannot work with expandable segments
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"  # gloo for Python objects
    if config.device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # both as SGLang sets them
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # without torchrun
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    copies = config.dp_replicate
    shape = (copies, dist.get_world_size() // config.tp_size // copies, config.tp_size)
    mesh = dist.init_device_mesh(config.device, shape, mesh_dim_names=("replicate", "shard", "tp"))
    both = mesh["replicate", "shard"]
    return {"dp": both._flatten("dp"), "tp": mesh["tp"], "fsdp": both if copies > 1 else mesh["shard"]}


def reduce_over(mesh: DeviceMesh, values: list[float], op=dist.ReduceOp.SUM) -> list[float]:
    """Each number reduced over the ranks of a mesh."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op, group=mesh.get_group())
    return tensor.tolist()


# ----------------------------------- 7. Sharding -------------------------------------
@torch.compiler.disable
def packed_attention(module, query, key, value, mask, scaling, bounds, keys, key_bounds, longest, **kwargs):
    """Causal attention of each sample's tokens to its keys: [1, heads, T, width] -> [1, T, heads, width]."""
    shared = {"scale": scaling, "enable_gqa": True}
    key = key[:, :, keys]
    value = value[:, :, keys]
    if query.is_cuda and query.dtype != torch.float32:  # a single kernel, for 16-bit types only
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        shared["window_size"] = (-1, 0)  # causal: the last query of a sample sees its last key
        return varlen.varlen_attn(q, k, v, bounds, key_bounds, longest, longest, **shared)[None], None
    lengths = bounds.diff().tolist()
    key_lengths = key_bounds.diff().tolist()
    outputs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(key_lengths, 2), value.split(key_lengths, 2)):
        causal = bias.causal_lower_right(q.shape[2], k.shape[2])
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, **shared))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def empty_model(path: str):
    """A folder's model in fp32, with its parameters on the meta device, and with real buffers."""
    AttentionInterface.register("packed", packed_attention)
    config = AutoConfig.from_pretrained(path, attn_implementation="packed")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.reader = dcp.HuggingFaceStorageReader(path)
    if "linear_attention" in getattr(model.config, "layer_types", ()):  # it has a state that would leak
        importlib.import_module("extras.hybrid").adapt(model, path)
    return model


def apply_tensor_parallel(model, mesh: DeviceMesh):
    """Megatron's split (arXiv:1909.08053 sec. 3) as DTensors."""
    plan = {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=Replicate()),  # by vocabulary
        "model.layers.*.self_attn.[qkv]_proj": parallel.ColwiseParallel(),  # whole heads
        "model.layers.*.self_attn.o_proj": parallel.RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": parallel.ColwiseParallel(),
        "model.layers.*.mlp.up_proj": parallel.ColwiseParallel(),
        "model.layers.*.mlp.down_proj": parallel.RowwiseParallel(),
        "lm_head": parallel.ColwiseParallel(),
    }
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        heads = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["model.layers.*.self_attn.[qk]_norm"] = heads  # they see only this rank's heads, dimension 2
    parallel.parallelize_module(model, mesh, plan | getattr(model, "tensor_plan", {}))

    def to_dtensor(module, args, mesh):  # norms see whole activations; their weights are DTensors
        return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),)

    for name, module in model.named_modules():
        if name.endswith("layernorm") or name == "model.norm":
            distribute_module(module, mesh, None, to_dtensor, lambda _, output, mesh: output.to_local())


def shard(model, mesh: dict[str, DeviceMesh], config: Config):
    """Splits an empty model over the mesh; each rank has memory for its shards, not yet filled."""
    if config.tp_size > 1:
        apply_tensor_parallel(model, mesh["tp"])
    model.tie_weights()  # the meta device and tensor parallelism untie them
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=mesh["fsdp"], mp_policy=precision)
        unit.set_gradient_divide_factor(1.0)  # a sum: the loss divides by global counts
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device=config.device)  # wipes the rotary tables, too
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(config.device)
    return model


# ----------------------------------- 8. Log-probs ------------------------------------
def head_logprobs(states, targets, head, temperature: float, vocab_size: int, tp: DeviceMesh):
    """Log-probs and entropies [N] of targets [N], from states [N, H] and this rank's head [V / tp, H]."""
    first = tp.get_local_rank() * len(head)  # this rank's part of the vocabulary begins here
    if head.requires_grad and torch.is_grad_enabled():
        head = head.float()  # its gradient is a sum over the chunks, in fp32
    if tp.size() > 1:  # the gradient of the states is a sum over the ranks
        states = DTensor.from_local(states, tp, [Replicate()]).to_local(grad_placements=[Partial()])

    def over_ranks(values, op="sum"):
        return DTensor.from_local(values, tp, [Partial(op)]).full_tensor() if tp.size() > 1 else values

    def score(states, targets):
        logits = (states @ head.to(states.dtype).T).float().div_(temperature)  # [chunk, V / tp]
        logits[:, max(0, vocab_size - first) :] = -1e30  # embedding rows beyond the vocabulary
        logits.sub_(over_ranks(logits.detach().amax(dim=1), "max")[:, None])
        exps = logits.exp()
        owns_target = (targets >= first) & (targets < first + len(head))
        chosen = logits.gather(1, ((targets - first) * owns_target)[:, None])[:, 0] * owns_target
        sums = torch.stack([chosen, exps.sum(dim=1), torch.linalg.vecdot(exps, logits)])
        chosen, total, weighted = over_ranks(sums)
        return chosen - total.log(), total.log() - weighted / total  # z - log Z, and log Z - E[z]

    chunk = max(256, 2**24 // len(head))  # tokens whose logits exist at once, forward and backward
    scores = []
    for part in zip(states.split(chunk), targets.split(chunk)):
        scores.append(checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
    return tuple(map(torch.cat, zip(*scores)))


def policy_logprobs(model, batch: Batch, temperature: float, vocab_size: int, tp: DeviceMesh):
    """Log-probs [N] and entropies [N] of a batch's targets, in fp32."""
    states = model.model(batch.ids, use_cache=False, **batch.layout).last_hidden_state[0, batch.source]
    weight = model.lm_head.weight
    head = weight.to_local() if isinstance(weight, DTensor) else weight
    score = getattr(model, "head_logprobs", head_logprobs)  # extras/head.py
    return score(states, batch.targets, head, temperature, vocab_size, tp)


# ----------------------------------- 9. Actor ----------------------------------------
def load_policy(path: str, mesh: dict[str, DeviceMesh], config: Config, vocab_size: int):
    """A sharded model with the weights of a folder, and with a method `logprobs`."""
    model = shard(empty_model(path), mesh, config)
    dcp.load(dict(model.named_parameters()), storage_reader=model.reader)
    fixed = {"temperature": config.temperature, "vocab_size": vocab_size, "tp": mesh["tp"]}
    model.logprobs = functools.partial(policy_logprobs, model, **fixed)
    register_fsdp_forward_method(model, "logprobs")  # FSDP gathers the root's weights for it
    return model


class Actor:
    """The policy that learns: a sharded model and its optimizer."""

    def __init__(self, model, mesh: dict[str, DeviceMesh], config: Config):
        self.model = model
        self.mesh = mesh
        self.config = config
        # Collected now, because FSDP swaps in unsharded parameters when it gathers them.
        self.parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        options = {"lr": config.lr, "betas": (0.9, 0.99), "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), **options)
        self.scheduler = LambdaLR(self.optimizer, lambda i: min(1, (i + 1) / max(1, config.warmup_steps)))

    def backward(self, batches: list[Batch], loss_fn) -> dict[str, float]:
        """Adds up gradients of loss_fn(batch) -> loss, statistics [N]. Returns means over all ranks."""
        total_loss = total_tokens = 0.0
        sums = {}
        for batch in tqdm(batches, desc="update", **PROGRESS):
            loss, stats = loss_fn(batch)
            loss.backward()
            is_real = batch.weights > 0  # the token of a filler is not
            total_loss += loss.detach().double()
            total_tokens += is_real.sum(dtype=torch.float64)
            for name, values in stats.items():
                sums[name] = sums.get(name, 0.0) + (values * is_real).sum(dtype=torch.float64)
        local = torch.stack([total_loss, total_tokens, *sums.values()]).tolist()  # the only wait for the GPU
        loss, tokens, *totals = reduce_over(self.mesh["dp"], local)
        return {name: total / max(tokens, 1) for name, total in zip(sums, totals)} | {"loss": loss}

    def optimizer_step(self) -> float:
        """Updates the weights; skips the update if the gradient is not finite. Returns its global norm."""
        weights = self.parameters.values()
        norm = torch.nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm, foreach=True).full_tensor()
        if norm.isfinite():
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return norm.item()

    @torch.no_grad()
    def whole_weights(self):
        """Yields lists of (name, whole tensor) in the compute dtype, layer by layer, on all ranks."""
        units = {f"model.layers.{i}": layer for i, layer in enumerate(self.model.model.layers)}
        for prefix, unit in (units | {"": self.model}).items():
            unit.unshard()  # one collective, already in the compute dtype
            bucket = []
            for name, weight in unit.named_parameters(prefix):
                if unit is self.model and ".layers." in name:
                    continue  # it was in an earlier bucket
                whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                bucket.append((name, whole.clone()))
            del whole  # else it would stay in memory while the bucket is sent
            unit.reshard()  # frees what was gathered, not these clones
            yield bucket

    def save(self, path: str, folder: Path):
        """Writes a Hugging Face folder with the tokenizer of `path`; all ranks call it, rank 0 writes."""
        weights = {}
        for bucket in self.whole_weights():
            weights |= {name: weight.cpu() for name, weight in bucket if RANK == 0}
        if RANK > 0:
            return
        unfinished = folder.with_suffix(".partial")  # after an error nothing looks like a model
        shutil.rmtree(unfinished, ignore_errors=True)
        self.model.config.dtype = self.config.dtype
        self.model.config.save_pretrained(unfinished)
        needed = r"(token|vocab|merges|special|added|chat|generation)\w*\.(json|txt|jinja)"
        for file in Path(path).iterdir():
            if re.fullmatch(needed, file.name):
                shutil.copy(file, unfinished)
        save_torch_state_dict(weights, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


# ----------------------------------- 10. SGLang --------------------------------------
class SGLangEngine:
    """SGLang in processes on the GPUs of a tensor-parallel group, whose first rank talks to it."""

    def __init__(self, path: str, tokenizer, mesh: dict[str, DeviceMesh], config: Config):
        self.config = config
        self.group = mesh["tp"].get_group()
        self.vocab_size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
        self.eos_token_id = tokenizer.eos_token_id
        self.version = 0  # pushes so far
        self.awake = True  # until sleep has released SGLang's memory
        self.engine = None
        self.loop = asyncio.new_event_loop()
        torch.multiprocessing.set_sharing_strategy("file_system")  # for CPU tensors
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # SGLang would wait at torchrun's store
        options = {"model_path": path, "dtype": config.dtype, "device": config.device}
        options |= {"tp_size": self.group.size(), "skip_tokenizer_init": True, "log_level": "error"}
        if config.device == "cuda":
            options |= {"base_gpu_id": LOCAL_RANK, "enable_memory_saver": True}
            options["disable_prefill_cuda_graph"] = True  # its memory could not be released
            os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # graphs are released, too
            os.environ["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] = "0"  # its memory would stay
            os.environ["TMS_RETAIN_CPU_BACKUP"] = "1"  # pins memory for graphs once
            runtime = Path(torch.__file__).parents[1] / "nvidia/cu13/lib"  # for what SGLang preloads
            folders = filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(runtime)])
            os.environ["LD_LIBRARY_PATH"] = ":".join(folders)
        if self.group.rank() == 0:
            import sglang  # starts processes that import this file again

            self.engine = sglang.Engine(**options | json.loads(config.sglang_args))
            self.loop = self.engine.loop
        self.barrier()  # no rank may load the actor yet: SGLang measures free memory as it starts

    def local_prompts(self, prompts: list) -> list:
        """The prompts that this rank of the tensor-parallel group plays: its first rank plays all."""
        return prompts if self.group.rank() == 0 else []

    async def generate(self, ids: np.ndarray, temperature: float, seed: int, max_new_tokens: int = 0):
        """Samples a completion of ids [T]. Returns ids [t], log-probs [t], version, if truncated."""
        sampling = {"temperature": temperature, "sampling_seed": seed, "stop_token_ids": [self.eos_token_id]}
        sampling["max_new_tokens"] = max_new_tokens or self.config.max_new_tokens
        request = {"input_ids": ids.tolist(), "sampling_params": sampling, "return_logprob": True}
        info = (await self.engine.async_generate(**request))["meta_info"]
        if info["finish_reason"]["type"] == "abort":
            raise RuntimeError(f"SGLang aborted a request: {info['finish_reason']}")
        logprobs, new_ids, _ = zip(*info["output_token_logprobs"])  # (log-prob, id, text) of each token
        if len(new_ids) != info["completion_tokens"]:
            raise ValueError(f"SGLang returned {len(new_ids)} of {info['completion_tokens']} log-probs")
        return new_ids, np.array(logprobs, float), self.version, info["finish_reason"]["type"] == "length"

    def call(self, method: str, *args, **kwargs):
        """Calls SGLang from the group's first rank. Raises RuntimeError if it reports a failure."""
        answer = getattr(self.engine, method)(*args, **kwargs) if self.engine else None
        success = answer[0] if isinstance(answer, tuple) else getattr(answer, "success", True)
        if not success:
            raise RuntimeError(f"sglang: {method} failed: {answer}")

    def barrier(self):
        """Frees cached GPU memory and synchronizes the ranks over gloo, which needs none."""
        if self.config.device == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        dist.all_reduce(torch.zeros(1), group=self.group)

    def sleep(self):
        """Hands SGLang's GPU memory to the trainer. SGLang drops its weights: push before sampling."""
        if not self.awake:
            return  # SGLang's memory saver ends the process if memory is released or resumed twice
        while self.engine and not self.engine.flush_cache().success:
            time.sleep(0.05)  # it is busy for a moment after its last answer
        self.call("release_memory_occupation")
        self.awake = False
        self.barrier()

    def push(self, buckets):
        """Wakes SGLang up with new weights, bucket by bucket; all ranks call this together."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if self.config.device == "cuda":
            monkey_patch_torch_reductions()  # GPUs by UUID: processes may number them differently
        self.sleep()  # only released memory can be resumed
        self.version += 1
        self.barrier()
        self.call("resume_memory_occupation", tags=["weights"])
        self.call("begin_weight_update")
        for bucket in buckets:  # each rank sends one flat tensor to the SGLang rank on its GPU
            flat = FlattenedTensorBucket(named_tensors=bucket)
            new = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            payloads = [None] * self.group.size()
            dist.all_gather_object(payloads, MultiprocessingSerializer.serialize(new), group=self.group)
            self.call("update_weights_from_tensor", payloads, "flattened_bucket", flush_cache=False)
            self.barrier()
            sent = new  # keeps this bucket alive: SGLang may still be copying it
            bucket.clear()
        del flat, new, sent
        self.call("end_weight_update")
        self.barrier()  # where memory runs out, SGLang's memory saver ends the process
        self.call("resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
        self.awake = True

    def close(self):
        """Ends SGLang's processes."""
        self.call("shutdown")


# ============================== Part III: the loop ===================================
FOLDER = f"runs/%Y-%m-%d_%H-%M-%S_{os.getpid()}"  # two runs may start in the same second
FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt"]  # of a model on the Hub
SHOWN = ["reward", "eval_score", "entropy", "grad_norm", "logprob_diff", "time_step"]
PROGRESS = {"leave": False, "disable": True if RANK else None}  # bars on rank 0, in a terminal


def shuffled(rows: int, seed: int):
    """Yields (number in the run, row) without end: every epoch in a new order, equal on all ranks."""
    for epoch in count() if rows else ():
        generator = torch.Generator().manual_seed(hash((seed, epoch)))
        yield from enumerate(torch.randperm(rows, generator=generator).tolist(), epoch * rows)


class Trainer:
    """Sample, compare, learn, publish. A recipe may subclass it."""

    batch_class = Batch  # extras/shared_prompts.py
    parser_class = HfArgumentParser  # extras/help.py, extras/checks.py
    max_failures = 0.1  # share of failed samples above which a run ends; extras/checks.py
    is_resumed = False  # extras/checkpoint.py
    has_failed = False  # whether any sample has
    trains_all = False  # whether samples without an advantage have a gradient, too

    def __init__(self, config: Config, dataset_class, reward_fn, env_step=None):
        if env_step and type(self).play is Trainer.play:
            raise UserError("env_step requires extras/turns.py and __init__.py")
        self.config = config
        self.reward_fn = reward_fn
        self.env_step = env_step
        self.data = dataset_class(config.data)
        self.eval_data = dataset_class(config.eval_data) if config.eval_data and config.eval_every else []
        self.mesh = init_distributed(config)
        is_local = Path(config.model).is_dir()
        self.path = config.model if is_local else snapshot_download(config.model, allow_patterns=FILES)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        context = AutoConfig.from_pretrained(self.path).get_text_config().max_position_embeddings
        self.prompt_limit = context - config.max_new_tokens
        self.engine = self.make_engine()
        self.actor = Actor(self.load_policy(), self.mesh, config)
        self.first_step = self.prompts_drawn = 0  # step 0 only evaluates
        self.prompts = shuffled(len(self.data), config.seed)
        self.folder = Path(config.output_dir or time.strftime(FOLDER))
        if RANK == 0:
            self.open_log()

    def make_engine(self):
        """What --engine names: SGLang, or an engine of extras/."""
        if self.config.engine == "sglang":
            return SGLangEngine(self.path, self.tokenizer, self.mesh, self.config)
        name = {"local": "local_engine"}.get(self.config.engine, "servers")
        extra = importlib.import_module(f"extras.{name}")
        return extra.Engine(self.path, self.tokenizer, self.mesh, self.config)

    def load_policy(self):
        """The initial policy, for the actor and the reference; a recipe may add to it."""
        return load_policy(self.path, self.mesh, self.config, self.engine.vocab_size)

    def fit(self):
        """Runs all steps with evaluations between them, and exports the model."""
        self.publish()
        for step in range(self.first_step, self.config.steps + 1):
            metrics, samples = self.step() if step > 0 else ({}, [])
            if self.eval_data and (step % self.config.eval_every == 0 or step == self.config.steps):
                metrics |= self.evaluate()
            self.write(step, metrics, samples)
        if self.config.steps > 0:
            self.actor.save(self.path, self.folder / "model")
        self.engine.close()

    def step(self) -> tuple[dict[str, float], list[Sample]]:
        """One step of GRPO. Returns metrics, and this rank's samples."""
        samples = self.rollout()
        self.engine.sleep()
        metrics = self.learn(samples)
        self.publish()
        return metrics, samples

    def rollout(self) -> list[Sample]:
        """Samples a group for each prompt of this rank, which also trains on them."""
        prompts = self.own_prompts(list(islice(self.prompts, self.config.prompts_per_step)))
        self.prompts_drawn += self.config.prompts_per_step
        return self.sample(self.data, prompts, self.config.group_size, self.config.temperature)

    def own_prompts(self, prompts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """This rank's part of prompts (number, row)."""
        return prompts[self.mesh["dp"].get_local_rank() :: self.mesh["dp"].size()]

    def sample(self, dataset, prompts: list, group_size: int, temperature: float) -> list[Sample]:
        """Plays group_size episodes per prompt (number, row). Returns those of the tensor-parallel group."""
        episodes = []
        for number, row in self.engine.local_prompts(prompts):
            prompt = dataset[row]
            prompt.append(encode_prompt(self.tokenizer, prompt.messages))
            if len(prompt.tokens) > self.prompt_limit:
                continue
            for i in range(group_size):
                sample = deepcopy(prompt)
                sample.key = (number, i)
                episodes.append(self.engine.loop.create_task(self.episode(sample, temperature)))
        samples = self.engine.loop.run_until_complete(tqdm.gather(*episodes, desc="rollout", **PROGRESS))
        parts = [samples] * self.mesh["tp"].size()
        if len(parts) > 1:  # every rank of the group gets the samples of all
            dist.all_gather_object(parts, samples, group=self.mesh["tp"].get_group())
        return sorted(sum(parts, []), key=lambda sample: sample.key)

    async def episode(self, sample: Sample, temperature: float) -> Sample:
        """One rollout and its reward. An error fails the sample, not the run."""
        try:
            await self.play(sample, temperature)
            await self.score(sample)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, UserError) or asyncio.current_task().cancelling():
                raise
            own = [f for f in traceback.extract_tb(error.__traceback__) if "/lib/python" not in f.filename]
            sample.failure = "".join(traceback.format_list(own[-1:]) + traceback.format_exception_only(error))
            sample.metrics = {}
            if not self.has_failed:
                tqdm.write(f"A sample failed; its group is left out of the loss:\n{sample.failure}")
            self.has_failed = True
        sample.state = {}  # it may hold what cannot be sent to other ranks; the row becomes plain JSON
        sample.row = json.loads(json.dumps(sample.row, default=str, skipkeys=True), parse_constant=str)
        return sample

    async def play(self, sample: Sample, temperature: float):
        """Generates the sample's tokens: here in a single turn."""
        await rollout(sample, self.engine, self.tokenizer, self.config, temperature)

    async def score(self, sample: Sample):
        """Sets the reward. Raises ValueError unless it and the sample's metrics are finite."""
        reward = await call(self.reward_fn, sample, self.config.reward_timeout)
        if reward is None or not all(map(math.isfinite, [reward, *sample.metrics.values()])):
            raise ValueError(f"reward_fn returned no finite numbers: {reward}, metrics {sample.metrics}")
        sample.reward = float(reward)
        sample.metrics = {name: float(number) for name, number in sample.metrics.items()}

    def check_failures(self, samples: list[Sample]) -> float:
        """The share of samples that failed, over all ranks. Raises UserError if it is too large."""
        failures = [sample.failure for sample in samples if sample.failure]
        failed, total = reduce_over(self.mesh["dp"], [len(failures), len(samples)])
        if total == 0:
            raise UserError("all prompts are too long for the model's context: lower --max_new_tokens")
        if failed > self.max_failures * total:
            raise UserError(f"{failed:g} of {total:g} samples failed, too many: {''.join(failures[:1])}")
        return failed / total

    def compare(self, samples: list[Sample]):
        """Gives every token the advantage of its completion. A recipe may credit turns instead."""
        if self.config.group_size < 2:
            raise UserError("--group_size must be 2 or more: an advantage is relative to the group")
        scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        advantages = group_advantages(scores, self.config.group_size)
        for sample, advantage in zip(samples, advantages.tolist()):
            sample.tokens["advantage"] = advantage

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Updates the actor from the groups in which no sample failed."""
        self.check_failures(samples)
        failed = {sample.key[0] for sample in samples if sample.failure}
        complete = [sample for sample in samples if sample.key[0] not in failed]
        self.compare(complete)
        return self.update(self.micro_batches(complete))

    def update(self, batches: list[Batch]) -> dict[str, float]:
        """One optimizer step, after a check that the rollout came from these weights."""
        metrics = self.actor.backward(batches, self.forward)
        self.check_engine(metrics["logprob_diff"])
        return metrics | {"grad_norm": self.actor.optimizer_step()}

    def micro_batches(self, samples: list[Sample]) -> list[Batch]:
        """This rank's micro-batches. Samples without an advantage count in B, but are left out."""
        set_weights(samples, reduce_over(self.mesh["dp"], [len(samples)])[0])
        useful = [sample for sample in samples if self.trains_all or sample.tokens["advantage"].any()]
        pack = functools.partial(self.batch_class.pack, useful, self.config.tokens_per_micro_batch)
        # FSDP's collectives would hang if a rank ran fewer forward passes than the others.
        (least,) = reduce_over(self.mesh["dp"], [len(pack(1))], dist.ReduceOp.MAX)
        return [self.batch_class(part, self.config.device) for part in pack(int(least))]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict]:
        """The loss of a micro-batch, and statistics [N] to log."""
        logprobs, entropy = self.actor.model.logprobs(batch)
        if batch.old_logprobs is None:  # the first update: pi_old = pi
            batch.old_logprobs = logprobs.detach()
        loss, stats = self.loss(logprobs, entropy, batch)
        return loss, stats | {"logprob_diff": (batch.old_logprobs - batch.engine_logprobs).abs()}

    def loss(self, logprobs, entropy, batch: Batch) -> tuple[torch.Tensor, dict]:
        """The loss of a micro-batch from log-probs and entropies [N]. A recipe may replace it."""
        return grpo_loss(logprobs, entropy, batch, self.config)

    def check_engine(self, gap: float):
        """Ends the run before the optimizer step if the engine's samples are not the actor's."""
        if not gap <= BOUND[self.config.dtype]:  # or if it is NaN
            raise UserError(f"log-probs of engine and actor differ by {gap:.1e} nats per token: old weights?")

    def publish(self):
        """Pushes the actor's weights into the engine."""
        self.engine.push(self.actor.whole_weights())

    def evaluate(self) -> dict[str, float]:
        """The mean reward on evaluation prompts that fit; a failed sample counts as 0."""
        prompts = self.own_prompts([(row, row) for row in range(len(self.eval_data))])
        samples = self.sample(self.eval_data, prompts, 1, self.config.eval_temperature)
        total, n = reduce_over(self.mesh["dp"], [sum(sample.reward for sample in samples), len(samples)])
        return {"eval_failures": self.check_failures(samples), "eval_score": total / n}

    def open_log(self):
        """Makes the folder of the run, which may hold an earlier part of this run but not another."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_resumed and {"metrics.jsonl", "model"} & {*os.listdir(self.folder)}:
            raise UserError(f"--output_dir {self.folder} already holds a run or a model; set another one")
        (self.folder / "config.json").write_text(json.dumps(asdict(self.config), indent=1))
        tqdm.write(f"Training {self.config.model} on {self.config.data}; output in {self.folder}")

    def write(self, step: int, metrics: dict[str, float], samples: list[Sample]):
        """Logs a step from rank 0, with the samples of all ranks."""
        parts = [None] * dist.get_world_size() if RANK == 0 else None
        mine = samples if self.mesh["tp"].get_local_rank() == 0 else []
        dist.gather_object([self.record(sample) for sample in mine], parts)
        if RANK > 0:
            return
        records = sorted(sum(parts, []), key=lambda record: record["key"])
        means = pandas.DataFrame([record["metrics"] for record in records]).mean()
        for name, mean in means.items():
            metrics[f"sample_{name}" if name in metrics else name] = mean
        shown = [f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics]
        tqdm.write(" | ".join([f"step {step}", *shown]))
        finite = {name: float(x) if np.isfinite(x) else None for name, x in metrics.items()}
        for name, rows in (("metrics.jsonl", [finite]), ("samples.jsonl", records)):
            with open(self.folder / name, "a") as file:
                file.writelines(json.dumps({"step": step} | row, default=str) + "\n" for row in rows)

    def record(self, sample: Sample) -> dict:
        """What samples.jsonl keeps of a sample; the metrics are averaged over the step."""
        metrics = {"reward": sample.reward, "response_length": int(sample.tokens["mask"].sum())}
        metrics |= {"truncated": sample.truncated, "failures": bool(sample.failure)}
        for name, number in sample.metrics.items():
            metrics[f"sample_{name}" if name in metrics else name] = number
        record = {"key": sample.key, "reward": sample.reward, "row": sample.row, "text": sample.text}
        return record | {"failure": sample.failure, "metrics": metrics}


def main(config=Config, dataset=RLDataset, reward_fn=reward_fn, env_step=None, trainer=Trainer):
    """Runs a training; a recipe passes what it replaces."""
    try:
        if (Path(__file__).parent / "extras/__init__.py").exists():
            config, trainer = importlib.import_module("extras").extend(config, trainer)
        flags = parse_flags(config, sys.argv[1:], trainer.parser_class)
        trainer(flags, dataset, reward_fn, env_step).fit()
    except (UserError, KeyboardInterrupt, ModuleNotFoundError) as error:
        time.sleep(2 if LOCAL_RANK else 0)  # rank 0 speaks, and then torchrun ends the others
        print(f"train.py: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: other ranks may be waiting for this one
    dist.destroy_process_group()


if __name__ == "__main__":  # SGLang's processes import this file again
    main()
