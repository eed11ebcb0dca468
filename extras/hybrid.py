"""Qwen3.5, 3.6 and 3.8: three of four layers are Gated DeltaNet (arXiv:2412.06464), which has a state.

A micro-batch holds samples end to end. transformers' layers would carry the state, and the last inputs of
their convolution, from each sample into the next. `PackedDeltaNet` keeps samples apart: on a GPU by the
kernels of fla-core, which take the bounds of samples; on a CPU by a row per sample, padded on the right,
where no token of a causal layer sees the padding. A prompt that samples share is projected once, and only its
convolution and its state are computed for each of them.

Published folders have the text model inside a vision-language model. It alone is trained, sampled and
exported. Without this file train.py refuses such models.

With --dtype bfloat16 all weights are rounded in passes and pushes, also A_log and the gated norm, which
published files have in fp32. In assets/tiny_hybrid these two move log-probs by 6e-5 nats per token on
average, all weights by 3e-4.

Sizes: T tokens of a micro-batch, K >= T with shared prompts repeated, C channels of the convolution, D width
of a head's values.
"""

import json
import os
import tempfile
import warnings
from dataclasses import replace
from importlib.util import find_spec
from inspect import unwrap

import torch
import torch.distributed.checkpoint as dcp
import transformers
from packaging.version import Version
from torch.distributed.tensor import DTensor, Replicate, distribute_module, parallel
from torch.func import functional_call
from torch.nn.functional import softplus
from tqdm.asyncio import tqdm
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from train import RANK, UserError

INNER = "model.language_model."  # how names begin in a vision-language model; here with "model."
OLDEST = Version("5.19")  # of transformers; other models need less
SGLANG_CPU = {
    "mamba_radix_cache_strategy": "no_buffer",  # the only one on a CPU, and not with overlap
    "disable_overlap_schedule": True,
    "max_mamba_cache_size": 512,  # sequences with a state; else these take most of the memory
}
# transformers replaces both by kernels, which have no CPU version, wherever these are installed.
CONVOLVE = unwrap(qwen.causal_conv1d_fn)
DELTA_RULE = unwrap(qwen.torch_chunk_gated_delta_rule)


def local(weight: torch.Tensor) -> torch.Tensor:
    """A plain tensor; with tensor parallelism, this rank's copy of a weight that all ranks have."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class PackedDeltaNet(qwen.Qwen3_5GatedDeltaNet):
    """A Gated DeltaNet over samples that lie end to end; made in place from a layer of transformers."""

    def forward(self, hidden_states, bounds, keys, key_bounds, longest, **_):
        """[1, T, H] -> [1, T, H], with the layout of a train.Batch."""
        beta = self.in_proj_b(hidden_states).sigmoid()
        steps = softplus(self.in_proj_a(hidden_states).float() + local(self.dt_bias))
        decay = -local(self.A_log).float().exp() * steps
        qkv = self.in_proj_qkv(hidden_states)
        values = self.recur(qkv, decay, beta, bounds, keys, key_bounds, longest).reshape(-1, self.head_v_dim)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        values = functional_call(self.norm, {"weight": local(self.norm.weight)}, (values, gate))
        return self.out_proj(values.reshape(*qkv.shape[:2], -1))

    @torch.compiler.disable
    def recur(self, qkv, decay, beta, bounds, keys, key_bounds, longest) -> torch.Tensor:
        """qkv [1, T, C], log-decays and rates [1, T, heads] -> [1, T, heads, D]."""
        seen = qkv[:, keys], decay[:, keys], beta[:, keys]
        if qkv.is_cuda:
            values = self.by_kernels(*seen, key_bounds.long())
        else:
            values = self.by_rows(*seen, key_bounds, longest)
        # A sample's own tokens are the last of those that it sees.
        shift = (key_bounds - bounds)[1:].repeat_interleave(bounds.diff(), output_size=qkv.shape[1])
        return values[:, torch.arange(qkv.shape[1], device=shift.device) + shift]

    def by_kernels(self, qkv, decay, beta, bounds) -> torch.Tensor:
        """Each sample from an empty state: [1, K, C], [1, K, heads] twice -> [1, K, heads, D]."""
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        weight = local(self.conv1d.weight)[:, 0]
        qkv, _ = causal_conv1d(qkv, weight, activation=self.activation, cu_seqlens=bounds)
        options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
        return chunk_gated_delta_rule(*self.split_heads(qkv), decay, beta, **options)[0]

    def by_rows(self, qkv, decay, beta, bounds, longest: int) -> torch.Tensor:
        """The same in plain torch, more than ten times slower on a GPU."""
        lengths = bounds.diff()
        row = torch.arange(len(lengths)).repeat_interleave(lengths)  # [K]
        column = torch.arange(len(row)) - bounds[row]  # [K]

        def rows(packed):
            empty = packed.new_zeros(len(lengths), longest, packed.shape[2])
            return empty.index_put((row, column), packed[0])

        weight = local(self.conv1d.weight)[:, 0]
        qkv = CONVOLVE(rows(qkv).transpose(1, 2), weight, activation=self.activation).transpose(1, 2)
        query, key, value = self.split_heads(qkv)
        copies = self.num_v_heads // self.num_k_heads
        query, key = (part.repeat_interleave(copies, 2) for part in (query, key))
        options = {"g": rows(decay), "beta": rows(beta), "use_qk_l2norm_in_kernel": True}
        return DELTA_RULE(query, key, value, **options)[0][row, column][None]

    def split_heads(self, qkv) -> list[torch.Tensor]:
        """[..., C] -> queries, keys and values, [..., heads, width] each."""
        parts = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        widths = self.head_k_dim, self.head_k_dim, self.head_v_dim
        return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths)]


class Whole(parallel.ParallelStyle):
    """Tensor parallelism that gives each rank what no other style has split."""

    def _apply(self, module, mesh):
        return distribute_module(module, mesh)


# Projections are split by rows, and their outputs gathered; convolution and state are whole on every rank.
TENSOR_PLAN = {
    "model.layers.*.linear_attn.*_proj*": parallel.ColwiseParallel(output_layouts=Replicate()),
    "model.layers.*.linear_attn": Whole(),
}


class TextReader(dcp.HuggingFaceStorageReader):
    """Reads a folder whose text model may be part of a vision-language model."""

    def read_metadata(self):
        """What the folder has, by the names of the text model."""
        metadata = super().read_metadata()
        found = metadata.state_dict_metadata
        self.saved_names = {name.replace(INNER, "model."): name for name in found}
        metadata.state_dict_metadata = {name: found[saved] for name, saved in self.saved_names.items()}
        return metadata

    def prepare_local_plan(self, plan):
        """The plan of what to read, by the names in the files."""
        items = []
        for item in plan.items:
            saved = self.saved_names[item.storage_index.fqn]
            items.append(replace(item, storage_index=replace(item.storage_index, fqn=saved)))
        return super().prepare_local_plan(replace(plan, items=items))


def text_config(path: str):
    """The config of a folder's text model, complete by itself: transformers and SGLang load an export."""
    whole = AutoConfig.from_pretrained(path)
    text = whole.get_text_config()
    text.tie_word_embeddings |= whole.tie_word_embeddings  # the flag may stand in either
    if text.model_type == "qwen3_5_text":
        text.architectures = ["Qwen3_5ForCausalLM"]
        text.full_attention_interval = text.layer_types.index("full_attention") + 1  # all that SGLang reads
    return text


def adapt(model, path: str):
    """Prepares the empty model of a folder for packed samples, for tensor parallelism and for its weights."""
    complete = text_config(path)
    if complete.model_type != "qwen3_5_text":
        kind = complete.model_type
        raise UserError(f"--model {path} is a {kind}: of hybrids only Qwen3.5's are implemented")
    if Version(transformers.__version__) < OLDEST:
        raise UserError(f"--model {path} requires transformers {OLDEST} or newer: its caches have changed")
    for name in ("tie_word_embeddings", "architectures", "full_attention_interval"):
        setattr(model.config, name, getattr(complete, name))
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.__class__ = PackedDeltaNet
    model.reader = TextReader(path)
    model.tensor_plan = TENSOR_PLAN
    warnings.filterwarnings("ignore", "Parallelize plan key")  # no layer has both kinds of attention


def extend(trainer_class: type) -> type:
    """A trainer that gives SGLang the text model alone, and exports the tokenizer that it has used."""

    class HybridTrainer(trainer_class):
        def __init__(self, config, *arguments):
            text = text_config(config.model)
            self.is_hybrid = "linear_attention" in getattr(text, "layer_types", ())
            if self.is_hybrid and config.device == "cuda" and not find_spec("fla"):
                raise UserError(f"--model {config.model} requires kernels: pip install fla-core==0.6.0")
            if self.is_hybrid and config.engine == "sglang":
                os.environ["SGLANG_MAMBA_CONV_DTYPE"] = config.dtype  # else bfloat16, whatever --dtype is
                self.text_folder = tempfile.TemporaryDirectory()  # with a config alone: pushes bring weights
                text.save_pretrained(self.text_folder.name)
                options = SGLANG_CPU if config.device == "cpu" else {}
                options = options | json.loads(config.sglang_args)  # of a resumed run, with its folder
                options |= {"model_path": self.text_folder.name, "load_format": "dummy"}
                config.sglang_args = json.dumps(options)
            super().__init__(config, *arguments)
            if self.is_hybrid and RANK == 0:
                saved = self.actor.model.reader.read_metadata().state_dict_metadata
                unused = saved.keys() - dict(self.actor.model.named_parameters()).keys()
                parts = {name.removeprefix("model.").split(".")[0] for name in unused}
                if parts:
                    tqdm.write(f"Only the text model is used; ignored weights: {', '.join(sorted(parts))}")

        def fit(self):
            """The run, whose export splits text as the run did: its config may select another class."""
            super().fit()
            if self.is_hybrid and RANK == 0 and (self.folder / "model").exists():
                self.tokenizer.save_pretrained(self.folder / "model")

    return HybridTrainer
