"""Published learning curves: each is one command, which ends with a verdict, "reached" or "not reached".

    torchrun --standalone --nproc_per_node=1 -m bench.reference qwen3-0.6b [flags of recipes/algorithms.py]

All learn GSM8K and evaluate greedily on its 1,319 test problems. Flags of the command line have priority. No
GPU has ever run this: the numbers to reach are others', and these commands are untried.

qwen3-0.6b      Qwen3-0.6B, .71 at step 60. Source: radixark/miles, a gate of its CI,
                tests/e2e/short/test_qwen3_0.6B_fsdp_colocated_2xGPU.py.
qwen2.5-0.5b    Qwen2.5-0.5B-Instruct, .55 at step 250; the same settings. Source: radixark/miles,
                tests/e2e/long/test_qwen2.5_0.5B_gsm8k.py, "too slow" for its CI by now.
qwen2.5-1.5b    Qwen2.5-1.5B-Instruct, .69 after an epoch, which is 7 steps of 1,024 prompts. Source:
                NovaSky-AI/SkyRL, examples/train/gsm8k/run_gsm8k.sh, with the bounds of
                tests/train/gpu_e2e_test/gsm8k_colocate.sh: it also expects a reward of .69 or more, 232
                tokens or fewer and a logprob_diff of .0104 or less at the end.

What differs from miles. Its gate is passed if any evaluation of a run reaches the number; here the last one
has to. Its prompts are those of the data set zhuzilin/gsm8k, which --data zhuzilin/gsm8k --eval_data
zhuzilin/gsm8k:test takes; the default is the prompt of recipes/gsm8k.py. It replaces groups without variance
by the first groups to finish of 64 prompts at a time; here up to 4 further rollouts do. Its checker compares
what \\boxed{} contains as an expression; here the last number in it counts. It uses 8 GPUs, and for Qwen2.5
Megatron, without weight decay of norms and biases. As there, Qwen3 thinks.

What differs from SkyRL: vLLM there, SGLang here. Prompt, reward, loss and optimizer are the same.

A point is 13 problems: the standard error of an evaluation is about .0125, and a run that ends that much
below the number may be as good. The exit code is 0 if the number is reached, 1 if not, 2 for a mistake.
"""

import math
import re
import sys
from dataclasses import dataclass

from bench.measure import command_line
from extras.curve import read
from recipes.algorithms import AlgorithmConfig
from recipes.gsm8k import GSM8KDataset
from recipes.trainer import AlgorithmTrainer
from rewards import boxed, gsm8k_last_number
from train import RANK, Sample, UserError, flag, main

HUB = {"data": "openai/gsm8k/main", "eval_data": "openai/gsm8k/main:test"}
MILES = HUB | {
    **{"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 1024, "temperature": 1.0},
    **{"lr": 1e-6, "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.98, "weight_decay": 0.1},
    **{"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "dynamic_sampling": 4},
    **{"eval_every": 20, "eval_temperature": 0.0},
}
SKYRL = HUB | {
    **{"prompts_per_step": 1024, "group_size": 5, "max_new_tokens": 1024, "temperature": 1.0},
    **{"lr": 1e-6, "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01},
    **{"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.001, "updates_per_step": 4, "aggregation": "token"},
    **{"eval_every": 5, "eval_temperature": 0.0},
}


# ----------------------------------------------------------------------------- the tasks ------------------
class MilesDataset(GSM8KDataset):
    """Rows of question and answer, or chats with labels, as in zhuzilin/gsm8k."""

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        if "messages" in row and "label" in row:
            return Sample(list(row["messages"]), row | {"answer": row["label"]})
        return super().__getitem__(index)


class SkyRLDataset(GSM8KDataset):
    """Rows of question and answer, whose prompt asks for the form that is rewarded."""

    prompt = '{} Let\'s think step by step and output the final answer after "####".'


def miles_reward(sample: Sample) -> float:
    r"""1 if the last number in the last \boxed{} is right, else 0."""
    return gsm8k_last_number(boxed(sample.text) or "", sample.row["answer"])


def skyrl_reward(sample: Sample) -> float:
    """1 if what follows the first "#### " is the answer to the letter, commas aside, else 0."""
    found = re.search(r"#### (-?[0-9.,]+)", sample.text)
    right = sample.row["answer"].rpartition("#### ")[2]
    return float(found is not None and found[1].replace(",", "") == right.replace(",", ""))


@dataclass
class Reference:
    """A published curve."""

    goal: float  # eval_score to reach
    flags: dict  # by name, in front of those of the command line
    dataset: type = MilesDataset
    reward_fn: object = miles_reward


REFERENCES = {
    "qwen3-0.6b": Reference(0.71, MILES | {"model": "Qwen/Qwen3-0.6B", "steps": 60}),
    "qwen2.5-0.5b": Reference(0.55, MILES | {"model": "Qwen/Qwen2.5-0.5B-Instruct", "steps": 250}),
    "qwen2.5-1.5b": Reference(
        0.69, SKYRL | {"model": "Qwen/Qwen2.5-1.5B-Instruct", "steps": 7}, SkyRLDataset, skyrl_reward
    ),
}


# ----------------------------------------------------------------------------- the run --------------------
@dataclass
class ReferenceConfig(AlgorithmConfig):
    """The flags of recipes/algorithms.py, and the number to reach."""

    goal: float = flag(0.0, "eval_score to reach with the last step")

    def __post_init__(self):
        super().__post_init__()
        if not (self.eval_data and self.eval_every):
            raise UserError("without an evaluation there is no verdict: set --eval_data and --eval_every")


def verdict(history: list[dict], goal: float, problems: int) -> tuple[bool, str]:
    """Whether the last evaluation of a run, on so many problems, reaches the goal, and a line about it."""
    scores = {one["step"]: one["eval_score"] for one in history if one.get("eval_score") is not None}
    step, score = list(scores.items())[-1]
    word = "reached" if score >= goal else "not reached"
    error = math.sqrt(max(score * (1 - score), 0) / problems)
    line = f"{word}: eval_score {score:.4f} at step {step}, {score - goal:+.4f} from {goal:g}"
    first, best = list(scores.values())[0], max(scores.values())
    return score >= goal, f"{line} (standard error {error:.4f}; at first {first:.4f}, best {best:.4f})"


class ReferenceTrainer(AlgorithmTrainer):
    """Trains, and compares the last evaluation with the goal."""

    outcome = True, ""  # on the class, because main returns no trainer; only rank 0 judges

    def fit(self):
        super().fit()
        if RANK == 0:
            history = read(self.folder)
            ReferenceTrainer.outcome = verdict(history, self.config.goal, len(self.eval_data))


def run():
    """Runs the reference that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in REFERENCES:
        print(f"bench.reference: name one of {' '.join(REFERENCES)}, not {name!r}", file=sys.stderr)
        sys.exit(2)
    reference = REFERENCES[name]
    sys.argv[1:2] = command_line(reference.flags | {"goal": reference.goal})
    main(ReferenceConfig, reference.dataset, reference.reward_fn, trainer=ReferenceTrainer)
    is_reached, line = ReferenceTrainer.outcome
    if RANK == 0:
        print(line, flush=True)
    sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    run()
