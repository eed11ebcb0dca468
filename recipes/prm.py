"""A process-reward model pays for each reasoning step, as in OpenR (arXiv:2410.09671), without seeing the
answer.

    python -m tools.make_start prm --output runs/prm  # a small one, for the embedded countdown model
    torchrun --standalone --nproc_per_node=2 -m recipes.prm --prm runs/prm --lr 1e-4 --critic_lr 1e-3

A step is a line. The PRM is a causal model that reads the problem and the steps, each followed by a tag. Its
probability of the good against the bad token at the tag estimates how likely the step is good. --prm is a
folder or Hub name, which every rank loads and keeps frozen, or http://host:port/path, which gets {"problem":
..., "steps": [...]} and returns {"scores": [...]}. Conventions for the tag and both tokens: Math-Shepherd's,
and that of OpenR's Qwen.

A step is paid 2 p - 1. OpenR pays p, which rewards extra steps; the embedded model then learns never to stop.

--critic appo and tppo are those of recipes/ppo.py; none is OpenR's GRPO: the step's own reward, normalized
over all steps of the batch. Whether the answer is right is logged as `solved`, and never rewarded. OpenR sets
--gamma 0.95 --gae_lambda 0.95 --entropy_coef 0.01.
"""

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.algorithms import COMMON
from recipes.ppo import ACTIONS, PPO, PPOConfig
from recipes.problems import ProblemDataset, reward_fn
from train import Sample, UserError, flag, main

CONVENTIONS = {  # the tag, and the tokens of a good and of a bad step
    "math_shepherd": (" ки", "+", "-"),  # arXiv:2312.08935
    "openr_qwen": ("\n\n\n\n\n", "+", "-"),
}


@dataclass
class PRMConfig(PPOConfig):
    """The flags of recipes/ppo.py, and the PRM's."""

    critic: Literal["appo", "tppo", "none"] = flag("appo", "assignment of credit to steps")
    prm: str = flag("", "folder, Hub name, or http://host:port/path of a process-reward model")
    convention: Literal[tuple(CONVENTIONS)] = flag("math_shepherd", "tag and tokens of the PRM")

    def row(self) -> dict:
        return super().row() if self.critic != "none" else COMMON | ACTIONS | {"gamma": 0.0}

    def __post_init__(self):
        if not self.prm:
            raise UserError("--prm must name a model; python -m tools.make_start prm makes a small one")
        super().__post_init__()


class Judge:
    """A PRM in this process, or at a URL."""

    def __init__(self, where: str, convention: str, device: str):
        self.where = where
        self.is_remote = where.startswith(("http://", "https://"))
        self.tag, *verdicts = CONVENTIONS[convention]
        if self.is_remote:
            return
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(where)
            self.model = AutoModelForCausalLM.from_pretrained(where, dtype="auto").to(device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"--prm {where} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.verdict_ids = [self.encode(verdict)[-1] for verdict in verdicts]

    def encode(self, text: str) -> list[int]:
        """Ids [T], without special tokens that a tokenizer adds."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, problem: str, steps: list[str]) -> list[float]:
        """The scores of a PRM at a URL. Raises ConnectionError unless there is one per step."""
        body = json.dumps({"problem": problem, "steps": steps}).encode()
        request = urllib.request.Request(self.where, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            scores = json.load(response)["scores"]
        if len(scores) != len(steps):
            raise ConnectionError(f"--prm {self.where} returned {len(scores)} scores for {len(steps)} steps")
        return [float(score) for score in scores]

    @torch.no_grad()
    def scores(self, problem: str, steps: list[str]) -> list[float]:
        """How likely each step is good, in [0, 1]."""
        if self.is_remote:
            return self.ask(problem, steps)
        ids = self.encode(problem)
        places = []  # positions of the tags
        for step in steps:
            ids += self.encode(step) + self.encode(self.tag)
            places.append(len(ids) - 1)
        logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, places]
        return logits[:, self.verdict_ids].float().softmax(-1)[:, 0].tolist()


class PRM(PPO):
    """A Trainer whose rewards come from a PRM."""

    def __init__(self, config, *arguments):
        super().__init__(config, *arguments)
        self.judge = Judge(config.prm, config.convention, config.device)

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Replaces the reward of each completion by rewards of its steps, then learns from them."""
        judged = [sample for sample in samples if not sample.failure]
        for sample in judged:
            sample.metrics["solved"] = sample.reward
            sample.rewards = sample.rewards[-1:]
            self.split_lines(sample)
        tp = self.mesh["tp"]
        scores = [asyncio.run(self.judge_all(judged)) if tp.get_local_rank() == 0 else None]
        if tp.size() > 1:
            dist.broadcast_object_list(scores, group_src=0, group=tp.get_group())
        for sample, found in zip(judged, scores[0]):
            sample.rewards = [2 * p - 1 for p in found]
            sample.reward = sum(sample.rewards)
        return super().learn(samples)

    async def judge_all(self, samples: list[Sample]) -> list[list[float]]:
        """The scores of each sample's steps; a PRM at a URL is asked about all of them at once."""
        if self.judge.is_remote:
            return await asyncio.gather(*[asyncio.to_thread(self.judge_one, sample) for sample in samples])
        return [self.judge_one(sample) for sample in samples]

    def judge_one(self, sample: Sample) -> list[float]:
        """A score for each step of a sample."""
        own = sample.tokens[sample.tokens["mask"] == 1]
        ids = [own["id"][own["turn"] == step].tolist() for step in range(len(sample.rewards))]
        problem = sample.messages[-1]["content"] + "\n"
        return self.judge.scores(problem, [self.tokenizer.decode(step) for step in ids])


if __name__ == "__main__":
    main(PRMConfig, ProblemDataset, reward_fn, trainer=PRM)
