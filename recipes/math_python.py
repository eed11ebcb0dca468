"""Mathematics with a Python tool, as in GEM: the policy may run programs before it answers.

    torchrun --standalone --nproc_per_node=4 -m recipes.math_python --data math/train.jsonl --max_turns 6
    torchrun --standalone --nproc_per_node=4 -m recipes.math_python --data math/train.jsonl --tool False

After a turn with a program, in <python> </python> or a fenced block, the first one runs in a sandbox
(extras/sandbox.py) for at most 5 seconds, and its output is the next turn, up to --tool_uses times. A turn
without a program ends the episode. Rows have problem and answer (MATH) or question and answer (GSM8K);
math-verify grades the last \\boxed{} of the last turn. As in GEM's default, using the tool gives no reward.
Unlike in GEM, the turn is not cut off where its program ends: text sampled after it is kept, and trained on.
`python -m tools.make_start calculator` makes a small model and problems to try this without a GPU.
"""

import asyncio
import re
from dataclasses import dataclass

import rewards
from extras.sandbox import run_python
from recipes.problems import PROMPT
from recipes.turns import user_turn
from train import Config, RLDataset, Sample, Trainer, UserError, flag, main

PROGRAM = re.compile(r"<python>(.*?)</python>|```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
HINT = (
    "\nTo compute something, write a Python program that prints it between <python> and </python>, and wait."
)
SECONDS = 5.0


@dataclass
class ToolConfig(Config):
    """The core's flags, and the tool."""

    max_turns: int = flag(6, "policy turns per episode")
    tool: bool = flag(True, "use of the Python tool")
    tool_uses: int = flag(5, "largest number of programs per episode")

    def __post_init__(self):
        if self.tool_uses < 0:
            raise UserError(f"--tool_uses must be 0 or more, not {self.tool_uses}")


def program_of(turn: str) -> str | None:
    """The first program in a turn."""
    match = PROGRAM.search(turn)
    return match and (match[1] or match[2] or "").strip()


def reward_fn(sample: Sample) -> float:
    """1 for the right answer in the last turn."""
    gold = str(sample.row["answer"]).split("####")[-1].strip()
    sample.metrics |= {"tool_uses": float(sample.state.get("uses", 0)), "turns": float(len(sample.turns))}
    return rewards.math(sample.turns[-1], gold)


class MathDataset(RLDataset):
    """Rows of MATH and GSM8K."""

    hint = HINT

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        problem = row.get("problem") or row.get("question")
        if not problem or row.get("answer") is None:
            raise UserError(f"--data {self.source}: row {index} needs answer, and problem or question")
        return Sample([{"role": "user", "content": PROMPT.format(problem) + self.hint}], row)


class ToolTrainer(Trainer):
    """A Trainer whose episodes may run programs."""

    def __init__(self, config, dataset_class, reward_fn, env_step):
        dataset_class.hint = HINT if config.tool else ""
        super().__init__(config, dataset_class, reward_fn, self.run_program)

    async def run_program(self, sample: Sample) -> str | None:
        """The output of the turn's program as the next turn; None if there is none, or no more may run."""
        program = program_of(sample.turns[-1])
        uses = sample.state.get("uses", 0)
        if program is None or not self.config.tool or uses >= self.config.tool_uses:
            return None
        sample.state["uses"] = uses + 1
        output = await asyncio.to_thread(run_python, program, SECONDS)
        return user_turn(f"Code execution result: {output[:2000].strip()}")


if __name__ == "__main__":
    main(ToolConfig, MathDataset, reward_fn, trainer=ToolTrainer)
