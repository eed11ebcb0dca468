"""OpenAI's chat format, for recipes/agent.py: requests, tool calls, completions, streams.

Ignored are settings that would change the policy (temperature, top_p, penalties, seed, tool_choice), and all
that are not named here. Refused are n above 1, logit_bias, logprobs and response_format.
"""

import json
import re
import secrets
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

from jinja2 import TemplateError

from train import Sample, encode_prompt

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
REFUSED = {"n": 1, "logit_bias": {}, "logprobs": False, "response_format": {"type": "text"}}  # unless so
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)  # Qwen's format, from Hermes
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, TemplateError)


class Refusal(Exception):
    """An error for the client: HTTP status, code, message."""

    def to_json(self) -> dict:
        _, code, message = self.args
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@dataclass
class Call:
    """A request to /v1/chat/completions."""

    text: str  # the conversation, up to the policy's turn
    max_tokens: int  # of the answer
    stops: list[str]
    has_tools: bool
    model: str
    is_stream: bool


# ---- Requests --------------------------------------------------------------------------------------------
def identity(content: str, tool_calls: list[dict]) -> str:
    """A message with tool calls, as a key; a client may write the JSON of the arguments in another way."""
    parts = [content]
    for call in tool_calls:
        function = call["function"]
        parts.append([call["id"], function["name"], json.loads(function["arguments"])])
    return json.dumps(parts, sort_keys=True)


def plain_message(message: dict, written: dict[str, str]) -> dict:
    """A client's message for the chat template; tool calls of the policy are as it wrote them."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    plain = {"role": ROLES[message["role"]], "content": content}
    tool_calls = message.get("tool_calls")
    if not tool_calls:
        return plain
    own = written.get(identity(content, tool_calls))
    if own is not None:
        return plain | {"content": own}
    functions = [call["function"] for call in tool_calls]
    functions = [
        one | {"arguments": json.loads(one["arguments"])} for one in functions
    ]  # as templates expect
    return plain | {"tool_calls": [{"type": "function", "function": one} for one in functions]}


def chat_text(tokenizer, messages: list[dict], tools: list[dict] | None) -> str:
    """A conversation up to the policy's turn. No text in it can forge a special token."""

    def apply_chat_template(chat, **_):
        messages, tools = chat
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        return tokenizer.apply_chat_template(messages, **options)

    special = tokenizer.added_tokens_decoder
    renderer = SimpleNamespace(added_tokens_decoder=special, apply_chat_template=apply_chat_template)
    return encode_prompt(renderer, [messages, tools])


def read_call(body: dict, tokenizer, written: dict[str, str], most: int) -> Call:
    """A request of at most `most` tokens. Raises Refusal, or one of MALFORMED."""
    for name, harmless in REFUSED.items():
        if body.get(name) not in (None, harmless):
            raise Refusal(400, "unsupported_value", f"{name} {body[name]} is not supported")
    tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
    if tools and "tools" not in tokenizer.get_chat_template():
        raise Refusal(400, "unsupported_value", "tools: the chat template of --model does not show them")
    messages = [plain_message(message, written) for message in body["messages"]]
    text = chat_text(tokenizer, messages, tools)
    text.encode()  # raises ValueError for a lone surrogate
    max_tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or most)
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens}")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else [stop for stop in stops if len(stop) > 0]
    options = {
        "has_tools": bool(tools),
        "model": str(body.get("model")),
        "is_stream": bool(body.get("stream")),
    }
    return Call(text, min(max_tokens, most), stops, **options)


# ---- Answers ---------------------------------------------------------------------------------------------
def cut_at_stop(ids, stops: list[str], tokenizer) -> tuple[int, str] | None:
    """Where an answer ends that stops at `stops`: its number of ids, and the text before; None: it goes on.

    The id that completes a stop string is the last, as in an engine that stops there.
    """

    def places(count: int) -> list[int]:
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        return [text.find(stop) for stop in stops if stop in text]

    if not places(len(ids)):
        return None
    count = bisect_left(range(len(ids)), True, key=lambda count: bool(places(count)))
    return count, tokenizer.decode(ids[:count], skip_special_tokens=True)[: min(places(count))]


def read_tool_calls(text: str) -> list[dict]:
    """The tool calls in an answer; none if one is malformed."""
    calls = []
    for found in TOOL_CALL.findall(text):
        with suppress(*MALFORMED):
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(dict(call["arguments"]))}
            calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return calls if len(calls) == text.count("<tool_call>") else []


def to_completion(answer: Sample, start: int, call: Call, written: dict[str, str]) -> dict:
    """A turn, from token `start` on, as a chat completion. Its tool calls are added to `written`."""
    (text,) = answer.turns
    message = {"role": "assistant", "content": text}
    tool_calls = read_tool_calls(text) if call.has_tools else []
    reason = "length" if answer.truncated else "stop"
    if tool_calls:
        content = text.split("<tool_call>")[0].strip()
        written[identity(content, tool_calls)] = text
        message |= {"content": content or None, "tool_calls": tool_calls}
        reason = "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    total = len(answer.tokens)
    usage = {"prompt_tokens": start, "completion_tokens": total - start, "total_tokens": total}
    shared = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "model": call.model}
    return shared | {"created": int(time.time()), "choices": [choice], "usage": usage}


def to_events(completion: dict) -> str:
    """A completion as a stream of server-sent events: the first one has the whole answer."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
    chunk = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
    event = completion | {"object": "chat.completion.chunk", "choices": [chunk]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
