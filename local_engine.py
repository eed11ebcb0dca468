"""The engine for CPUs, and for GPUs without sglang: samples in the trainer's process, from a whole copy of the model.

It has what `SGLangEngine` in train.py has: generate, sleep, push, close, `loop` and `share`. It stands in a file of its
own as SGLang stands in a package of its own: train.py can be read, and forked, without it.
"""
import asyncio

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float):
    """Logits [B, V], uniforms [B] in [0, 1) -> ids [B] by the inverse distribution function, and their log-probs [B].

    A temperature of 0 takes the likeliest id, and gives its log-prob at temperature 1.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


class LocalEngine:
    """Decodes in waves: all the requests that wait, at once, with a key-value cache.

    A request brings its own seed, so that what it gets depends neither on its neighbours nor on the number of ranks.
    """
    wave_size = 256     # sequences decoded at once

    def __init__(self, path: str, tokenizer, mesh, config):
        self.loop, self.waiting, self.server, self.version = asyncio.new_event_loop(), [], None, 0
        self.share = slice(mesh["tp"].get_local_rank(), None, mesh["tp"].size())    # of its group's prompts
        self.device, self.vocab_size, self.max_new_tokens = config.device, len(tokenizer), config.max_new_tokens
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype))
        self.model = model.to(self.device).eval()
        stops = self.model.generation_config.eos_token_id or []
        stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
        self.stops = torch.tensor(sorted(stops), device=self.device)

    async def generate(self, ids: list[int], temperature: float, seed: int, limit: int = 0):
        """Samples one completion of the prompt `ids` from the weights of the last push.

        Returns its ids [T], the stop id included, their log-probs [T], the number of that push [T], and whether it was
        cut off at `limit` tokens, by default max_new_tokens.
        """
        future = self.loop.create_future()
        self.waiting.append(((temperature, limit or self.max_new_tokens), tuple(ids), seed, future))
        if self.server is None or self.server.done():
            self.server = self.loop.create_task(self.serve())
        return await future

    async def serve(self):
        """Decodes wave after wave until nobody waits; an error reaches everyone in its wave."""
        await asyncio.sleep(0)      # whoever is about to ask asks now
        while self.waiting:
            alike = [request for request in self.waiting if request[0] == self.waiting[0][0]]
            others = [request for request in self.waiting if request[0] != self.waiting[0][0]]
            wave, self.waiting = alike[:self.wave_size], alike[self.wave_size:] + others
            kinds, prompts, seeds, futures = zip(*wave)
            try:
                await self.decode(prompts, *kinds[0], seeds, futures)
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    @torch.no_grad()        # here, where nothing is awaited: around a coroutine it would end before the coroutine runs
    def forward(self, ids: torch.Tensor, real: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """New ids [B, t] after those in the cache; real [B, T] is 0 on padding, left. Logits [B, V] of the next id."""
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
        states = self.model.model(ids, attention_mask=real, position_ids=positions, past_key_values=cache,
                                  use_cache=True).last_hidden_state
        return self.model.lm_head(states[:, -1])[:, :self.vocab_size]   # ids beyond the tokenizer's are never sampled

    async def decode(self, prompts, temperature: float, limit: int, seeds, futures):
        """Samples B completions; a prompt that several share is run once, and whoever is finished leaves the batch."""
        unique = list(dict.fromkeys(prompts))
        width, cache = max(map(len, unique)), DynamicCache(config=self.model.config)
        padded = torch.tensor([[-1] * (width - len(ids)) + list(ids) for ids in unique], device=self.device)
        real = (padded >= 0).long()
        logits = self.forward(padded.clamp(min=0), real, cache)
        rows = torch.tensor([unique.index(ids) for ids in prompts], device=self.device)
        logits, real = logits[rows], real[rows]
        cache.batch_select_indices(rows)
        uniforms = torch.stack([torch.rand(limit, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        uniforms = uniforms.to(self.device)
        ids = torch.zeros(len(prompts), limit, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(len(prompts), limit, device=self.device)
        live = torch.arange(len(prompts), device=self.device)       # which completion a row of the batch belongs to
        for t in range(limit):
            token, logprobs[live, t] = sample_tokens(logits, uniforms[live, t], temperature)
            ids[live, t] = token
            stopped = torch.isin(token, self.stops)
            ended = stopped if t < limit - 1 else torch.ones_like(stopped)
            for i, stop in zip(live[ended].tolist(), stopped[ended].tolist()):
                futures[i].set_result((ids[i, :t + 1].tolist(), logprobs[i, :t + 1].tolist(), [self.version] * (t + 1),
                                       not stop))
            rows = (~ended).nonzero()[:, 0]
            if len(rows) == 0:
                return
            if len(rows) < len(live):
                cache.batch_select_indices(rows)
                live, token, real = live[rows], token[rows], real[rows]
            real = F.pad(real, (0, 1), value=1)
            logits = self.forward(token[:, None], real, cache)
            await asyncio.sleep(0)      # meanwhile, rewards and tools of the finished

    def sleep(self):
        """Nothing to release: the cache lives for a wave only."""

    @torch.no_grad()
    def push(self, weights: dict):
        """Takes over sharded weights (DTensors by name), one whole tensor after another; all ranks call it together."""
        self.version += 1
        for name, value in weights.items():
            self.model.get_parameter(name).copy_(value.full_tensor())

    def close(self):
        """Nothing to end: there is no other process."""
