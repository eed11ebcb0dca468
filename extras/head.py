"""Log-probs and entropies with a backward pass written by hand: faster than train.head_logprobs, equal to it.

Autograd makes a dozen passes over the logits of a chunk, and casts the head to fp32 and back for each chunk
so that its gradient is summed in fp32. Here the logits z of a chunk are computed again in the backward pass,
and with p = softmax(z) their gradients are

    d log p_target / dz = onehot - p        d entropy / dz = -p (log p + entropy)

With --fp32_logits a 16-bit head gives logits in fp32, here and in the engine; otherwise both round them to 16
bits: in bfloat16 by up to .06 where they are 16 to 32. Such a product costs a GPU nothing, since its matrix
units sum in fp32; a CPU converts both factors first.

Without this file the Trainer uses train.head_logprobs.
"""

import functools
import json
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from train import flag


@dataclass
class Flags:
    fp32_logits: bool = flag(True, "16-bit dtypes: logits of actor and engine in fp32, not rounded")


def chunk_size(hidden_size: int) -> int:
    """Tokens whose logits exist at once: in fp32 they take half the memory of the head's gradient."""
    return max(256, hidden_size // 2)


def chunks(tokens: int, hidden_size: int) -> list[slice]:
    size = chunk_size(hidden_size)
    return [slice(i, i + size) for i in range(0, tokens, size)]


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices of one dtype, in fp32 and without rounding to 16 bits."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def scaled_logits(states, head, temperature: float, used: int, in_fp32: bool) -> torch.Tensor:
    """Logits [t, V / tp] of states [t, H] in fp32; `used` rows of the head belong to tokens."""
    logits = fp32_product(states, head.T) if in_fp32 else (states @ head.T).float()
    logits.div_(temperature)
    logits[:, used:] = -1e30  # rows beyond the vocabulary
    return logits


class HeadLogprobs(torch.autograd.Function):
    """Log-probs and entropies [N]; the targets that are `owned` [N] by this rank are its rows `local` [N]."""

    @staticmethod
    def forward(ctx, states, head, local, owned, options: tuple[float, int, bool], tp: DeviceMesh):
        def over_ranks(values, op="sum"):
            return DTensor.from_local(values, tp, [Partial(op)]).full_tensor() if tp.size() > 1 else values

        ctx.options = options
        scores = []
        for i in chunks(*states.shape):
            logits = scaled_logits(states[i], head, *options)
            top = over_ranks(logits.amax(dim=1), "max")
            exps = logits.sub_(top[:, None]).exp()
            chosen = logits.gather(1, local[i, None])[:, 0] * owned[i]
            sums = torch.stack([chosen, exps.sum(dim=1), exps.mul_(logits).sum(dim=1)])
            chosen, total, weighted = over_ranks(sums)
            log_sum = total.log()
            scores.append((chosen - log_sum, log_sum - weighted / total, top + log_sum))
            del logits, exps  # before the next chunk's are made
        logprobs, entropies, log_sums = map(torch.cat, zip(*scores))
        ctx.save_for_backward(states, head, local, owned, entropies, log_sums)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, by_logprob, by_entropy):
        states, head, local, owned, entropies, log_sums = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]  # adapters leave the head as it is
        head_gradient = torch.zeros_like(head, dtype=torch.float32) if learns else None
        states_gradient = torch.empty_like(states)
        for i in chunks(*states.shape):
            logps = scaled_logits(states[i], head, *ctx.options).sub_(log_sums[i, None])
            gradient = (logps + entropies[i, None]).mul_(by_entropy[i, None]).add_(by_logprob[i, None])
            gradient.mul_(logps.exp_()).neg_()
            gradient.scatter_add_(1, local[i, None], (by_logprob * owned)[i, None])
            gradient = gradient.div_(ctx.options[0]).to(states.dtype)
            states_gradient[i] = gradient @ head
            if learns:
                head_gradient += gradient.T @ states[i]
            del logps, gradient
        return states_gradient, head_gradient.to(head.dtype) if learns else None, None, None, None, None


def head_logprobs(
    states, targets, head, temperature: float, vocab_size: int, tp: DeviceMesh, fp32_logits: bool = False
):
    """Log-probs and entropies [N] of targets [N], from states [N, H] and this rank's head [V / tp, H]."""
    first = tp.get_local_rank() * len(head)  # this rank's part of the vocabulary begins here
    owned = (targets >= first) & (targets < first + len(head))
    if tp.size() > 1:  # the gradient of the states is a sum over the ranks
        states = DTensor.from_local(states, tp, [Replicate()]).to_local(grad_placements=[Partial()])
    options = temperature, max(0, vocab_size - first), fp32_logits
    return HeadLogprobs.apply(states, head, (targets - first) * owned, owned, options, tp)


def extend(trainer_class: type) -> type:
    """A trainer whose models compute log-probs this way, and whose engine rounds logits as they do."""

    class HeadTrainer(trainer_class):
        def __init__(self, config, *arguments):
            if config.engine == "sglang":
                options = json.loads(config.sglang_args) | {"enable_fp32_lm_head": config.fp32_logits}
                config.sglang_args = json.dumps(options)
            super().__init__(config, *arguments)

        def load_policy(self):
            model = super().load_policy()
            model.head_logprobs = functools.partial(head_logprobs, fp32_logits=self.config.fp32_logits)
            return model

    return HeadTrainer
