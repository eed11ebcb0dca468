"""The engine for CPUs, and for GPUs without sglang: samples in the trainer's process, from a whole copy of the model.

It has what `SGLangEngine` in train.py has: generate, sleep, push, close, `loop` and `share`. It stands in a file of its
own as SGLang stands in a package of its own: train.py can be read, and forked, without it. The layers are those of
transformers; the cache, the attention to it and the loop around them are made for speed on a CPU.
"""
import asyncio
from itertools import chain

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float):
    """Logits [B, V], uniforms [B] in [0, 1) -> ids [B] by the inverse distribution function, and their log-probs [B].

    A temperature of 0 takes the likeliest id, and gives its log-prob at temperature 1.
    """
    probs = torch.softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return ids[:, 0], probs.gather(1, ids)[:, 0].log()


def attention(module, query, key, value, bias, scaling, **_):
    """Query [B, heads, t, width], key and value [B, fewer heads, T, width] -> [B, t, heads, width].

    The bias [B, 1, t, T], added to the scores, hides what a token must not see. For a single new token the heads that
    share a key stand where positions would, so that no key is repeated for them.
    """
    B, heads, t, width = query.shape
    if t > 1:
        return sdpa_attention_forward(module, query, key, value, bias, scaling=scaling)
    query = query.reshape(B, key.shape[1], -1, width)
    if query.dtype == torch.float32:
        out = (query * scaling @ key.transpose(2, 3) + bias).softmax(-1) @ value
    else:       # slower for one position, but 16-bit scores would be rounded above
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(B, 1, heads, width), None


AttentionInterface.register("local", attention)


class Cache:
    """Keys and values of `length` tokens, in a buffer [2, B, heads, room, width] for each layer.

    The room is little more than the length. This saves memory, and time: a CPU reads short sequences that lie end to
    end twice as fast as those with gaps between them, which is worth a copy every few tokens.
    """

    def __init__(self):
        self.buffers, self.length = [], 0

    def extend(self, t: int):
        """Makes room for t more tokens, which `update` will bring: at first any number, then one by one."""
        self.length += t
        for i, buffer in enumerate(self.buffers):
            if buffer.shape[3] < self.length:       # what fills the new room does not matter
                self.buffers[i] = torch.cat((buffer, buffer[:, :, :, :max(4, self.length // 16)]), dim=3)

    def update(self, keys, values, layer: int):
        """A layer hands over keys and values [B, heads, t, width] of its new tokens, and gets those of all tokens."""
        if layer == len(self.buffers):
            self.buffers.append(keys.new_empty(2, *keys.shape))
        start = self.length - keys.shape[2]
        all_keys, all_values = self.buffers[layer][:, :, :, :self.length]
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def keep(self, rows: torch.Tensor):
        """Leaves only these of the B sequences; one may be named several times."""
        for i, buffer in enumerate(self.buffers):
            self.buffers[i] = buffer.index_select(1, rows)


class LocalEngine:
    """Decodes in waves: all the requests that wait, at once, with a key-value cache.

    A request brings its own seed, so that what it gets depends neither on its neighbours nor on the number of ranks.
    """
    wave_size = 256     # sequences decoded at once

    def __init__(self, path: str, tokenizer, mesh, config):
        self.loop, self.waiting, self.server, self.version = asyncio.new_event_loop(), [], None, 0
        self.share = slice(mesh["tp"].get_local_rank(), None, mesh["tp"].size())    # of its group's prompts
        self.device, self.vocab_size, self.max_new_tokens = config.device, len(tokenizer), config.max_new_tokens
        self.exact = config.dtype == "float32"      # then its log-probs are the actor's, up to the order of sums
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype),
                                                     attn_implementation="local")
        self.model = model.to(self.device).eval()
        stops = self.model.generation_config.eos_token_id or []
        self.stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}

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
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor, cache: Cache) -> torch.Tensor:
        """New ids [B, t] at positions [B, t], after those in the cache -> logits [B, V] of the next id.

        The bias [B, 1, t, T], over all T tokens then in the cache, is 0 where a token may look and very low elsewhere.
        """
        cache.extend(ids.shape[1])
        body = self.model.model
        states = body.embed_tokens(ids)
        rotary = body.rotary_emb(states, positions)
        for layer in body.layers:       # one by one: body(...) would look at masks and options anew for every token
            states = layer(states, attention_mask=bias, position_embeddings=rotary, past_key_values=cache)
        return self.model.lm_head(body.norm(states[:, -1]))[:, :self.vocab_size]    # no ids beyond the tokenizer's

    def prefill(self, prompts):
        """Runs B prompts, equal ones once.

        Returns logits [B, V] of the next ids, positions [B, 1] and bias [B, 1, 1, T] of the last ones, and the cache.
        """
        unique, cache = list(dict.fromkeys(prompts)), Cache()
        width = max(map(len, unique))
        padded = torch.tensor([[-1] * (width - len(ids)) + list(ids) for ids in unique], device=self.device)
        real = padded >= 0
        positions = (real.cumsum(1) - 1).clamp(min=0)
        seen = real[:, None, None] & torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        lowest = torch.finfo(self.model.dtype).min      # -inf would make NaN of padding, which sees nothing
        bias = torch.zeros_like(seen, dtype=self.model.dtype).masked_fill_(~seen, lowest)
        logits = self.forward(padded.clamp(min=0), positions, bias, cache)
        rows = torch.tensor([unique.index(ids) for ids in prompts], device=self.device)
        cache.keep(rows)
        return logits[rows], positions[rows, -1:], bias[rows, :, -1:], cache

    async def decode(self, prompts, temperature: float, limit: int, seeds, futures):
        """Samples B completions. Who is finished gets its future set, and leaves the batch."""
        logits, positions, bias, cache = self.prefill(prompts)
        uniforms = torch.stack([torch.rand(limit, generator=torch.Generator().manual_seed(seed)) for seed in seeds], 1)
        uniforms = uniforms.to(self.device)
        ids, logprobs = [[] for _ in prompts], [[] for _ in prompts]
        batch = list(range(len(prompts)))       # which completion a row belongs to
        for t in range(limit):
            tokens, chances = sample_tokens(logits, uniforms[t], temperature)
            for i, token, chance in zip(batch, tokens.tolist(), chances.tolist()):
                ids[i].append(token)
                logprobs[i].append(chance)
                if token in self.stops or t == limit - 1:
                    futures[i].set_result((ids[i], logprobs[i], [self.version] * (t + 1), token not in self.stops))
            going = [row for row, i in enumerate(batch) if not futures[i].done()]
            if not going:
                return
            if len(going) < len(batch):
                batch, rows = [batch[row] for row in going], torch.tensor(going, device=self.device)
                tokens, positions, bias, uniforms = tokens[rows], positions[rows], bias[rows], uniforms[:, rows]
                cache.keep(rows)
            positions, bias = positions + 1, F.pad(bias, (0, 1))
            logits = self.forward(tokens[:, None], positions, bias, cache)
            await asyncio.sleep(0)      # meanwhile, rewards and tools of the finished

    def sleep(self):
        """Nothing to release: the cache lives for a wave only."""

    @torch.no_grad()
    def push(self, weights):
        """Takes over whole weights, which come as lists of (name, tensor); all ranks call it together."""
        self.version += 1
        for name, value in chain.from_iterable(weights):
            self.model.get_parameter(name).copy_(value)

    def close(self):
        """Ends the wave that is under way, if a rollout was dropped."""
        if self.server and not self.server.done() and not self.loop.is_running():
            self.server.cancel()
            self.loop.run_until_complete(asyncio.wait([self.server]))
