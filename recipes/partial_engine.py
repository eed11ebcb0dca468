"""Engines for recipes/partial_rollouts.py: requests that can be stopped, and continued with other weights."""

import asyncio
import time

import numpy as np


class PartialEngine:
    """An engine whose training rollout can be stopped. A later one continues each turn, found by its seed."""

    def __init__(self, engine):
        self.engine = engine
        self.turns = {}  # seed -> a turn in JSON: prompt, id, logprob, version, truncated (None: unfinished)
        self.is_playing = False  # a training rollout; all else goes straight to the engine
        self.is_stopping = False
        self.requests = set()
        self.busy_seconds = 0.0  # of the last training rollout's requests, added up
        self.slot_seconds = 0.0  # of its episodes, if each had always had a request

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    @property
    def version(self) -> int:
        return self.engine.version

    @version.setter
    def version(self, value: int):
        self.engine.version = value

    async def generate(self, ids, temperature: float, seed: int, max_new_tokens: int):
        """As the engine's generate, with a version per token. A turn that is stopped never returns."""
        if not self.is_playing:
            return await self.engine.generate(ids, temperature, seed, max_new_tokens)
        prompt = np.asarray(ids).tolist()
        turn = self.turns.get(seed)
        if turn is None or turn["prompt"] != prompt:
            turn = {"prompt": prompt, "id": [], "logprob": [], "version": [], "truncated": None}
        if turn["truncated"] is None and not self.is_stopping:
            request = asyncio.ensure_future(self.extend(turn, temperature, seed, max_new_tokens))
            self.requests.add(request)
            request.add_done_callback(self.requests.discard)
            turn = await request
        if turn["truncated"] is None:
            await asyncio.Future()  # until stop cancels the episode
        return np.array(turn["id"]), np.array(turn["logprob"]), np.array(turn["version"]), turn["truncated"]

    async def extend(self, turn: dict, temperature: float, seed: int, limit: int) -> dict:
        """Samples the rest of a turn, or the part until the engine is stopped, and remembers it."""
        start = time.perf_counter()
        ids = np.array(turn["prompt"] + turn["id"], np.int32)
        answer = await self.sample(ids, temperature, seed, limit, len(turn["id"]))
        new_ids, logprobs, version, truncated = answer
        new = {"id": list(map(int, new_ids)), "logprob": list(map(float, logprobs))}
        new["version"] = [version] * len(new_ids)
        turn = turn | {name: turn[name] + values for name, values in new.items()}
        is_aborted = self.is_stopping and truncated and len(turn["id"]) < limit
        self.turns[seed] = turn | {"truncated": None if is_aborted else bool(truncated)}
        self.busy_seconds += time.perf_counter() - start
        return self.turns[seed]

    def start(self, episodes: int):
        """Begins a training rollout of so many episodes."""
        self.is_playing = True
        self.is_stopping = False
        self.episodes = episodes
        self.begun = time.perf_counter()
        self.busy_seconds = 0.0

    async def stop(self, tasks: list[asyncio.Future]):
        """Ends all requests, whose tokens stay in `turns`, and then the tasks that are not done."""
        self.is_stopping = True
        while self.requests:
            self.abort()  # again and again: SGLang does not know a request yet that is on its way to it
            await asyncio.wait(self.requests, timeout=0.1)
        self.slot_seconds = self.episodes * (time.perf_counter() - self.begun)
        self.is_playing = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PartialLocal(PartialEngine):
    """The local engine. All episodes decode in one wave, because a second wave would wait for the first."""

    def start(self, episodes: int):
        super().start(episodes)
        self.engine.wave_size = max(self.engine.wave_size, episodes)

    async def sample(self, ids, temperature: float, seed: int, limit: int, done: int):
        """Samples up to `limit` tokens of a turn, of which `done` are at the end of `ids`."""
        return await self.engine.generate(ids, temperature, seed, limit - done, done)

    def abort(self):
        self.engine.abort()


class Aborted(RuntimeError):
    """SGLang ended a request early."""

    def __init__(self, info: dict):
        super().__init__(f"SGLang aborted a request: {info['finish_reason']}")
        # The last token is sampled again: SGLang reports an abort even where it was the stop id.
        self.tokens = info.get("output_token_logprobs", [])[:-1]


class AbortingSGLang:
    """An sglang.Engine that raises Aborted with the tokens of a request that it aborts."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    async def async_generate(self, **request):
        answer = await self.engine.async_generate(**request)
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            raise Aborted(answer["meta_info"])
        return answer


class PartialSGLang(PartialEngine):
    """SGLang beside the actor. In its deterministic mode, seed and position determine a random number."""

    def __init__(self, engine):
        super().__init__(engine)
        if engine.engine:  # only on the first rank of a tensor-parallel group
            engine.engine = AbortingSGLang(engine.engine)

    async def sample(self, ids, temperature: float, seed: int, limit: int, done: int):
        try:
            return await self.engine.generate(ids, temperature, seed, limit - done)
        except Aborted as aborted:
            if not self.is_stopping:
                raise
            ids = [token_id for _, token_id, _ in aborted.tokens]
            logprobs = [logprob for logprob, _, _ in aborted.tokens]
            return ids, logprobs, self.version, True

    def abort(self):
        self.engine.engine.tokenizer_manager.abort_request(abort_all=True)


ENGINES = {"local": PartialLocal, "sglang": PartialSGLang}  # by --engine
