"""Programs judged by tests: what they print for an input, or what their functions return.

    torchrun --standalone --nproc_per_node=4 -m recipes.code --data problems.jsonl

A row has `question`, and either `inputs` and `outputs`, lists of text (what the program reads and must print,
as in CodeContests and TACO), or `tests`, a list of lines, for example "assert add(1, 2) == 3" (as in MBPP).
The program is the last fenced block. Each test runs in a sandbox of its own (extras/sandbox.py) for at most 5
seconds; the reward is 1 if all pass.

A program's output is compared outside the sandbox, so no program can claim that it passed. An `assert` runs
in the program's own process, which might find a way to fake a pass: prefer inputs and outputs.
"""

import asyncio
import re
import secrets

from extras.sandbox import run_python
from train import RLDataset, Sample, UserError, main

PROMPT = (
    "{}\nWrite a Python program. Put all of it into one block that begins with ```python and ends with ```."
)
PROGRAM = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
SECONDS = 5.0


class CodeDataset(RLDataset):
    """Rows of problems with tests."""

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        if not row.get("question") or not (row.get("tests") or (row.get("inputs") and row.get("outputs"))):
            raise UserError(f"--data {self.source}: row {index} needs question, and tests or inputs, outputs")
        return Sample([{"role": "user", "content": PROMPT.format(row["question"])}], row)


def strip_lines(text: str) -> list[str]:
    """The lines of a text without trailing white space or outer blank lines."""
    return [line.rstrip() for line in text.strip().splitlines()]


def prints(program: str, given: str, expected: str) -> bool:
    """Whether a program prints what it should, up to white space."""
    return strip_lines(run_python(program, SECONDS, given)) == strip_lines(expected)


def passes(program: str, test: str) -> bool:
    """Whether a test line passes after the program, which cannot guess the word printed after it."""
    word = secrets.token_hex(16)
    return run_python(f"{program}\n{test}\nprint({word!r})", SECONDS).rstrip().endswith(word)


async def reward_fn(sample: Sample) -> float:
    """1 if the last program passes all tests, which run concurrently."""
    programs = PROGRAM.findall(sample.text)
    row = sample.row
    if not programs:
        return 0.0
    if row.get("tests"):
        jobs = [asyncio.to_thread(passes, programs[-1], test) for test in row["tests"]]
    else:
        jobs = [asyncio.to_thread(prints, programs[-1], *case) for case in zip(row["inputs"], row["outputs"])]
    passed = await asyncio.gather(*jobs)
    sample.metrics["tests_passed"] = sum(passed) / len(passed)
    return float(all(passed))


if __name__ == "__main__":
    main(dataset=CodeDataset, reward_fn=reward_fn)
