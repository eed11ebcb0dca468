"""On-policy distillation: a teacher says of every token that the student samples how likely it was.

    torchrun --standalone --nproc_per_node=4 -m recipes.distill --teacher Qwen/Qwen2.5-7B-Instruct
    torchrun --standalone --nproc_per_node=2 -m recipes.distill --teacher FOLDER    # no GPU: the tiny Qwen

The student S minimizes its divergence from the teacher T in the states that it visits itself (GKD, Agarwal et
al., arXiv:2306.13649, with lambda = 1; Thinking Machines, "On-Policy Distillation", 2025-10-27):

    --kd_loss sampled   A_t = log pi_T(o_t) - log pi_S(o_t), the advantage of each token in the core's loss
    --kd_loss reverse   + KL(pi_S || pi_T) = sum_v pi_S(v) (log pi_S(v) - log pi_T(v)) over the vocabulary
    --kd_loss forward   + KL(pi_T || pi_S) = sum_v pi_T(v) (log pi_T(v) - log pi_S(v))

all times --kd_coef. The first one has the gradient of the second one in expectation, and is all that servers
can give. --reward_coef adds the reward's advantage, times this number. All log-probs are at --temperature.

--teacher is a folder or a Hub name, sharded as the actor is and moved with it by --offload, or SGLang
servers, http://host:port[,...], that already run the teacher. Its tokenizer must be the student's: ids are
compared, and rows of an embedding beyond the smaller one are left out.

Unlike GKD there are no samples of the teacher or of a dataset, and no JSD. Unlike Thinking Machines the loss
is clipped as in GRPO, and weights each sample the same (--aggregation token: each token).
"""

from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch

from recipes.problems import ProblemDataset, reward_fn
from recipes.teacher import (
    TeacherServers,
    add_states,
    find_teacher,
    full_scores,
    head_part,
    load_teacher,
    local_head,
)
from recipes.trainer import add_column, column
from train import Config, Sample, Trainer, UserError, flag, main


@dataclass
class DistillConfig(Config):
    """The core's flags, and those of the teacher."""

    teacher: str = flag("", "folder or Hub name of the teacher, or URLs of SGLang servers that run it")
    kd_loss: Literal["sampled", "reverse", "forward"] = flag("sampled", "divergence; see recipes/distill.py")
    kd_coef: float = flag(1.0, "weight of the divergence from the teacher")
    reward_coef: float = flag(0.0, "weight of the reward's advantage; 0: the teacher alone")

    def __post_init__(self):
        self.compares_groups = self.reward_coef > 0  # else groups may have a single sample
        if not self.teacher:
            raise UserError("--teacher must name a model, or SGLang servers as http://host:port[,...]")
        if not self.kd_coef > 0 or not self.reward_coef >= 0:
            raise UserError("--kd_coef must be above 0, and --reward_coef 0 or more")
        if self.has_servers and (self.kd_loss != "sampled" or self.temperature != 1):
            raise UserError("--teacher http://... requires --kd_loss sampled and --temperature 1")

    @property
    def has_servers(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))


class Distill(Trainer):
    """A Trainer with a teacher."""

    trains_all = True  # groups with equal rewards learn from the teacher, too
    is_training = False  # whether samples are for training, so that servers score them

    def __init__(self, config, *arguments):
        self.servers = TeacherServers(config) if config.has_servers else None
        path = None if self.servers else find_teacher(config)
        if self.servers:
            add_column("teacher_logprob")
        super().__init__(config, *arguments)
        if self.servers:
            self.engine.loop.run_until_complete(self.servers.check(config))
        else:
            self.add_teacher(path)

    def add_teacher(self, path: str):
        """Loads the teacher of a folder."""
        student = self.actor.model
        add_states(student)
        self.teacher = load_teacher(path, self.mesh, self.config, self.engine.vocab_size)
        if hasattr(student, "head_logprobs"):  # extras/head.py; the same rounding on both sides
            self.teacher.head_logprobs = student.head_logprobs

    def fit(self):
        super().fit()
        if self.servers:
            self.engine.loop.run_until_complete(self.servers.close())

    def rollout(self) -> list[Sample]:
        self.is_training = True
        samples = super().rollout()
        self.is_training = False
        return samples

    async def score(self, sample: Sample):
        """Sets the reward, and the log-probs of a teacher on servers."""
        await super().score(sample)
        if self.servers and self.is_training:
            await self.servers.score(sample)

    def compare(self, samples: list[Sample]):
        """Sets the reward's advantages, if they count."""
        if self.config.reward_coef:
            super().compare(samples)

    @torch.no_grad()
    def teach(self, batch):
        """Gives a batch the teacher's log-probs [N]; or its states [N, H], and rows of its head."""
        if self.servers:
            batch.teacher_logprobs = column(batch, "teacher_logprob")
            return
        if self.config.kd_loss == "sampled":
            batch.teacher_logprobs, _ = self.teacher.logprobs(batch)
        else:
            states = self.teacher.states(batch)
            rows = self.actor.model.config.vocab_size // self.config.tp_size
            batch.teacher = states, head_part(self.teacher, rows, self.mesh["tp"])
        self.teacher.reshard()  # or its root would stay gathered during the update

    def forward(self, batch) -> tuple[torch.Tensor, dict]:
        """The loss of a micro-batch, and statistics [N] to log."""
        self.teach(batch)
        if self.config.kd_loss == "sampled":
            return super().forward(batch)
        states = self.actor.model.states(batch)
        student = states, local_head(self.actor.model)
        shared = min(self.engine.vocab_size, self.teacher.config.vocab_size)  # ids that both have
        options = self.config.kd_loss, self.config.temperature, shared, self.mesh["tp"]
        logprobs, entropy, batch.divergence = full_scores(student, batch.teacher, batch.targets, *options)
        batch.teacher = None  # frees the head
        if batch.old_logprobs is None:  # the first update: pi_old = pi
            batch.old_logprobs = logprobs.detach()
        loss, stats = self.loss(logprobs, entropy, batch)
        return loss, stats | {"logprob_diff": (batch.old_logprobs - batch.engine_logprobs).abs()}

    def loss(self, logprobs, entropy, batch) -> tuple[torch.Tensor, dict]:
        """The core's loss with the advantages, or the term, of --kd_loss."""
        config = self.config
        taught = copy(batch)
        taught.advantages = config.reward_coef * batch.advantages
        if config.kd_loss == "sampled":
            divergence = batch.old_logprobs - batch.teacher_logprobs  # its estimate from one token
            taught.advantages = taught.advantages - config.kd_coef * divergence
            loss, stats = super().loss(logprobs, entropy, taught)
        else:
            divergence = batch.divergence
            loss, stats = super().loss(logprobs, entropy, taught)
            loss = loss + config.kd_coef * (batch.weights * divergence).sum()
        return loss, stats | {"teacher_kl": divergence.detach()}


if __name__ == "__main__":
    main(DistillConfig, ProblemDataset, reward_fn, trainer=Distill)
