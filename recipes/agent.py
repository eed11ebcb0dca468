"""Agents that someone else wrote: they call the policy through an OpenAI-compatible endpoint.

    pip install aiohttp openai
    python -m tools.make_start guesser --output runs/guesser
    torchrun --standalone --nproc_per_node=2 -m recipes.agent --model runs/guesser --device cpu --algo rebn \\
        --gamma 0.9 --steps 40 --prompts_per_step 32 --updates_per_step 4 --max_new_tokens 8 --lr 1e-3

An agent is an async function (sample, base_url, api_key), passed to main in place of an env_step; or, with
--agent, a command that finds both in OPENAI_BASE_URL and OPENAI_API_KEY, and its task as JSON on stdin. Its
stdout becomes sample.state["output"]. It calls /v1/chat/completions with any client, also several times at
once. The example is recipes/guess_number.py, played with the library openai.

Tokens are trained exactly as they were sampled, each once (recipes/endpoint.py). A call that extends an
earlier conversation continues its tokens; any other one begins a new sequence of the episode. All sequences
have the episode's reward and advantage, and together count as one sample in the loss. Beyond a limit, calls
get error 403; an agent that then raises is scored all the same, as truncated. recipes/chat_api.py lists the
settings of a request that are ignored or refused.
"""

import asyncio
import json
import os
import shlex
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from subprocess import PIPE

import numpy as np

from recipes.algorithms import AlgorithmConfig
from recipes.guess_number import Secrets, guess_of, reward_fn
from recipes.trainer import AlgorithmTrainer
from train import Sample, UserError, flag, main

GRACE = 5.0  # seconds in which an agent may end after its last call


@dataclass
class AgentConfig(AlgorithmConfig):
    """The flags of recipes/algorithms.py, and an agent's."""

    agent: str = flag("", "command of an agent; empty: the function that is passed to main")
    max_calls: int = flag(16, "calls per episode")
    max_episode_tokens: int = flag(16384, "sampled tokens of an episode after which no further call begins")
    max_episode_seconds: float = flag(600.0, "seconds of an episode after which no further call begins")

    def __post_init__(self):
        super().__post_init__()
        if self.max_turns > 1:
            raise UserError(f"--max_turns {self.max_turns} has no effect on agents: set --max_calls")
        for name in ("max_calls", "max_episode_tokens", "max_episode_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} must be above 0, not {getattr(self, name)}")


async def run_command(command: str, sample: Sample, base_url: str, api_key: str):
    """Runs an agent that is a program. Raises ValueError if it fails."""
    environment = os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    options = {"stdin": PIPE, "stdout": PIPE, "env": environment, "start_new_session": True}
    process = await asyncio.create_subprocess_exec(*shlex.split(command), **options)
    task = json.dumps({"messages": sample.messages, "row": sample.row}, default=str)
    try:
        output, _ = await process.communicate(task.encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
    sample.state["output"] = output.decode(errors="replace")
    if process.returncode:
        raise ValueError(f"--agent {command} exited with code {process.returncode}")


class AgentTrainer(AlgorithmTrainer):
    """A Trainer whose episodes are played by agents."""

    def __init__(self, config, dataset_class, reward_fn, agent):
        agent = partial(run_command, config.agent) if config.agent else agent
        super().__init__(config, dataset_class, reward_fn, agent)
        from recipes.endpoint import Endpoint  # if aiohttp is missing, main says so in one line

        self.endpoint = Endpoint(self.engine, self.tokenizer, config, self.prompt_limit)
        self.engine.loop.run_until_complete(self.endpoint.listen())

    async def play(self, sample: Sample, temperature: float):
        """Lets the agent play. Its error fails the sample, unless it came from a limit."""
        key, episode = self.endpoint.open(sample, temperature)
        timer = asyncio.timeout(self.config.max_episode_seconds + GRACE)
        try:
            async with timer:
                await self.env_step(sample, self.endpoint.base_url, key)
        except Exception:
            if not (episode.error or episode.limit or timer.expired()):
                raise
        finally:
            await self.endpoint.close(key)
        if episode.error or not episode.sequences:
            raise episode.error or ValueError("the agent got no answer from the policy")
        episode.finish(sample)
        sample.truncated |= timer.expired()

    def pack(self, samples: list[Sample]) -> list:
        """Micro-batches of all sequences. Their tokens are views of the samples', which have the weights."""
        sequences = []
        for sample in samples:
            parts = np.split(sample.tokens, sample.cuts)
            for i, tokens in enumerate(parts):
                sequences.append(Sample([], {}, tokens, key=(*sample.key, i)) if len(parts) > 1 else sample)
        return super().pack(sequences)


# ---- The example -----------------------------------------------------------------------------------------
@cache
def client():
    """One for all episodes, because it is slow to make."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(api_key="each episode has its own")


async def agent(sample: Sample, base_url: str, api_key: str):
    """Guesses the secret number of a row."""
    chat = client().with_options(base_url=base_url, api_key=api_key).chat
    messages = list(sample.messages)
    secret = sample.row["secret"]
    for _ in range(8):
        completion = await chat.completions.create(model="policy", messages=messages)
        text = completion.choices[0].message.content
        guess = guess_of(text)
        if guess == secret:
            return
        reply = "a number" if guess is None else "higher" if guess < secret else "lower"
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": reply})


if __name__ == "__main__":
    main(AgentConfig, Secrets, reward_fn, agent, AgentTrainer)
