"""What a lone train.py leaves out of its log: seconds per phase, tokens per second, MFU, peak memory, and
remarks on steps that a user should know about.

Of a step's time_step, time_rollout is sampling with rewards and tools, time_update the backward passes and
the optimizer, time_logprobs the rest of Trainer.learn (the reference's and the old log-probs), time_push the
weight sync; they are the slowest rank's. time_reward adds up the samples of all ranks, which overlap.

MFU (model FLOPs utilisation; Chowdhery et al., arXiv:2204.02311, appendix B) is the share of a GPU's peak
that the arithmetic of the model itself reaches: what gradient checkpointing computes twice counts once, and
so does a prompt that the completions of a group share. shared_tokens is the share of tokens that this saves.
"""

import resource
import shutil
import time
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from train import RANK, reduce_over

# Dense bf16 FLOP/s per card, by a part of its name (from the makers' data sheets). Other cards have no MFU.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "H20": 148e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
REMARKS_EVERY = 10  # steps
TRUNCATED = 0.3  # share of completions, above which there is a remark
PHASES = ("rollout", "logprobs", "update", "push", "step")


# ---- Arithmetic and memory -------------------------------------------------------------------------------
def forward_flops(config, lengths: list[int], trained: int, shared: list[int] = ()) -> float:
    """FLOPs of one forward pass over sequences of these lengths, with the head at `trained` of their tokens.

    A multiplication and an addition count as two. Counted are the layers' matrices, causal attention (a token
    sees half of its sequence on average) and the head; norms, rotations and activations are below 1 %. Not
    counted are the `shared` first tokens of sequences, whose states another sequence has computed.
    """
    tokens = sum(lengths) - sum(shared)
    linear = (getattr(config, "layer_types", None) or []).count("linear_attention")
    full = config.num_hidden_layers - linear
    hidden = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    projections = 2 * hidden * width * (heads + kv_heads)  # weights of q, o, k and v
    if linear:  # q_proj of hybrids has a gate for each query
        projections += hidden * width * heads
    mlp = 3 * hidden * config.intermediate_size
    matrices = 2 * (full * projections + config.num_hidden_layers * mlp) * tokens
    if linear:
        matrices += linear * delta_net_flops(config) * tokens
    pairs = sum(n * (n + 1) / 2 for n in lengths) - sum(n * (n + 1) / 2 for n in shared)  # of query and key
    head = 2 * hidden * config.vocab_size * trained
    return matrices + full * 4 * heads * width * pairs + head


def delta_net_flops(config) -> int:
    """FLOPs per token of a Gated DeltaNet layer (arXiv:2412.06464) without its MLP.

    Counted are the projections, the convolution and, per value head, three products with the state [K, V]:
    what it holds for the key, its update, and the output. Kernels that work in chunks compute more than this,
    which does not count, like what gradient checkpointing computes again.
    """
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    inputs = config.hidden_size * (2 * keys + 2 * values + 2 * heads)  # of q, k, v, gate z, beta and decay
    convolution = config.linear_conv_kernel_dim * (2 * keys + values)
    states = 3 * config.linear_key_head_dim * values
    return 2 * (inputs + convolution + states + values * config.hidden_size)


def peak_flops(card: str) -> float | None:
    """Peak FLOP/s of a card, by its name; None where it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in card), None)


def peak_gb() -> float:
    """The peak memory of this process so far, in GB; GPU memory if there is a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# ---- Remarks on a step -----------------------------------------------------------------------------------
def remarks(step: int, metrics: dict, outcomes: list[tuple[int, float, bool]], config) -> str:
    """Sentences on a step, from its metrics and from (group, reward, failed) of all its samples."""
    found = []
    if getattr(config, "baseline", "") != "none":  # else nothing is compared within a group
        found.append(remark_on_signal(outcomes))
    on_policy = getattr(config, "updates_per_step", 1) == 1 and not getattr(config, "kl_coef", 0)
    if step == 1 and on_policy and abs(metrics.get("loss", 1.0)) < 1e-3:
        gradient = " The gradient is not 0." if metrics.get("grad_norm") else ""
        found.append(
            "A loss near 0 is expected: before the update every ratio is 1, and the advantages of a group "
            f"sum to 0.{gradient} Watch the reward."
        )
    truncated = metrics.get("truncated", 0.0)
    if truncated > TRUNCATED:
        found.append(
            f"{truncated:.0%} of the completions were cut off: raise --max_new_tokens, or check "
            "samples.jsonl for completions that never end."
        )
    return " ".join(filter(None, found))


def remark_on_signal(outcomes: list[tuple[int, float, bool]]) -> str:
    """How many groups carry a signal, and what to do if none does."""
    failed = {group for group, _, has_failed in outcomes if has_failed}  # they are left out of the loss
    groups = {}
    for group, reward, _ in outcomes:
        if group not in failed:
            groups.setdefault(group, []).append(reward)
    if not groups:
        return ""
    rewards = sum(groups.values(), [])
    names = {min(rewards): "wrong", max(rewards): "correct"} if len(set(rewards)) > 1 else {}
    uniform = [group[0] for group in groups.values() if len(set(group)) == 1]
    counts = Counter(names.get(reward, "equal") for reward in uniform)
    reasons = [f"{counts[kind]} all {kind}" for kind in ("correct", "wrong", "equal") if counts[kind]]
    reason = f" ({', '.join(reasons)})" if reasons else ""
    if len(uniform) < len(groups):
        return f"{len(groups) - len(uniform)} of {len(groups)} groups carry a signal{reason}."
    return (
        f"None of the {len(groups)} groups carries a signal{reason}, so there is nothing to learn from this "
        f"step: the mean reward is {sum(rewards) / len(rewards):.3g}; use prompts that the policy solves "
        "sometimes, or raise --group_size."
    )


# ---- The trainer -----------------------------------------------------------------------------------------
def extend(trainer_class: type) -> type:
    """A trainer that measures its steps, and prints remarks on some of them."""

    class MonitoredTrainer(trainer_class):
        def __init__(self, config, *arguments):
            self.seconds = Counter()  # by phase of a step, on this rank
            self.forget_update()
            super().__init__(config, *arguments)

        def forget_update(self):
            """Forgets the update of an earlier step."""
            self.gaps = []  # largest differences of log-probs, by micro-batch
            self.tokens = 0  # that this rank's update of the step computes
            self.sample_tokens = 0  # the same if no samples shared a prompt
            self.flops = 0.0  # of one forward pass over them
            self.update_began = None

        def open_log(self):
            super().open_log()
            shutil.copy(train.__file__, self.folder / "train.py")

        @contextmanager
        def timed(self, phase: str):
            """Adds the seconds of a `with` block to a phase."""
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[phase] += time.perf_counter() - start

        def step(self):
            self.seconds.clear()  # what an evaluation took
            with self.timed("step"):
                metrics, samples = super().step()
            return metrics | self.speed(samples), samples

        def rollout(self) -> list:
            with self.timed("rollout"):
                return super().rollout()

        async def score(self, sample):
            with self.timed("reward"):
                await super().score(sample)

        def publish(self):
            with self.timed("push"):
                super().publish()

        def learn(self, samples: list) -> dict[str, float]:
            """The update. Backward passes begin with the first `forward`, after all other log-probs."""
            self.forget_update()
            start = time.perf_counter()
            metrics = super().learn(samples)
            end = time.perf_counter()
            self.seconds["logprobs"] = (self.update_began or end) - start
            self.seconds["update"] = end - (self.update_began or end)
            return metrics

        def micro_batches(self, samples: list) -> list:
            batches = super().micro_batches(samples)
            for batch in batches:
                if batch.samples:  # else it is a filler
                    lengths = [len(sample.tokens) for sample in batch.samples]
                    shared = getattr(batch, "shared", [])
                    self.tokens += sum(lengths) - sum(shared)
                    self.sample_tokens += sum(lengths)
                    self.flops += forward_flops(self.actor.model.config, lengths, len(batch.targets), shared)
            return batches

        def forward(self, batch):
            if self.update_began is None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # log-probs may still be on their way
                self.update_began = time.perf_counter()
            loss, stats = super().forward(batch)
            gaps = stats["logprob_diff"] * (batch.weights > 0)  # excludes fillers
            self.gaps.append(gaps.max())  # stays on its device: no synchronization
            return loss, stats

        def speed(self, samples: list) -> dict[str, float]:
            """Seconds by phase, tokens per second, idle shares, peak memory, the largest gap, MFU."""
            dp = self.mesh["dp"]
            sampled = sum(int(sample.tokens["mask"].sum()) for sample in samples)
            sums = [sampled, self.tokens, self.sample_tokens, self.flops]
            sums += [self.seconds["reward"], self.seconds["rollout"]]
            sampled, computed, trained, flops, reward_seconds, rollout_seconds = reduce_over(dp, sums)
            gap = torch.stack(self.gaps).max().item() if self.gaps else 0.0
            largest = [*(self.seconds[phase] for phase in PHASES), peak_gb(), self.tokens, gap]
            *slowest, memory, fullest, gap = reduce_over(dp, largest, dist.ReduceOp.MAX)
            metrics = {f"time_{phase}": seconds for phase, seconds in zip(PHASES, slowest)}
            rollout = max(metrics["time_rollout"], 1e-9)
            update = max(metrics["time_logprobs"] + metrics["time_update"], 1e-9)
            metrics |= {
                "time_reward": reward_seconds,
                "rollout_tokens_per_s": sampled / rollout,
                "train_tokens_per_s": trained / update,
                "idle_rollout": 1 - rollout_seconds / dp.size() / rollout,  # waiting for the slowest
                "idle_update": 1 - computed / dp.size() / max(fullest, 1),  # by tokens
                "shared_tokens": 1 - computed / max(trained, 1),  # prompts that were not computed again
                "peak_gb": memory,
                "logprob_diff_max": gap,
            }
            peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
            if peak and metrics["time_update"]:
                available = metrics["time_update"] * dist.get_world_size() * peak
                metrics["mfu"] = 3 * flops / available  # the backward pass costs two forward passes
            return metrics

        def write(self, step: int, metrics: dict[str, float], samples: list):
            """Logs a step, with remarks at the first one and every tenth after it."""
            super().write(step, metrics, samples)  # adds the samples' means to the metrics
            if step % REMARKS_EVERY != 1:
                return
            mine = samples if self.mesh["tp"].get_local_rank() == 0 else []
            outcomes = [(sample.key[0], sample.reward, bool(sample.failure)) for sample in mine]
            parts = [None] * dist.get_world_size() if RANK == 0 else None
            dist.gather_object(outcomes, parts)
            found = remarks(step, metrics, sum(parts, []), self.config) if RANK == 0 else ""
            if found:
                tqdm.write(f"step {step} | {found}")

        def fit(self):
            super().fit()
            if RANK == 0:
                tqdm.write(f"Done: {self.folder}/model; python -m tools.view {self.folder} shows the samples")

    return MonitoredTrainer
