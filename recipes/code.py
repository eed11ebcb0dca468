"""Programs judged by tests: what they print for an input, or what their functions return.

    torchrun --standalone --nproc_per_node=4 -m recipes.code --data problems.jsonl

A row has `question`, and either `inputs` and `outputs`, lists of text (what the program reads and must print, as in
CodeContests and TACO), or `tests`, a list of lines such as "assert add(1, 2) == 3" (as in MBPP). The program is the
last fenced block. Each test runs in a sandbox of its own (tools/sandbox.py), at most 5 seconds; the reward is 1 if all
pass.

What a program prints is compared outside of the sandbox, so no program can claim that it passed. An `assert` runs in
the program's own process, which could find a way to look as if it had: prefer inputs and outputs.
"""
import asyncio
import re
import secrets

from tools.inputs import UserError
from tools.sandbox import run_python
from train import RLDataset, Sample, main

PROMPT = "{}\nWrite a Python program. Put all of it into one block that begins with ```python and ends with ```."
PROGRAM = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
SECONDS = 5.0


class CodeDataset(RLDataset):
    """Rows of problems with tests."""

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        if not row.get("question") or not (row.get("tests") or row.get("inputs") and row.get("outputs")):
            raise UserError(f"{self.source}: row {index} needs question, and inputs and outputs, or tests")
        return Sample([{"role": "user", "content": PROMPT.format(row["question"])}], row)


def prints(program: str, given: str, expected: str) -> bool:
    """Whether a program prints what it should, up to white space at the ends of lines and of all."""
    def tidy(text):
        return [line.rstrip() for line in text.strip().splitlines()]

    return tidy(run_python(program, SECONDS, given)) == tidy(expected)


def passes(program: str, test: str) -> bool:
    """Whether a line of Python passes after the program, which does not know what shows it."""
    word = secrets.token_hex(16)
    return run_python(f"{program}\n{test}\nprint({word!r})", SECONDS).rstrip().endswith(word)


async def reward_fn(sample: Sample) -> float:
    """1 if the last program passes all tests, which run at once."""
    found, row = PROGRAM.findall(sample.text), sample.row
    if not found:
        return 0.0
    if row.get("tests"):
        jobs = [asyncio.to_thread(passes, found[-1], test) for test in row["tests"]]
    else:
        jobs = [asyncio.to_thread(prints, found[-1], *case) for case in zip(row["inputs"], row["outputs"])]
    passed = await asyncio.gather(*jobs)
    sample.metrics["tests_passed"] = sum(passed) / len(passed)
    return float(all(passed))


if __name__ == "__main__":
    main(dataset_class=CodeDataset, reward_fn=reward_fn)
