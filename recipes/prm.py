"""A process-reward model pays for each step of reasoning, as in OpenR (arXiv:2410.09671), without a look at the answer.

    python -m tools.make_prm --output runs/prm                  # a small one, for the embedded countdown model
    torchrun --standalone --nproc_per_node=2 -m recipes.prm --prm runs/prm --credit appo --lr 1e-4 --critic_lr 1e-3

A step is a line. The PRM is a causal model that reads the problem and the steps, each with a tag behind it, and says at
the tag how likely the step is good: the probability of the good against the bad token. --prm is a model's folder or Hub
name, which every rank loads and keeps frozen, or http://host:port/path, asked by {"problem": ..., "steps": [...]} for
{"scores": [...]}. Conventions of tag, good and bad: Math-Shepherd's and that of OpenR's Qwen.

A step is paid 2 p - 1. OpenR pays p, and more steps then pay by themselves: the embedded model learns to go on forever.

Credit: `appo` and `tppo` are those of recipes/ppo.py, with a critic; `grpo` has none: OpenR's is the step's own reward,
normalised over all steps of the batch. Whether the answer is right is logged as `solved`, and never rewarded.
OpenR has --gamma 0.95 --gae_lambda 0.95 --entropy_coef 0.01.
"""
import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.ppo import CRITICS, PPO, PPOConfig
from tools.inputs import UserError, flag
from train import Sample, Trainer, gather, main

CONVENTIONS = {     # the tag, and the tokens of a good and of a bad step
    "math_shepherd": (" ки", "+", "-"),         # arXiv:2312.08935
    "openr_qwen": ("\n\n\n\n\n", "+", "-"),
}
WITHOUT_CRITIC = dict(baseline="none", normalize="turns", ratio="step", aggregation="step")


@dataclass
class PRMConfig(PPOConfig):
    """What recipes/ppo.py has, and the PRM."""
    prm: str = flag("", "folder, Hub name, or http://host:port/path of a process-reward model")
    convention: Literal[tuple(CONVENTIONS)] = flag("math_shepherd", "tag and tokens of the PRM")
    credit: Literal["appo", "tppo", "grpo"] = flag("appo", "how steps share what came of them")

    def __post_init__(self):
        if not self.prm:
            raise UserError("--prm must name a process-reward model; `python -m tools.make_prm` makes a small one")
        if self.credit in CRITICS:
            self.critic = self.credit
        else:
            for name, value in WITHOUT_CRITIC.items():
                setattr(self, name, value)
            self.gamma = 0.0
        super().__post_init__()


class Judge:
    """A PRM in this process, or behind an address."""

    def __init__(self, where: str, convention: str, device: str):
        self.where, (self.tag, *self.verdicts) = where, CONVENTIONS[convention]
        if where.startswith(("http://", "https://")):
            return
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(where)
            self.model = AutoModelForCausalLM.from_pretrained(where, dtype="auto").to(device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"--prm {where} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.verdict_ids = [self.encode(verdict)[-1] for verdict in self.verdicts]

    def encode(self, text: str) -> list[int]:
        """Ids [T], without any that a tokenizer adds by itself."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def scores(self, problem: str, steps: list[str]) -> list[float]:
        """How likely each step is good, in [0, 1]."""
        if self.where.startswith("http"):
            body = json.dumps({"problem": problem, "steps": steps}).encode()
            request = urllib.request.Request(self.where, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = json.load(answer)["scores"]
            if len(found) != len(steps):
                raise ConnectionError(f"--prm {self.where} gave {len(found)} scores for {len(steps)} steps")
            return [float(score) for score in found]
        ids, places = self.encode(problem), []
        for step in steps:
            ids += self.encode(step) + self.encode(self.tag)
            places.append(len(ids) - 1)
        logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, places]
        return logits[:, self.verdict_ids].float().softmax(-1)[:, 0].tolist()


class PRM(PPO):
    """A Trainer whose rewards come from a PRM."""

    def __init__(self, *arguments):
        (PPO if arguments[0].credit in CRITICS else Trainer).__init__(self, *arguments)
        self.judge = Judge(self.config.prm, self.config.convention, self.config.device)
        self.line_ends = {i for i in range(len(self.tokenizer)) if "\n" in self.tokenizer.decode([i])}

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """First the PRM says what each step is worth; the ranks share the work."""
        with self.timed("prm"):
            rank, ranks = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
            mine = list(range(rank, len(samples), ranks))
            found = asyncio.run(self.judged([samples[i] for i in mine]))
            for i, steps, scores in gather([(i, *one) for i, one in zip(mine, found)], self.mesh["dp"]):
                samples[i].metrics["solved"] = samples[i].reward
                samples[i].steps, samples[i].rewards = steps, [2 * p - 1 for p in scores]
        return PPO.learn(self, samples) if self.config.credit in CRITICS else Trainer.learn(self, samples)

    async def judged(self, samples: list[Sample]) -> list[tuple[list[int], list[float]]]:
        """Steps [T] and scores of samples; where the PRM is elsewhere, it is asked about all at once."""
        if not self.judge.where.startswith("http"):
            return [self.judge_one(sample) for sample in samples]
        return await asyncio.gather(*(asyncio.to_thread(self.judge_one, sample) for sample in samples))

    def judge_one(self, sample: Sample) -> tuple[list[int], list[float]]:
        """Steps [T] of a sample, and a score for each."""
        self.split(sample)
        texts = {}
        for i, step, trained in zip(sample.ids, sample.steps, sample.mask):
            if trained:
                texts.setdefault(step, []).append(i)
        problem = sample.messages[-1]["content"] + "\n"
        return sample.steps, self.judge.scores(problem, [self.tokenizer.decode(ids) for ids in texts.values()])

    def compare(self, samples: list[Sample]):
        """With a critic, or without."""
        (PPO if self.config.credit in CRITICS else Trainer).compare(self, samples)


if __name__ == "__main__":
    main(PRMConfig, trainer_class=PRM)
