"""Will it fit? Bytes a rank in each phase of a run, from the flags of train.py and a model's config.json alone.

    python -m tools.plan [flags of train.py] [--processes N] [--gpu_gb N]
    python -m tools.plan --model Qwen/Qwen2.5-7B-Instruct --processes 4 --gpu_gb 80      # on a laptop, for four GPUs

It needs no weights, no GPU and no sglang. `plan` has the formulas: what train.py, FSDP and autograd hold at once, read
off their code. bench/memory.py compares them with measured peaks, until now on CPUs only. The exit code is 1 where it
does not fit.
"""
import json
import math
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from local_engine import LocalEngine
from tools.inputs import FAMILIES, JSON, UserError, brief, flag, parse_flags
from tools.kernels import CHUNK
from train import TINY, Config

CONTEXT = 1.5e9     # bytes of a process on a GPU: CUDA's context, buffers of NCCL and cuBLAS. Assumed, not measured
GAPS = 0.1          # of the trainer's bytes on a GPU: what CUDA's caching allocator cannot use. Assumed, not measured
PYTHON = 0.8e9      # bytes of a process on a CPU: Python and its libraries
SGLANG_REST = 5e9   # bytes of SGLang over mem_fraction_static; its manual: 5 to 8 GB suffice for activations
PROMPT = 512        # tokens of a prompt, which no flag tells
STEP = 1024         # tokens between the budgets that are tried


@dataclass
class PlanConfig(Config):
    """What train.py has, and the machine to plan for."""
    device: Literal["cuda", "cpu"] = flag(Config.device, "of the actor")
    processes: int = flag(0, "ranks in all, as torchrun starts them; 0: one for each GPU here, else 1")
    gpu_gb: float = flag(0, "plan for GPUs of so many GB (1e9 bytes) and, unless told otherwise, for "
                          "cuda, bfloat16 and sglang; 0: for this machine")

    def __post_init__(self):
        planned = self.engine if self.engine == "sglang" or self.engine.startswith("http") else ""
        self.engine = "local" if planned else self.engine       # what is only planned need not be installed
        super().__post_init__()
        self.engine = planned or self.engine
        if self.processes < 0 or not 0 <= self.gpu_gb < math.inf:
            raise UserError("--processes and --gpu_gb must be 0 or more")
        if self.device == "cuda" and not self.gpu_gb and not torch.cuda.is_available():
            raise UserError("--device cuda: there is no GPU here; say with --gpu_gb which to plan for")
        self.processes = self.processes or (self.device == "cuda" and torch.cuda.device_count()) or 1


def read_flags(arguments: list[str]) -> PlanConfig:
    """Flags to a config; with --gpu_gb their defaults are those of train.py on a machine with GPUs and sglang."""
    gpus = any(argument.split("=")[0] == "--gpu_gb" for argument in arguments)
    defaults = ["--device", "cuda", "--dtype", "bfloat16", "--engine", "sglang"] if gpus else []
    return parse_flags(PlanConfig, {} if gpus else TINY, defaults + arguments)


def find_config(name: str):
    """A model's config, from a folder or the Hub. Raises UserError if there is none, or none that train.py knows."""
    try:
        model_config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise UserError(f"--model {name} is neither a model folder nor on the Hub: {brief(error)}") from error
    if model_config.model_type not in FAMILIES:
        raise UserError(f"--model {name} is a {model_config.model_type}; it must be one of {', '.join(FAMILIES)}")
    return model_config


def sizes(config: Config, model_config, ranks: int) -> SimpleNamespace:
    """What the formulas are made of: parameters and widths on one of tp ranks, before FSDP shards; s, bytes a number.

    The mesh is that of `init_distributed`. Raises UserError where train.py does.
    """
    cuda, heads = config.device == "cuda", model_config.num_attention_heads
    tp = config.tp_size or (2 if cuda and ranks % 2 == 0 else 1)
    if tp < 1 or ranks % (tp * config.dp_replicate):
        raise UserError(f"--tp_size {tp} times --dp_replicate {config.dp_replicate} does not divide {ranks} processes")
    for what in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        if getattr(model_config, what) % tp:
            raise UserError(f"--tp_size {tp} does not divide the model's {what} {getattr(model_config, what)}")
    with torch.device("meta"):      # takes no memory
        model = AutoModelForCausalLM.from_config(model_config)
    counts = {name: value.numel() // (1 if "norm" in name else tp) for name, value in model.named_parameters()}
    whole, layers = sum(counts.values()), model_config.num_hidden_layers    # a tied head is not among them
    layer = sum(size for name, size in counts.items() if name.startswith("model.layers.0."))
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    return SimpleNamespace(
        cuda=cuda, s=getattr(torch, config.dtype).itemsize, tp=tp, shards=ranks // tp // config.dp_replicate,
        whole=whole, layer=layer, layers=layers, root=whole - layers * layer,   # FSDP's units: each layer, and the rest
        vocab=model_config.vocab_size // tp, hidden=model_config.hidden_size, mlp=model_config.intermediate_size / tp,
        head=model_config.vocab_size // tp * model_config.hidden_size, width=width, queries=width * heads / tp,
        keys=width * model_config.num_key_value_heads / tp, head_norms=model_config.model_type == "qwen3")


def saved_by_layer(n: SimpleNamespace) -> float:
    """Bytes a token that autograd saves in a layer, op by op of transformers' Qwen2, Qwen3 and Llama."""
    norms = 2 * n.hidden * (4 + 2 * n.s)                        # input in fp32; normalised; times the weight
    norms += (n.queries + n.keys) * (4 + n.s) * n.head_norms    # the same; what these return, nobody needs
    copies = 1 if n.cuda and n.s == 2 else 2                    # of the output: sdpa's pieces are joined in a second
    attention = n.s * ((1 + copies) * n.queries + 2 * n.keys) + 4 * n.queries / n.width     # q, out, k, v; log-sum-exp
    return norms + attention + 4 * n.s * n.mlp                  # gate, its activation, up, their product


def logprob_bytes(n: SimpleNamespace, trained: int) -> float:
    """Of HeadLogprobs at its peak. A chunk has c logits."""
    rows, cast = CHUNK // n.vocab, n.s if n.s < 4 else 0        # cast: what is there in compute dtype and in fp32
    c, second = (min(max(trained - before, 0), rows) * n.vocab for before in (0, rows))
    forward = max(12 * c, 8 * c + (4 + cast) * second)          # logits, odds, their product; or two and next logits
    backward = 4 * n.head + (8 + cast) * c + max(               # the head's gradient, fp32; log p, p, the logits'
        n.s * n.head + 4 * n.head * (cast > 0 and not n.cuda),  # a term of the former (a CPU casts it before it adds)
        (6 if cast else 8) * second)                            # or the next chunk, made before the last one goes
    return max(forward, backward + n.s * n.hidden * trained)    # the states' gradient


def engine_bytes(config: Config, n: SimpleNamespace, ranks: int) -> tuple[float, float]:
    """Of the engine on a rank's device: while it samples, and while the actor learns."""
    if config.engine.startswith("http"):
        return 0, 0                                             # servers have GPUs of their own
    if config.engine == "sglang" and n.cuda:                    # its memory saver gives all of it back
        return config.sglang_args.get("mem_fraction_static", 0.9) * room(config) + SGLANG_REST, 0
    if config.engine == "sglang":                               # on a CPU: a cache of 32768 tokens, and nothing back
        return (n.s * (n.whole + 32768 * 2 * n.keys * n.layers),) * 2
    wave = -(-config.prompts_per_step // ranks) * config.group_size
    wave = LocalEngine.wave_size if config.eval_data else min(wave, LocalEngine.wave_size)
    layer = wave * (PROMPT + config.max_new_tokens) * 2 * n.s * n.keys * n.tp       # keys and values, of one layer
    moment = max(layer * (1 + n.queries / n.keys),              # copied to grow, and repeated for each query; or
                 wave * n.vocab * n.tp * (24 + n.s))            # logits, log-probs, exp, that and its sums in fp64
    weights = n.s * n.whole * n.tp                              # all of them, whatever tp
    return weights + n.layers * layer + moment, weights


def longest(config: Config) -> int:
    """Tokens of the longest sequence, without what env_step answers."""
    return PROMPT + config.max_new_tokens * config.max_turns


def plan(config: Config, model_config, ranks: int, trained: float = 1.0) -> dict[str, dict[str, float]]:
    """Bytes on one rank, {phase: {what: bytes}}: the sum of a phase is its peak.

    A micro-batch is full, `trained` of its tokens are, and there are gradients of an earlier one. Parameters, gradients
    and Adam are in fp32, 4 bytes; s are the bytes of a number in compute dtype. --compile needs less than this.
    """
    n = sizes(config, model_config, ranks)
    s, several, samples, learns = n.s, n.shards > 1, *engine_bytes(config, n, ranks)
    tokens = max(config.tokens_per_micro_batch, longest(config))                # a sequence is never cut
    held = {"parameters": 4 * n.whole / n.shards, "Adam": 8 * n.whole / n.shards}       # Adam has two moments
    held |= {"reference": 4 * n.whole / n.shards} if config.kl_coef else {}
    update = held | {"engine": learns, "gradients": 4 * n.whole / n.shards}
    saved = tokens * saved_by_layer(n)
    kept = (tokens * s * n.hidden if config.gradient_checkpointing else saved) * n.layers       # inputs only, or all
    again = saved if config.gradient_checkpointing else 0                       # a layer at a time, computed once more
    last = tokens * (n.hidden * (4 + 2 * s) + 2 * s * n.width)                  # the last norm; cosines and sines
    moment = tokens * max(20 * n.hidden, s * (2 * n.mlp + 3 * n.hidden))        # gradients inside a norm, or an MLP
    bucket = max(min(config.bucket_mb * 2**20, s * n.whole * n.tp), s * n.head * n.tp)      # a tensor is never cut
    gathered = 2 if n.shards * n.tp > 1 else s < 4              # in pieces and whole; alone, only a cast makes a copy
    pushed = bucket * (gathered + (config.engine != "local"))   # SGLang's is flattened once more
    phases = {
        "rollout": ({} if config.offload and n.cuda else held) | {"engine": samples},
        # Then the gate: the actor is still there, its root gathered in pieces and whole, and the engine is awake.
        "push": held | {"engine": samples, "gathered": max(pushed, 2 * s * n.root)},
        # The root stays gathered for the pass. Where weights have to be gathered, the next layer's come early.
        "log-probs": update | {"gathered": s * (n.root + n.layer * several), "activations": kept + last,
                               "log-probs": logprob_bytes(n, int(tokens * trained))},
        # On the way are gradients: the head's; a layer's, and in fp32 those of the layer before, which go only then.
        "layers": update | {"gathered": s * (n.root + n.layer * (1 + several)), "activations": kept + again + moment,
                            "on the way": s * n.head + (4 + s) * n.layer},
        # At last the root's: of embedding and head; or in fp32, too; or reduced, on a CPU by way of a copy.
        "reduce": update | {"on the way": max(s * (n.root + 2 * n.head) + 4 * n.layer, (s + 4) * n.root,
                                              4 * n.root * (1 + 1 / n.shards + (not several or not n.cuda)))},
    }
    for parts in phases.values():
        processes, own = 1 + (config.engine == "sglang"), sum(parts.values()) - parts["engine"]
        parts["reserve"] = CONTEXT * processes + GAPS * own if n.cuda else PYTHON * processes
    return phases


def room(config: PlanConfig) -> float:
    """Bytes that there are for a rank: a GPU's, or its share of this machine's memory."""
    if config.device == "cuda":
        return config.gpu_gb * 1e9 or torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / config.processes


def cached(config: PlanConfig, n: SimpleNamespace) -> float:
    """How many whole sequences SGLang's cache on a GPU holds at once; infinite for other engines."""
    if config.engine != "sglang" or not n.cuda:
        return math.inf
    free = max(0, config.sglang_args.get("mem_fraction_static", 0.9) * room(config) - n.s * n.whole)
    return free / (2 * n.s * n.keys * n.layers * longest(config))


def fits(config: PlanConfig, model_config, **changes) -> bool:
    """Whether the fullest phase fits, and a sequence into SGLang's cache; with other values of some flags."""
    try:
        config = replace(config, **changes)
        phases = plan(config, model_config, config.processes)
    except UserError:
        return False            # sizes that do not divide each other
    full = max(sum(parts.values()) for parts in phases.values())
    return full <= room(config) and cached(config, sizes(config, model_config, config.processes)) >= 1


def largest_budget(config: PlanConfig, model_config) -> int:
    """The largest --tokens_per_micro_batch that fits, a multiple of STEP up to a million; 0 if none does."""
    return STEP * bisect_left(range(STEP, 2**20 + 1, STEP), True, key=lambda tokens: not fits(
        config, model_config, tokens_per_micro_batch=tokens))


def ways_out(config: PlanConfig, model_config) -> list[str]:
    """Flags to change for it to fit: one, or if none does that, one and the number of processes."""
    changes = {"tokens_per_micro_batch": [largest_budget(config, model_config) or STEP], "tp_size": [2, 4, 8],
               "gradient_checkpointing": [True], "offload": [True]}
    if config.engine == "sglang":
        shares = [JSON(config.sglang_args, mem_fraction_static=share) for share in (0.4, 0.6, 0.3, 0.7, 0.2, 0.8)]
        changes |= {"sglang_args": shares, "engine": ["http://host:port"]}
    more = [config.processes * 2**i for i in range(1, 8)]
    for processes in (config.processes, *more):
        tried = changes | ({"processes": more} if processes == config.processes else {})
        ways = [next((way for way in [dict(processes=processes) | {name: value} for value in values]
                      if fits(config, model_config, **way)), {}) for name, values in tried.items()]
        if any(ways):
            return [" ".join(f"--{name} {repr(json.dumps(value)) if name == 'sglang_args' else value}"
                             for name, value in way.items() if value != getattr(config, name)) for way in ways if way]
    return ["nothing that was tried; take larger GPUs or a smaller model"]


def main():
    """Prints the table, and whether it fits."""
    try:
        config = read_flags(sys.argv[1:])
        model_config = find_config(config.model)
        phases, n = plan(config, model_config, config.processes), sizes(config, model_config, config.processes)
    except UserError as error:
        print(f"tools.plan: {error}", file=sys.stderr)
        sys.exit(2)
    names = dict.fromkeys(name for parts in phases.values() for name in parts)
    table = {name: [parts.get(name, 0) for parts in phases.values()] for name in names}
    table["all"] = [sum(parts.values()) for parts in phases.values()]
    print(f"{config.model}: {n.whole * n.tp / 1e6:,.0f} M parameters on {config.processes} ranks (tp {n.tp}, "
          f"{n.shards} shards), {config.dtype}, engine {config.engine}, "
          f"{config.tokens_per_micro_batch} tokens a pass\n\n"
          "GB on a rank  " + "".join(f"{phase:>11}" for phase in phases))
    for name, row in table.items():
        print(f"{name:14}" + "".join(f"{value / 1e9:11.2f}" for value in row))
    print("\nrollout: the engine samples. push: it gets new weights, and the gate compares. Then the update: at its "
          "log-probs,\nin a layer's backward pass, and when the last gradients are reduced. reserve: " + (
              f"{CONTEXT / 1e9} GB a process, {GAPS:.0%} for gaps; assumed" if n.cuda else "Python"))
    if cached(config, n) < math.inf:
        print(f"SGLang's cache holds {cached(config, n):.0f} sequences of {longest(config)} tokens.")
    if fits(config, model_config):
        print(f"It fits into {room(config) / 1e9:.4g} GB, up to --tokens_per_micro_batch "
              f"{largest_budget(config, model_config)}.")
        return
    print(f"It does not fit into {room(config) / 1e9:.4g} GB. It would with any of these:")
    print("\n".join(ways_out(config, model_config)))
    sys.exit(1)


if __name__ == "__main__":
    main()
