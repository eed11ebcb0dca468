"""Will it fit? Bytes per rank in each phase of a run, from the flags of train.py and a model's config.json.

    python -m tools.plan [flags of train.py] [--processes N] [--gpu_gb N]
    python -m tools.plan --model Qwen/Qwen2.5-7B-Instruct --processes 4 --gpu_gb 80  # needs no GPU

It needs no weights, no GPU and no sglang. `plan` has the formulas: what train.py, FSDP and autograd hold at
once, according to their code. bench/memory.py compares them with measured peaks, so far on CPUs only. The
exit code is 1 if the run does not fit, and 2 if it cannot be planned.
"""

import json
import math
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Literal

import pandas
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.hf_argparser import HfArgumentParser

from extras import add_flags, embedded, head
from extras.checks import FAMILIES, brief, one_line_parser
from extras.local_engine import LocalEngine
from recipes.lora import TARGETS
from tools.shapes import known_config
from train import Config, UserError, flag, parse_flags

# Bytes of a process on a GPU: CUDA's context, buffers of NCCL and cuBLAS; assumed, not measured.
CONTEXT = 1.5e9
GAPS = 0.1  # share of the trainer's GPU memory lost to fragmentation in CUDA's caching allocator; assumed
PYTHON = 0.8e9  # bytes of a process on a CPU: Python and its libraries
SGLANG_REST = 5e9  # bytes of SGLang beyond mem_fraction_static; its manual: 5 to 8 GB suffice for activations
SLOTS = 5  # states of linear layers that SGLang 0.5.23 keeps per running sequence, for its prefix cache
STEP = 1024  # difference between the budgets that are tried, in tokens

LEGEND = f"""\
rollout: the engine samples. push: it gets new weights, and the gate compares. Then the update: at its
log-probs, in a layer's backward pass, and when the last gradients are reduced.
reserve: on a GPU {CONTEXT / 1e9} GB per process and {GAPS:.0%} for gaps, both assumed; else Python"""


@dataclass
class PlanConfig(add_flags(Config)):
    """The flags of train.py, and the machine to plan for."""

    device: Literal["cuda", "cpu"] = flag(Config.device, "device of the actor")
    processes: int = flag(0, "ranks in all, as torchrun starts them; 0: one per GPU here, else 1")
    gpu_gb: float = flag(0, "plan for GPUs with this memory in GB (1e9 bytes); 0: for this machine")
    prompt_length: int = flag(512, "tokens of a prompt")
    lora_rank: int = flag(0, "rank of the adapters of recipes/lora.py; 0: full fine-tuning")
    lora_alpha: float = flag(32, "as in recipes/lora.py")
    lora_targets: str = flag(TARGETS, "as in recipes/lora.py")
    base_dtype: Literal["bfloat16", "float16", "float32", ""] = flag(
        "", "as in recipes/lora.py; empty: --dtype"
    )


def read_flags(arguments: list[str], config_class=PlanConfig) -> PlanConfig:
    """Flags to a config; with --gpu_gb the defaults are those of train.py on a machine with GPUs and sglang.

    Raises UserError for flags that cannot be planned.
    """
    if any(argument.split("=")[0] == "--gpu_gb" for argument in arguments):
        defaults = ["--device", "cuda", "--dtype", "bfloat16", "--engine", "sglang", "--model", Config.model]
        arguments = defaults + arguments
    config = parse_flags(config_class, embedded.add_flags(arguments), one_line_parser(HfArgumentParser))
    if config.engine not in ("sglang", "local") and not config.engine.startswith("http"):
        raise UserError(f"--engine must be sglang, local or URLs of servers, not {config.engine}")
    if config.processes < 0 or not 0 <= config.gpu_gb < math.inf:
        raise UserError("--processes and --gpu_gb must be 0 or more")
    if config.device == "cuda" and not config.gpu_gb and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here; set --gpu_gb to that of the GPUs to plan for")
    sglang_share(config)
    gpus = torch.cuda.device_count() if config.device == "cuda" else 0
    return replace(
        config, processes=config.processes or gpus or 1, base_dtype=config.base_dtype or config.dtype
    )


def sglang_share(config: Config) -> float:
    """mem_fraction_static of --sglang_args. Raises UserError if that is not a JSON object."""
    try:
        return float(json.loads(config.sglang_args).get("mem_fraction_static", 0.9))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--sglang_args must be a JSON object, not {config.sglang_args}") from error


def find_config(name: str):
    """A model's config, from a folder or the Hub. Raises UserError if train.py could not train it."""
    try:
        model_config = known_config(name) or AutoConfig.from_pretrained(name).get_text_config()
    except Exception as error:
        raise UserError(f"--model {name} is neither a model folder nor on the Hub: {brief(error)}") from error
    if model_config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise UserError(f"--model {name} is a {model_config.model_type}; it must be one of {families}")
    return model_config


def check_sizes(config: Config, model_config, ranks: int):
    """Raises UserError if the mesh or the model cannot be divided this way."""
    tp = config.tp_size
    if tp < 1 or ranks % (tp * config.dp_replicate):
        sizes = f"--tp_size {tp} times --dp_replicate {config.dp_replicate}"
        raise UserError(f"{sizes} does not divide {ranks} processes")
    linear = [f"linear_num_{kind}_heads" for kind in ("key", "value") if is_hybrid(model_config)]  # in SGLang
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", *linear):
        size = getattr(model_config, name)
        if size % tp:
            raise UserError(f"--tp_size {tp} does not divide the model's {name} {size}")


def is_hybrid(model_config) -> bool:
    """Whether some of its layers are Gated DeltaNet."""
    return "linear_attention" in (getattr(model_config, "layer_types", None) or [])


@cache
def parameter_shapes(config_class: type, content: str) -> dict[str, torch.Size]:
    """The shape of each parameter of a model, by name; content is its config as JSON."""
    with torch.device("meta"):  # takes no memory
        model = AutoModelForCausalLM.from_config(config_class(**json.loads(content)))
    return {name: value.shape for name, value in model.named_parameters()}


def sizes(config: Config, model_config, ranks: int) -> SimpleNamespace:
    """The numbers in the formulas: parameters and widths on one of tp ranks, before FSDP shards them.

    The mesh is that of `init_distributed`; s is the number of bytes of a number in the compute dtype.
    """
    check_sizes(config, model_config, ranks)
    tp = config.tp_size
    n = SimpleNamespace(tp=tp, cuda=config.device == "cuda", shards=ranks // tp // config.dp_replicate)
    n.s = getattr(torch, config.dtype).itemsize
    n.lora = getattr(config, "lora_rank", 0) > 0
    n.kept = getattr(torch, config.base_dtype).itemsize if n.lora else 4  # bytes of a parameter in its shard
    targets = config.lora_targets.split() if n.lora else []
    n.layers = model_config.num_hidden_layers
    n.whole = n.root = n.total = 0  # FSDP's units: each layer, and the root, which is the rest
    layers, totals, adapters, ranks_in = ([0] * n.layers for _ in range(4))
    shapes = parameter_shapes(type(model_config), model_config.to_json_string())
    for name, shape in shapes.items():  # excludes a tied head
        is_whole = "norm" in name or (".linear_attn." in name and "_proj" not in name)
        size = shape.numel() // (1 if is_whole else tp)
        n.whole += size
        n.total += shape.numel()
        if not name.startswith("model.layers."):
            n.root += size
            continue
        i = int(name.split(".")[2])
        layers[i] += size
        totals[i] += shape.numel()
        kind = name.split(".")[-2]
        if kind in targets and name.endswith(".weight"):
            split = 1 if kind in ("o_proj", "down_proj") else tp  # RowwiseParallel leaves adapters whole
            adapters[i] += config.lora_rank * sum(shape) / split
            ranks_in[i] += config.lora_rank
    n.layer, n.bucket, n.adapter = max(layers), max(totals), max(adapters)  # those of hybrids differ
    n.ranks = max(ranks_in)  # of a layer's adapters
    n.learning = sum(adapters) if n.lora else n.whole  # numbers with gradients
    n.vocab = model_config.vocab_size // tp
    n.hidden = model_config.hidden_size
    n.head = n.vocab * n.hidden
    # The embedding's gradients: DTensor makes that of all rows, this rank's, and the sum with the head's.
    n.embedding = n.head * (1 if tp == 1 else tp + 1 + model_config.tie_word_embeddings)
    n.mlp = model_config.intermediate_size / tp
    heads = model_config.num_attention_heads
    n.width = getattr(model_config, "head_dim", None) or n.hidden // heads
    n.queries = n.width * heads / tp
    n.keys = n.width * model_config.num_key_value_heads / tp
    n.head_norms = model_config.model_type == "qwen3"
    n.seen = keys_per_token(config)
    n.hybrid = is_hybrid(model_config)
    n.linear = model_config.layer_types.count("linear_attention") if n.hybrid else 0
    if n.hybrid:  # each rank computes these layers whole; SGLang splits them
        n.linear_heads = model_config.linear_num_value_heads
        n.linear_width = model_config.linear_key_head_dim
        n.linear_values = n.linear_heads * model_config.linear_value_head_dim
        n.channels = 2 * n.linear_width * model_config.linear_num_key_heads + n.linear_values
        n.taps = model_config.linear_conv_kernel_dim
    return n


def keys_per_token(config: Config) -> float:
    """Keys per token of a micro-batch: each completion attends to a copy of the keys of its shared prompt."""
    if not config.share_prompts:
        return 1
    group = config.group_size
    return group * longest(config) / (longest(config) + (group - 1) * completion_length(config))


def saved_by_layer(n: SimpleNamespace) -> float:
    """Bytes per token that autograd saves in a layer, by operations of transformers' Qwens."""
    norms = (n.queries + n.keys) * (4 + n.s) * n.head_norms  # as other norms; nothing needs their outputs
    copies = 1 if n.cuda and n.s == 2 else 2  # outputs: sdpa joins its pieces in a second one
    if n.hybrid:  # norms normalize in fp32; outputs have gates
        norms = 8 * (n.queries + n.keys) + 4 * n.queries * (n.s == 4)  # a copy of q alone, or with its gate
        copies += 2
    attention = (1 + copies) * n.queries + 2 * n.seen * n.keys  # q, out, k, v
    attention = n.s * attention + 4 * n.queries / n.width  # lse
    return norms + attention + beside_attention(n)


def beside_attention(n: SimpleNamespace) -> float:
    """Bytes per token that autograd saves in a layer's norms, adapters and MLP."""
    norms = 2 * n.hidden * (8 + n.s if n.hybrid else 4 + 2 * n.s)  # input in fp32; normalized; output
    inside = n.s * n.ranks  # between A and B
    return norms + inside + 4 * n.s * n.mlp  # gate, its activation, up, their product


def saved_by_linear_layer(n: SimpleNamespace) -> float:
    """Bytes per token that autograd saves in a Gated DeltaNet layer.

    On a GPU by fla-core 0.6.0, according to its code; on a CPU by transformers' own, as measured. Convolution
    and delta rule compute a shared prompt for each completion.
    """
    norm = (12 + 3 * n.s) * n.linear_values  # input, gate and its activation in fp32; three products
    keys = n.linear_heads * n.linear_width  # a key for each value head
    if n.cuda:
        rule = n.s * (2 * keys + n.linear_values)
        inverses = n.s * 64 * n.linear_heads  # [64, 64] for each chunk of 64 tokens
        inputs = n.s * n.channels  # of the convolution
        return norm + n.seen * (inputs + rule + inverses) + beside_attention(n)
    rule = (16 + 8 * n.s) * keys + (8 + 2 * n.s) * n.linear_values + 4 * 5 * 64 * n.linear_heads
    rule += 4 * n.linear_width * n.linear_values / 64  # a state per chunk
    return norm + n.seen * (2 * n.s * n.channels + rule) + beside_attention(n)


def state_bytes(n: SimpleNamespace, s: int) -> int:
    """Bytes of one sequence's states in an engine: those of the delta rule in fp32."""
    if not n.linear:
        return 0
    return n.linear * (s * (n.taps - 1) * n.channels + 4 * n.linear_width * n.linear_values)


def logprob_bytes(n: SimpleNamespace, trained: int) -> float:
    """Bytes of extras/head.py at its peak, in the backward pass of a chunk, with c logits."""
    c = min(trained, head.chunk_size(n.hidden)) * n.vocab
    logits = (8 + (n.s if n.s < 4 else 0)) * c  # log-probs and gradients in fp32, these in the compute dtype
    states = n.s * n.hidden * trained  # their gradient
    if n.lora:  # the head has no gradient
        return logits + states
    return 4 * n.head + max(logits, (4 + n.s) * c + n.s * n.head) + states  # the sum, and a chunk's product


def engine_bytes(config: Config, n: SimpleNamespace, ranks: int) -> tuple[float, float]:
    """Bytes of the engine on a rank's device: while it samples, and while the actor learns."""
    if config.engine.startswith("http"):
        return 0, 0  # servers have GPUs of their own
    if config.engine == "sglang" and n.cuda:  # its memory saver frees all of it, CUDA graphs included
        return sglang_share(config) * room(config) + SGLANG_REST, 0
    attending = n.layers - n.linear
    if config.engine == "sglang":  # on a CPU: a cache of 32768 tokens, and nothing is freed
        size = n.s * (n.whole + 32768 * 2 * n.keys * attending)
        return size, size
    wave = -(-config.prompts_per_step // ranks) * config.group_size
    wave = LocalEngine.wave_size if config.eval_data else min(wave, LocalEngine.wave_size)
    length = config.prompt_length + config.max_new_tokens
    layer = wave * length * 2 * n.s * n.keys * n.tp  # keys and values of one layer
    growth = layer * (1 + n.queries / n.keys)  # a copy to grow, repeated for each query
    logits = wave * n.vocab * n.tp * (24 + n.s)  # logits, log-probs, exp, that and its sums in fp64
    weights = n.s * n.total  # all of them, whatever tp is
    states = wave * state_bytes(n, n.s)
    return weights + states + attending * layer + max(growth, logits), weights


def push_bytes(config: Config, n: SimpleNamespace) -> float:
    """Bytes of Actor.whole_weights and of the engine's copies for the root, the largest bucket."""
    gathered = n.s * n.root if n.shards > 1 or n.s < 4 else 0  # alone in fp32, FSDP shows its own shards
    collective = 2 * gathered if n.shards > 1 else gathered  # in pieces and whole
    whole = n.s * n.root * n.tp
    cloned = gathered + whole + (n.s * n.head * n.tp if n.tp > 1 else 0)  # gathered over tp, one by one
    sent = whole * (1 if config.engine == "local" else 2)  # flattened for SGLang
    return n.s * n.bucket + max(collective, cloned, sent)  # the bucket before, or its flat copy


def completion_length(config: PlanConfig) -> int:
    """Tokens that the policy writes in the longest sequence."""
    return config.max_new_tokens * config.max_turns


def longest(config: PlanConfig) -> int:
    """Tokens of the longest sequence, without the replies of env_step."""
    return config.prompt_length + completion_length(config)


def plan(config: Config, model_config, ranks: int, trained: float = 1.0) -> dict[str, dict[str, float]]:
    """Bytes on one rank, {phase: {part: bytes}}: the sum of a phase is its peak.

    A micro-batch is full, `trained` of its tokens are, and there are gradients of an earlier one. Parameters,
    gradients and Adam are in fp32, 4 bytes; s are the bytes of a number in the compute dtype. --compile needs
    less than this.
    """
    n = sizes(config, model_config, ranks)
    s = n.s
    several = n.shards > 1
    samples, learns = engine_bytes(config, n, ranks)
    tokens = max(config.tokens_per_micro_batch, longest(config))  # a sequence is never cut
    frozen = n.kept * n.whole if n.lora else 0
    held = {"parameters": (frozen + 4 * n.learning) / n.shards}
    moments = {"Adam": 8 * n.learning / n.shards}
    if config.kl_coef and not n.lora:
        moments["reference"] = 4 * n.whole / n.shards
    update = held | moments | {"engine": learns, "gradients": 4 * n.learning / n.shards}
    by_linear = saved_by_linear_layer(n) if n.linear else 0
    kept = tokens * (n.linear * by_linear + (n.layers - n.linear) * saved_by_layer(n))
    again = 0
    if config.gradient_checkpointing:  # layers keep only their inputs, and are computed again one at a time
        kept = tokens * s * n.hidden * n.layers
        again = tokens * max(by_linear, saved_by_layer(n))
    last = tokens * (n.hidden * (4 + 2 * s) + 2 * s * n.width)  # the last norm; cosines and sines
    moment = tokens * max(20 * n.hidden, s * (2 * n.mlp + 3 * n.hidden))  # gradients inside a norm, or an MLP
    # The last gradients to be reduced are the root's: of embedding and head; or also in fp32; or reduced, on
    # a CPU by way of a copy.
    reduced = 4 * n.root * (1 + 1 / n.shards + (not several or not n.cuda))
    phases = {
        "rollout": ({} if config.offload and n.cuda else held | moments) | {"engine": samples},
        # A probe of the gate follows: its actor's root is gathered in pieces and whole, the engine is awake.
        "push": held
        | ({} if config.offload and n.cuda else moments)
        | {"engine": samples, "gathered": max(push_bytes(config, n), 2 * s * n.root)},
        # The root stays gathered for the pass. If weights have to be gathered, the next layer's come early.
        "log-probs": update
        | {
            "gathered": s * (n.root + n.layer * several),
            "activations": kept + last,
            "log-probs": logprob_bytes(n, int(tokens * trained)),
        },
        # Gradients under way: the head's; a layer's, and in fp32 those of the layer before.
        "layers": update
        | {
            "gathered": s * (n.root + n.layer * (1 + several) + n.adapter),
            "activations": kept + again + moment,
            "under way": (4 + s) * n.adapter if n.lora else s * n.head + (4 + s) * n.layer,
        },
        "reduce": update
        | {"under way": max(s * (n.root + n.head + n.embedding) + 4 * n.layer, (s + 4) * n.root, reduced)},
    }
    if config.dp_replicate > 1:  # FSDP keeps what it sums over the copies until the backward pass has ended
        sums = 4 * (n.learning - (n.adapter if n.lora else n.root + n.layer)) / n.shards
        phases["first layer"] = phases["layers"] | {
            "gathered": s * (n.root + n.layer + n.adapter),
            "activations": again + moment,
            "sums": sums,
        }
        phases["reduce"] |= {"sums": sums}
    if n.lora:
        del phases["reduce"]  # the root has no gradients
    for parts in phases.values():
        processes = 1 + (config.engine == "sglang")
        own = sum(parts.values()) - parts["engine"]
        parts["reserve"] = CONTEXT * processes + GAPS * own if n.cuda else PYTHON * processes
    return phases


def room(config: PlanConfig) -> float:
    """Bytes available to a rank: a GPU's, or its share of this machine's memory."""
    if config.device == "cuda":
        return config.gpu_gb * 1e9 or torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / config.processes


def cached(config: PlanConfig, n: SimpleNamespace) -> float:
    """How many whole sequences SGLang's cache on a GPU holds; infinite for other engines."""
    if config.engine != "sglang" or not n.cuda:
        return math.inf
    free = max(0, sglang_share(config) * room(config) - n.s * n.total / n.tp)
    kv = 2 * n.s * n.keys * (n.layers - n.linear) * longest(config)  # of a sequence
    if not n.linear:
        return free / kv
    arguments = json.loads(config.sglang_args)
    slots = 1 if arguments.get("disable_radix_cache") else SLOTS
    pool = arguments.get("mamba_full_memory_ratio", 0.9)  # memory for states, as a share of that for the rest
    states = slots * state_bytes(n, 2) / n.tp  # the convolution's in bfloat16, whatever --dtype is
    return free / (1 + pool) * min(pool / states, 1 / kv)


def fits(config: PlanConfig, model_config, **changes) -> bool:
    """Whether the fullest phase fits, and a sequence into SGLang's cache; with other values of some flags."""
    try:
        config = replace(config, **changes)
        phases = plan(config, model_config, config.processes)
    except UserError:
        return False  # sizes that do not divide each other
    fullest = max(sum(parts.values()) for parts in phases.values())
    return fullest <= room(config) and cached(config, sizes(config, model_config, config.processes)) >= 1


def largest_budget(config: PlanConfig, model_config) -> int:
    """The largest --tokens_per_micro_batch that fits, a multiple of STEP up to a million, or 0."""

    def is_too_large(tokens):
        return not fits(config, model_config, tokens_per_micro_batch=tokens)

    return STEP * bisect_left(range(STEP, 2**20 + 1, STEP), True, key=is_too_large)


def ways_out(config: PlanConfig, model_config) -> list[str]:
    """Flags to change so that it fits: one, or if that is not enough, one and the number of processes."""
    more = [config.processes * 2**i for i in range(1, 8)]
    changes = {
        "tokens_per_micro_batch": [largest_budget(config, model_config) or STEP],
        "tp_size": [2, 4, 8],
        "gradient_checkpointing": [True],
        "offload": [True],
        "processes": more,
    }
    if config.engine == "sglang":
        arguments = json.loads(config.sglang_args)
        shares = (0.4, 0.6, 0.3, 0.7, 0.2, 0.8)
        changes["sglang_args"] = [json.dumps(arguments | {"mem_fraction_static": share}) for share in shares]
        changes["engine"] = ["http://host:port"]
    for processes in (config.processes, *more):
        ways = []
        for name, values in changes.items():
            tried = [{"processes": processes} | {name: value} for value in values]
            ways += [describe(config, way) for way in tried if fits(config, model_config, **way)][:1]
        if ways:
            return ways
    return ["nothing that was tried; use larger GPUs or a smaller model"]


def describe(config: PlanConfig, change: dict) -> str:
    """A change as flags."""
    words = []
    for name, value in change.items():
        if value != getattr(config, name):
            words.append(f"--{name} {repr(value) if name == 'sglang_args' else value}")
    return " ".join(words)


def table(phases: dict[str, dict[str, float]]) -> str:
    """The phases as columns, in GB."""
    frame = pandas.DataFrame(phases).fillna(0) / 1e9
    frame.loc["all"] = frame.sum()
    return "GB per rank\n" + frame.to_string(float_format="{:.2f}".format)


def main():
    """Prints the table, and whether it fits."""
    try:
        config = read_flags(sys.argv[1:])
        model_config = find_config(config.model)
        phases = plan(config, model_config, config.processes)
    except UserError as error:
        print(f"tools.plan: {error}", file=sys.stderr)
        sys.exit(2)
    n = sizes(config, model_config, config.processes)
    print(
        f"{config.model}: {n.total / 1e6:,.0f} M parameters on {config.processes} ranks (tp {n.tp}, "
        f"{n.shards} shards), {config.dtype}, engine {config.engine}, "
        f"{config.tokens_per_micro_batch} tokens per pass\n\n{table(phases)}\n\n{LEGEND}"
    )
    if cached(config, n) < math.inf:
        print(f"SGLang's cache holds {cached(config, n):.0f} sequences of {longest(config)} tokens.")
    size = f"{room(config) / 1e9:.4g} GB"
    if fits(config, model_config):
        budget = largest_budget(config, model_config)
        print(f"It fits into {size}, up to --tokens_per_micro_batch {budget}.")
        return
    print(f"It does not fit into {size}. It would with any of these:")
    print("\n".join(ways_out(config, model_config)))
    sys.exit(1)


if __name__ == "__main__":
    main()
