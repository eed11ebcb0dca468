"""Two things that are slow, or large, when written the obvious way: attention to packed sequences, and log-probs.

Both can be understood from what they promise; train.py is written as if torch had them.
"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention


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
