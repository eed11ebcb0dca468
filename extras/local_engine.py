"""The engine for CPUs, and for GPUs without SGLang: samples in the trainer's process, with its own copy.

It offers what `SGLangEngine` in train.py offers: generate, sleep, push, close, `loop` and `local_prompts`.
`abort` ends a rollout early. The layers are those of transformers; the key-value cache, the attention over it
and the decoding loop are written for speed on a CPU.

Sizes: B sequences, t new tokens, T tokens in all, V vocabulary.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float):
    """Inverts the distribution function: logits [B, V], uniforms [B] in [0, 1) -> ids [B], log-probs [B].

    A temperature of 0 selects the most likely id, and returns its log-prob at temperature 1.
    """
    probs = torch.softmax(logits.float() / (temperature or 1.0), dim=-1)  # [B, V]
    if temperature == 0:
        ids = logits.argmax(-1, keepdim=True)  # [B, 1]
    else:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return ids[:, 0], probs.gather(1, ids)[:, 0].log()


def attention(module, query, key, value, bias, scaling, **_):
    """Query [B, heads, t, width], key and value [B, kv_heads, T, width] -> [B, t, heads, width].

    The bias [B, 1, t, T] is added to the scores and masks what a token must not see. For a single new token,
    the heads that share a key take the place of the query positions, so that no key has to be repeated.
    """
    B, heads, t, width = query.shape
    if t > 1:
        return sdpa_attention_forward(module, query, key, value, bias, scaling=scaling)
    query = query.reshape(B, key.shape[1], -1, width)
    if query.dtype == torch.float32:
        out = (query * scaling @ key.transpose(2, 3) + bias).softmax(-1) @ value
    else:  # slower for one position, but the line above would round the scores to 16 bits
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(B, 1, heads, width), None


AttentionInterface.register("local", attention)


class Cache:
    """Keys and values of `length` tokens, in one buffer [2, B, kv_heads, room, width] per attention layer.

    The room is only slightly larger than the length. This saves memory, and time as well: a CPU reads short
    sequences twice as fast when they lie end to end without gaps, which is worth a copy every few tokens.
    Linear-attention layers have states of a fixed size instead, one row per sequence.
    """

    def __init__(self):
        self.buffers = {}
        self.layers = defaultdict(LinearAttentionLayer)  # by number, as transformers' layers look them up
        self.length = 0

    def extend(self, t: int):
        """Makes room for the t tokens that `update` will bring: any number at first, then one at a time."""
        self.length += t
        for i, buffer in self.buffers.items():
            if buffer.shape[3] < self.length:
                room = max(4, self.length // 16)
                anything = buffer[:, :, :, :room]  # the content of the new room does not matter
                self.buffers[i] = torch.cat((buffer, anything), dim=3)

    def update(self, keys, values, layer: int):
        """Stores a layer's new keys and values [B, kv_heads, t, width]; returns those of all tokens."""
        if layer not in self.buffers:
            self.buffers[layer] = keys.new_empty(2, *keys.shape)
        start = self.length - keys.shape[2]
        all_keys, all_values = self.buffers[layer][:, :, :, : self.length]
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def keep(self, rows: torch.Tensor):
        """Keeps only these of the B sequences; a row may be named several times."""
        for i, buffer in self.buffers.items():
            self.buffers[i] = buffer.index_select(1, rows)
        for states in self.layers.values():
            states.reorder_cache(rows)

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        """Whether a linear-attention layer has seen tokens."""
        return self.layers[layer].has_previous_state[state_idx]

    def update_conv_state(self, inputs, layer: int, **options):
        """Stores a layer's last inputs to its convolution; returns them after those before."""
        return self.layers[layer].update_conv_state(inputs, **options)

    def update_recurrent_state(self, states, layer: int):
        """Stores a layer's recurrent states."""
        return self.layers[layer].update_recurrent_state(states)


@dataclass(eq=False)  # comparing arrays does not give a single bool
class Request:
    """A completion to sample, and the future that receives it."""

    ids: np.ndarray  # [T] int32, the prompt
    temperature: float  # the same for all of a wave
    limit: int  # largest number of new tokens
    seed: int
    drawn: int  # random numbers of the seed that earlier parts of the completion have used
    future: asyncio.Future


class LocalEngine:
    """Decodes in waves: all waiting requests at once, with a key-value cache.

    Each request brings its own seed, so that its completion depends neither on its neighbors nor on the
    number of ranks.
    """

    wave_size = 256  # sequences decoded at once

    def __init__(self, path: str, tokenizer, mesh, config):
        self.loop = asyncio.new_event_loop()
        tp = mesh["tp"]
        self.rank, self.ranks = tp.get_local_rank(), tp.size()
        self.vocab_size = len(tokenizer)
        self.version = 0  # pushes so far
        self.device = config.device
        self.max_new_tokens = config.max_new_tokens
        self.waiting = []
        self.is_aborted = False  # whether the running wave ends after its next token
        self.server = None  # the task that decodes the waiting requests
        dtype = getattr(torch, config.dtype)
        found = AutoConfig.from_pretrained(path)
        text = found.get_text_config()
        text.tie_word_embeddings |= found.tie_word_embeddings  # of a vision-language model either has it
        options = {"config": text, "dtype": dtype, "attn_implementation": "local"}
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        self.model = model.to(self.device).eval()
        self.fp32_logits = getattr(config, "fp32_logits", False) and dtype != torch.float32
        stops = self.model.generation_config.eos_token_id or []
        self.stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}

    def local_prompts(self, prompts: list) -> list:
        """The prompts of the tensor-parallel group that this rank plays: every rank its part."""
        return prompts[self.rank :: self.ranks]

    async def generate(
        self, ids, temperature: float, seed: int, max_new_tokens: int | None = None, drawn: int = 0
    ):
        """Samples one completion of the prompt `ids` [T], an int32 array, with the weights of the last push.

        Returns its ids [t] (int32) including the stop id, their log-probs [t] (float32), the version of the
        weights, and whether it was cut off: at `max_new_tokens`, which defaults to --max_new_tokens, or by
        `abort`. If `ids` ends with the first `drawn` tokens of an aborted completion, they continue it.
        """
        prompt = np.ascontiguousarray(ids, np.int32)  # equal prompts have equal bytes
        limit = max_new_tokens or self.max_new_tokens
        request = Request(prompt, temperature, limit, seed, drawn, self.loop.create_future())
        self.waiting.append(request)
        if self.server is None or self.server.done():
            self.server = self.loop.create_task(self.serve())
        return await request.future

    def abort(self):
        """Cuts off all requests: after their next token, or at once if they are still waiting."""
        self.is_aborted = True
        for request in self.waiting:
            if not request.future.done():
                request.future.set_result(
                    (np.zeros(0, np.int32), np.zeros(0, np.float32), self.version, True)
                )
        self.waiting = []

    async def serve(self):
        """Decodes wave after wave until nobody waits; an error reaches everyone in its wave."""
        await asyncio.sleep(0)  # lets requests that are about to come join the first wave
        while self.waiting:
            temperature = self.waiting[0].temperature
            alike = [request for request in self.waiting if request.temperature == temperature]
            others = [request for request in self.waiting if request.temperature != temperature]
            wave = alike[: self.wave_size]
            self.waiting = alike[self.wave_size :] + others
            try:
                await self.decode(wave, temperature)
            except Exception as error:
                for request in wave:
                    if not request.future.done():
                        request.future.set_exception(error)

    @torch.no_grad()  # not around decode: there it would end before the coroutine runs
    def forward(self, ids, positions, bias, cache: Cache, real=None) -> torch.Tensor:
        """Appends new ids [B, t] at positions [B, t] to the cache; returns the logits [B, V] of the next id.

        The bias [B, 1, t, T] over all T tokens then cached is 0 for visible tokens and very low elsewhere.
        Padding must not enter the states of linear-attention layers: `real` [B, t] is False there.
        """
        cache.extend(ids.shape[1])
        body = self.model.model
        states = body.embed_tokens(ids)
        rotary = body.rotary_emb(states, positions)
        for layer in body.layers:  # one by one: body(...) would re-examine masks and options for every token
            mask = real if hasattr(layer, "linear_attn") else bias
            states = layer(states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
        last = body.norm(states[:, -1])
        logits = last.float() @ self.head if self.fp32_logits else self.model.lm_head(last)
        return logits[:, : self.vocab_size]  # leaves out ids beyond the tokenizer's

    def prefill(self, prompts: list[np.ndarray]):
        """Runs B prompts, each distinct one only once.

        Returns the logits [B, V] of the next ids, the positions [B, 1] and the bias [B, 1, 1, T] of the last
        ones, and the cache.
        """
        cache = Cache()
        unique = {}  # bytes of a prompt -> its row
        for ids in prompts:
            unique.setdefault(ids.tobytes(), len(unique))
        width = max(map(len, prompts))
        padded = np.full((len(unique), width), -1, np.int32)
        for content, row in unique.items():
            ids = np.frombuffer(content, np.int32)
            padded[row, width - len(ids) :] = ids
        padded = torch.from_numpy(padded).long().to(self.device)
        real = padded >= 0
        positions = (real.cumsum(1) - 1).clamp(min=0)
        seen = real[:, None, None] & torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        lowest = (
            torch.finfo(self.model.dtype).min / 2
        )  # -inf would turn padding, which sees no token, into NaN
        bias = torch.zeros_like(seen, dtype=self.model.dtype).masked_fill_(~seen, lowest)
        logits = self.forward(padded.clamp(min=0), positions, bias, cache, real)
        rows = torch.tensor([unique[ids.tobytes()] for ids in prompts], device=self.device)
        cache.keep(rows)
        return logits[rows], positions[rows, -1:], bias[rows, :, -1:], cache

    async def decode(self, wave: list[Request], temperature: float):
        """Samples B completions. A finished one resolves its future and leaves."""
        self.is_aborted = False
        logits, positions, bias, cache = self.prefill([request.ids for request in wave])
        limits = np.array([request.limit for request in wave])  # [B]
        limit = limits.max()
        uniforms = uniforms_of(wave, limit).to(self.device)  # [limit, B]
        all_ids = np.empty((len(wave), limit), np.int32)
        all_logprobs = np.empty((len(wave), limit), np.float32)
        batch = np.arange(len(wave))  # which request each row belongs to
        stops = [stop for stop in self.stops if stop is not None]
        is_stop = np.isin(np.arange(self.vocab_size), stops)  # [V]
        for t in range(limit):
            tokens, logprobs = sample_tokens(logits, uniforms[t], temperature)
            new_ids = tokens.cpu().numpy()
            all_ids[batch, t] = new_ids
            all_logprobs[batch, t] = logprobs.cpu().numpy()
            stopped = is_stop[new_ids]
            finished = stopped | (t == limits[batch] - 1) | self.is_aborted
            if finished.any():
                for row in finished.nonzero()[0]:
                    i = batch[row]
                    own_ids = all_ids[i, : t + 1].copy()  # a view would keep the whole wave in memory
                    own_logprobs = all_logprobs[i, : t + 1].copy()
                    if not wave[i].future.done():  # cancelled
                        answer = (own_ids, own_logprobs, self.version, not stopped[row].item())
                        wave[i].future.set_result(answer)
                going = (~finished).nonzero()[0]
                if len(going) == 0:
                    return
                batch = batch[going]
                rows = torch.from_numpy(going).to(self.device)
                cache.keep(rows)
                tokens = tokens[rows]
                positions = positions[rows]
                bias = bias[rows]
                uniforms = uniforms[:, rows]
            positions = positions + 1
            bias = F.pad(bias, (0, 1))
            logits = self.forward(tokens[:, None], positions, bias, cache)
            await asyncio.sleep(0)  # meanwhile, finished episodes run their rewards and tools

    def sleep(self):
        """Does nothing: the cache lives only as long as a wave."""

    @torch.no_grad()
    def push(self, buckets):
        """Copies whole weights, which arrive in buckets: lists of (name, tensor). All ranks must call it."""
        self.version += 1
        for bucket in buckets:
            for name, value in bucket:
                self.model.get_parameter(name).copy_(value)
        if self.fp32_logits:
            self.head = self.model.lm_head.weight.T.float()

    def close(self):
        """Cancels a wave that is still running because its rollout was dropped."""
        if self.server and not self.server.done() and not self.loop.is_running():
            self.server.cancel()
            self.loop.run_until_complete(asyncio.wait([self.server]))


Engine = LocalEngine  # the name by which train.py finds it


def uniforms_of(wave: list[Request], count: int) -> torch.Tensor:
    """The next `count` uniform numbers of each of B requests, [count, B]."""
    generator = torch.Generator()
    columns = []
    for request in wave:
        generator.manual_seed(request.seed)
        columns.append(torch.rand(request.drawn + count, generator=generator)[request.drawn :])
    return torch.stack(columns, 1)
