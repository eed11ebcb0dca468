"""Test support, not product code: Gated DeltaNet in plain torch, where sglang calls kernels that need AMX.

The delta rule is that of transformers: a test with it compares sglang's own work with the trainer (config,
loader, names, pool of states, scheduler, tensor parallelism), but not its kernels.
Sizes: T tokens end to end, N sequences, C channels of W taps, heads of widths K (keys) and V (values).
"""

from inspect import unwrap

import torch
import torch.nn.functional as F
from sglang.kernels.ops.attention.fla import layernorm_gated
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

layernorm_gated._use_cpu = True  # without AMX it would call triton


def causal_conv1d_fn_cpu(
    x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **_
):
    """Prefill: x [C, T] after conv_states [slots, C, W - 1], which get each sequence's last columns."""
    parts = x.split(query_start_loc.diff().tolist(), 1)
    outputs = []
    for part, slot, follows in zip(parts, cache_indices.tolist(), has_initial_state.tolist()):
        before = conv_states[slot] if follows else torch.zeros_like(conv_states[slot])
        columns = torch.cat([before.to(part.dtype), part], 1)
        conv_states[slot] = columns[:, -before.shape[1] :]
        outputs.append(F.silu(F.conv1d(columns[None], weight[:, None], bias, groups=len(x)))[0])
    return torch.cat(outputs, 1)


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices):
    """Decoding: the next column x [N, C] of each sequence."""
    columns = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[:, :, None]], 2)
    conv_states[conv_state_indices] = columns[:, :, 1:].to(conv_states.dtype)
    return F.silu(F.conv1d(columns, weight[:, None], bias, groups=x.shape[1]))[:, :, 0]


def run_rule(name, q, k, v, g, beta, states, slots):
    """The delta rule over rows [N, t, heads, width], from and into states [slots, heads, V, K]."""
    copies = v.shape[2] // q.shape[2]
    q, k = (part.repeat_interleave(copies, 2) for part in (q, k))
    options = {"initial_state": states[slots].mT, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, last = unwrap(getattr(qwen, name))(q, k, v, g=g, beta=beta, **options)
    states[slots] = last.mT.to(states.dtype)
    return out


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state, cu_seqlens, initial_state_indices, head_first, use_qk_l2norm_in_kernel
):
    """Prefill: [1, T, heads, width] -> [1, T, heads, V]."""
    parts = zip(*(part.split(cu_seqlens.diff().tolist(), 1) for part in (q, k, v, g, beta)))
    rule = "torch_chunk_gated_delta_rule"
    slots = initial_state_indices.split(1)
    out = [run_rule(rule, *part, initial_state, slot) for part, slot in zip(parts, slots)]
    return torch.cat(out, 1), None, None


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Log-decays and rates [1, T, heads] from a and b [T, heads]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return decay[None], b.sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, **_
):
    """Decoding: one token of each of N sequences, [1, N, heads, width] -> [1, N, heads, V]."""
    rows = (part.transpose(0, 1) for part in (q, k, v, *fused_gdn_gating_cpu(A_log, a, b, dt_bias)))
    rule = "torch_recurrent_gated_delta_rule"
    return run_rule(rule, *rows, initial_state_source, initial_state_indices.long()).transpose(0, 1)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key_width, value_width):
    """Queries, keys and values [T, C], gates [T, heads, V], b and a [T, heads]."""
    qkv, z = qkvz.split([2 * key_heads * key_width + value_heads * value_width, value_heads * value_width], 1)
    return qkv.contiguous(), z.reshape(len(z), value_heads, value_width), *ba.chunk(2, 1)


def gemma_norm(x, weight, eps):
    """RMS norm with 1 + weight over the last dimension."""
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, width):
    """Normalized heads [T * heads, width] of queries and keys."""
    return gemma_norm(q.reshape(-1, width), q_weight, eps), gemma_norm(k.reshape(-1, width), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, width, heads):
    """The same, where each head of queries comes with its gate, which is returned, too."""
    q, gate = q_gate.reshape(-1, 2 * width).chunk(2, 1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, width), gate.contiguous()


def fused_sigmoid_mul_cpu(x, gate):
    """In place."""
    x.mul_(gate.sigmoid())


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    """The norm before the gate silu(z)."""
    return gemma_norm(x, weight - 1, eps) * F.silu(z.float()).to(x.dtype)
