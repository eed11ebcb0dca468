"""The policy's OpenAI-compatible endpoint, for recipes/agent.py. It keeps tokens exactly as they are sampled.

Each answer is the end of a sequence of tokens. A call whose conversation, as the chat template renders it,
begins with the text of that sequence continues the tokens: only what follows is encoded. If another call has
already done so, the tokens become the context of a new sequence, in which only the new answer is trained.
"""

import asyncio
import secrets
import time
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from recipes import chat_api
from recipes.chat_api import Call, Refusal
from train import Sample, rollout

BODY_BYTES = 2**26  # of the longest request


@dataclass
class Episode:
    """An episode while it is being played."""

    key: tuple[int, int]  # the sample's
    temperature: float
    end: float  # when no further call may begin, on the monotonic clock
    sequences: list[Sample] = field(default_factory=list)
    answers: list[tuple] = field(default_factory=lambda: [("", None, 0)])  # text, sequence, tokens to its end
    written: dict[str, str] = field(default_factory=dict)  # for chat_api.plain_message
    running: set[asyncio.Task] = field(default_factory=set)
    calls: int = 0
    limit: str = ""  # that was reached
    error: Exception | None = None  # of the engine

    def check_limits(self, config):
        """Raises Refusal if no further call may begin."""
        sampled = sum(int(sequence.tokens["mask"].sum()) for sequence in self.sequences)
        is_reached = {"max_calls": self.calls >= config.max_calls}
        is_reached["max_episode_tokens"] = sampled >= config.max_episode_tokens
        is_reached["max_episode_seconds"] = time.monotonic() >= self.end
        for name in filter(is_reached.get, is_reached):
            self.limit = f"this episode has reached --{name} {getattr(config, name)}"
            raise Refusal(403, "episode_limit", self.limit)

    def record(self, draft: Sample, text: str, sequence: Sample | None, length: int):
        """Adds an answer, at the end of a draft, to the sequence of which it continues `length` tokens."""
        if sequence is None or len(sequence.tokens) > length:  # another call has continued it
            sequence = draft
            self.sequences.append(draft)
        else:
            draft.tokens["turn"] = len(sequence.turns)
            sequence.tokens = np.concatenate([sequence.tokens, draft.tokens[length:]])
            sequence.turns += draft.turns
            sequence.truncated |= draft.truncated
        self.answers.append((text, sequence, len(sequence.tokens)))

    def finish(self, sample: Sample):
        """Gives the sample the tokens and turns of all sequences, one after the other."""
        for sequence in self.sequences:
            sequence.tokens["turn"] += len(sample.turns)
            sample.turns += sequence.turns
        sample.truncated = bool(self.limit) or any(sequence.truncated for sequence in self.sequences)
        sample.tokens = np.concatenate([sequence.tokens for sequence in self.sequences])
        sample.cuts = np.cumsum([len(sequence.tokens) for sequence in self.sequences])[:-1]
        sample.metrics |= {"calls": self.calls, "sequences": len(self.sequences)}


class Endpoint:
    """Serves the episodes that are open, each to those who know its key."""

    def __init__(self, engine, tokenizer, config, prompt_limit: int):
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.prompt_limit = prompt_limit
        self.episodes = {}  # by API key

    async def listen(self):
        """Starts to serve, on a free port and for this machine only."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self.respond)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    def open(self, sample: Sample, temperature: float) -> tuple[str, Episode]:
        """Begins an episode; returns its API key, too."""
        key = secrets.token_urlsafe()
        end = time.monotonic() + self.config.max_episode_seconds
        self.episodes[key] = Episode(sample.key, temperature, end)
        return key, self.episodes[key]

    async def close(self, key: str):
        """Ends an episode: its key is no longer valid, and nothing is sampled for it."""
        episode = self.episodes.pop(key)
        if episode.running:  # the engine must be idle before the next push
            await asyncio.wait(episode.running)

    async def respond(self, request: web.Request) -> web.Response:
        """The response to a request, valid or not."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            if key not in self.episodes:
                raise Refusal(
                    401, "invalid_api_key", "the API key is that of no episode, or of one that ended"
                )
            episode = self.episodes[key]
            try:
                body = await request.json()
                call = chat_api.read_call(body, self.tokenizer, episode.written, self.config.max_new_tokens)
            except chat_api.MALFORMED as error:
                raise Refusal(400, "invalid_request", f"malformed request: {error!r}") from error
            episode.check_limits(self.config)
            completion = await self.complete(call, episode, lambda: request.transport is None)
        except Refusal as refusal:
            headers = {"x-should-retry": "false"}
            return web.json_response(refusal.to_json(), status=refusal.args[0], headers=headers)
        if call.is_stream:
            return web.Response(text=chat_api.to_events(completion), content_type="text/event-stream")
        return web.json_response(completion)

    async def complete(self, call: Call, episode: Episode, is_gone) -> dict:
        """Samples the answer to a call, and records it unless the client is gone."""
        known = [answer for answer in episode.answers if call.text.startswith(answer[0])]
        before, sequence, length = max(known, key=lambda answer: len(answer[0]))
        draft = Sample([], {}, key=episode.key)
        if sequence:
            draft.append(sequence.tokens["id"][:length])
        draft.append(self.tokenizer.encode(call.text[len(before) :], add_special_tokens=False))
        start = len(draft.tokens)
        if start > self.prompt_limit:
            episode.limit = f"{start} tokens of prompt and --max_new_tokens do not fit into --model's context"
            raise Refusal(400, "context_length_exceeded", episode.limit)
        await self.generate(draft, call, episode)
        if is_gone() or episode not in self.episodes.values():
            raise Refusal(401, "invalid_api_key", "the client or the episode is gone")
        cut = chat_api.cut_at_stop(draft.tokens["id"][start:], call.stops, self.tokenizer)
        if cut:
            count, draft.turns = cut[0], [cut[1]]
            draft.tokens = draft.tokens[: start + count]
            draft.truncated = False
        draft.tokens["turn"] = 0
        completion = chat_api.to_completion(draft, start, call, episode.written)
        text = call.text + self.tokenizer.decode(draft.tokens["id"][start:])
        episode.record(draft, text, sequence, length)
        return completion

    async def generate(self, draft: Sample, call: Call, episode: Episode):
        """Adds the policy's turn to a draft. An error of the engine becomes the episode's."""
        config = copy(self.config)
        config.max_new_tokens = call.max_tokens
        settings = (self.engine, self.tokenizer, config, episode.temperature, episode.calls)
        episode.calls += 1
        task = asyncio.ensure_future(rollout(draft, *settings))
        episode.running.add(task)
        task.add_done_callback(episode.running.discard)
        try:
            await task
        except Exception as error:
            episode.error = error
            raise Refusal(500, "engine_error", f"the engine failed: {error!r}") from error
