"""Tests of extras/servers.py. One with the real SGLang runs this file as a script under torchrun."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from extras import servers as extra
from extras.servers import Server, ServerEngine, parse_response, parse_urls
from recipes.distill import DistillConfig
from recipes.teacher import TeacherServers
from recipes.trainer import add_column
from tests.conftest import TINY, Config, run
from tests.real_sglang import ON_CPU, SGLANG_ENVIRONMENT, STUBS, wait_for
from train import Sample, UserError

CPU = Config(device="cpu", dtype="float32", engine="local")


# ---- The flag ----------------------------------------------------------------------------
WRONG = ("localhost:30000", "http://a:1,", "http://a:99999", "http://:30000")


@pytest.mark.parametrize(
    "engine, message",
    [
        *((url, "--engine must be sglang, local or http://host:port") for url in WRONG),
        ("http://a:1,http://a:1/", "--engine names a server twice"),
        ("http://me:word@a:1", "--engine holds a user or a password"),
    ],
)
def test_the_flag(engine, message):
    urls = parse_urls("http://a:1, https://b/,http://[::1]:30000")
    assert urls == ["http://a:1", "https://b", "http://[::1]:30000"]
    with pytest.raises(UserError, match=message) as error:
        parse_urls(engine)
    assert "word@" not in str(error.value)


# ---- Responses ---------------------------------------------------------------------------
RESPONSE = {
    "meta_info": {
        "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]],
        "completion_tokens": 2,
        "finish_reason": {"type": "length"},
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 1, "end": 2}],
    }
}
ABORTED = {"meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}}


def test_a_response_by_hand():
    ids, logprobs, versions, truncated = parse_response(RESPONSE, version=3)
    assert (ids, versions, truncated) == ([7, 8], [3, 4], True)
    assert logprobs[0] == -0.5 and math.isnan(logprobs[1])
    empty = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [], "completion_tokens": 0}
    assert parse_response({"meta_info": empty}, version=3) == ([], [], [], False)


@pytest.mark.parametrize(
    "change",
    [
        {"output_token_logprobs": [[-0.5, 7, None]]},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [7, 8]},
        {"output_token_logprobs": [["a", 7], [-1, 8]]},
        {"finish_reason": None},
        {"finish_reason": {}},
        {"weight_versions": 3},
        {"weight_versions": [{"version": "4", "start": 1, "end": 3}]},
        {"completion_tokens": None},
        None,
    ],
)
def test_a_malformed_response_is_a_lost_connection(change):
    response = {} if change is None else {"meta_info": RESPONSE["meta_info"] | change}
    with pytest.raises(ConnectionError, match="malformed response from SGLang"):
        parse_response(response, version=3)
    with pytest.raises(UserError, match="SGLang aborted a request: too long"):
        parse_response(ABORTED, version=3)


# ---- Balancing and failover, with pretended servers --------------------------------------
@pytest.fixture
def make_engine(mesh, monkeypatch):
    """Makes an engine on pretended servers: {url: its responses or errors in turn, the last one forever}."""
    monkeypatch.setattr(extra, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(extra, "FLUSH_SECONDS", 0.001)

    async def connect(self):
        self.group_name = "a group"

    monkeypatch.setattr(Server, "connect", connect)

    def make(script: dict[str, list]) -> ServerEngine:
        engine = start_engine(",".join(script), mesh)
        engine.calls = []

        async def post(self, path, **payload):
            engine.calls.append((self.url, path, payload))
            await asyncio.sleep(0.01)
            responses = script[self.url]
            response = responses.pop(0) if len(responses) > 1 else responses[0]
            if isinstance(response, Exception):
                raise response
            return response

        monkeypatch.setattr(Server, "post", post)
        return engine

    return make


def start_engine(urls: str, mesh, engine_timeout: float = 60) -> ServerEngine:
    """A ServerEngine for the tiny model."""
    config = SimpleNamespace(engine=urls, engine_timeout=engine_timeout, device="cpu", max_new_tokens=64)
    return ServerEngine(str(TINY), AutoTokenizer.from_pretrained(TINY), mesh, config)


def generate(engine: ServerEngine, count: int = 1, **options) -> list:
    """Completions, or the errors in their place, of `count` requests at once."""

    async def generate_all():
        requests = [engine.generate(np.array([5, 6, 7], np.int32), 1.0, i, **options) for i in range(count)]
        return await asyncio.gather(*requests, return_exceptions=True)

    return engine.loop.run_until_complete(generate_all())


A = "http://a:1"
B = "http://b:1"
RESTARTED = {"meta_info": RESPONSE["meta_info"] | {"weight_version": "default"}}


def test_a_request_says_all_that_sampling_depends_on(make_engine):
    engine = make_engine({A: [RESPONSE]})
    engine.version = 3
    assert generate(engine)[0][2] == [3, 4]
    (url, path, payload), *_ = engine.calls
    eos = AutoTokenizer.from_pretrained(TINY).eos_token_id
    assert (url, path, payload["input_ids"], payload["return_logprob"]) == (A, "generate", [5, 6, 7], True)
    expected = {"temperature": 1.0, "sampling_seed": 0, "max_new_tokens": 64, "stop_token_ids": [eos]}
    expected |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert payload["sampling_params"] == expected
    generate(engine, max_new_tokens=5)
    assert engine.calls[-1][2]["sampling_params"]["max_new_tokens"] == 5


def test_requests_are_balanced(make_engine):
    engine = make_engine({A: [RESPONSE], B: [RESPONSE]})
    generate(engine, count=6)
    assert [url for url, *_ in engine.calls] == [A, B, A, B, A, B]
    assert [server.open_requests for server in engine.servers] == [0, 0]


@pytest.mark.parametrize(
    "responses, calls, failure",
    [
        ([ConnectionError("cut"), {}, RESPONSE], 3, ""),
        ([ConnectionError("cut")], 3, "cut"),
        ([{}], 3, "malformed response from SGLang"),
        ([TimeoutError(f"{A} was silent")], 1, "was silent"),
        ([RESTARTED], 1, f"{A} has weights that this run did not push; was it restarted?"),
    ],
)
def test_no_sample_is_lost_with_a_server(make_engine, responses, calls, failure):
    engine = make_engine({A: list(responses), B: [RESPONSE]})
    completions = generate(engine)
    assert [url for url, *_ in engine.calls] == [A] * calls + [B] * bool(failure)
    assert [server.url for server in engine.alive] == ([B] if failure else [A, B])
    assert failure in engine.servers[0].failure
    engine = make_engine({A: list(responses), B: [RESPONSE]})
    completions += generate(engine, count=6)
    assert all(completion[0] == [7, 8] for completion in completions)


def test_without_servers_the_error_says_why(make_engine):
    engine = make_engine({A: [TimeoutError("a was silent")], B: [TimeoutError("b was silent")]})
    (error,) = generate(engine)
    message = "no SGLang server is left: a was silent; b was silent"
    assert isinstance(error, UserError) and str(error) == message
    with pytest.raises(UserError, match=message):
        engine.push(iter([]))


@pytest.mark.parametrize("response", [UserError("refused generate: too long"), ABORTED])
def test_what_one_server_refuses_is_not_asked_of_another(make_engine, response):
    engine = make_engine({A: [response], B: [response]})
    (error,) = generate(engine)
    assert isinstance(error, UserError) and "too long" in str(error)
    assert len(engine.alive) == 2 and len(engine.calls) == 1


# ---- A push, with pretended servers ------------------------------------------------------
def push(engine: ServerEngine, monkeypatch) -> list[str]:
    """Pushes two buckets; returns the calls to the first server."""
    monkeypatch.setattr(extra.dist, "broadcast", lambda flat, src, group: None)
    engine.push(iter([[("a", torch.ones(2, 3))], [("b", torch.ones(4, dtype=torch.bfloat16))]]))
    return [path for url, path, _ in engine.calls if url == engine.servers[0].url]


def test_a_push_by_hand(make_engine, monkeypatch):
    engine = make_engine({A: [{"success": True}], B: [{"success": True}]})
    update = "update_weights_from_distributed"
    expected = ["pause_generation", "begin_weight_update", update, update, "end_weight_update"]
    assert push(engine, monkeypatch) == [*expected, "flush_cache", "continue_generation"]
    payloads = [payload for url, path, payload in engine.calls if url == A]
    assert payloads[0] == {"mode": "retract"} and engine.version == 1
    bucket = {"names": ["b"], "shapes": [[4]], "dtypes": ["bfloat16"], "weight_version": "1"}
    bucket |= {"load_format": "flattened_bucket", "flush_cache": False, "group_name": "a group"}
    assert payloads[3] == bucket


def test_a_busy_server_is_flushed_later(make_engine, monkeypatch):
    busy = UserError("busy")
    engine = make_engine({A: [{}, {}, {}, {}, {}, busy, busy, {}]})
    assert push(engine, monkeypatch)[-4:] == ["flush_cache"] * 3 + ["continue_generation"]
    monkeypatch.setattr(extra, "FLUSH_ATTEMPTS", 3)
    engine = make_engine({A: [{}, {}, {}, {}, {}, busy], B: [{}]})
    push(engine, monkeypatch)
    assert "still busy" in engine.servers[0].failure and [server.url for server in engine.alive] == [B]


def test_a_server_that_dies_during_a_push_is_left_behind(make_engine, monkeypatch, capsys):
    engine = make_engine({A: [{}, {}, {}, ConnectionError("a is gone")], B: [{}]})
    push(engine, monkeypatch)
    assert [server.url for server in engine.alive] == [B]
    assert capsys.readouterr().out.count(f"continuing without {A}: a is gone") == 1
    push(engine, monkeypatch)
    assert "continuing" not in capsys.readouterr().out  # said once


def test_a_server_that_refuses_a_push_ends_the_run(make_engine, monkeypatch):
    with pytest.raises(UserError, match="refused pause_generation"):
        push(make_engine({A: [UserError(f"{A} refused pause_generation")]}), monkeypatch)


# ---- The real SGLang ---------------------------------------------------------------------
def is_ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two SGLang servers that somebody else started: {url: process}, each a process group of its own."""
    flags = "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch"
    flags += " --grammar-backend none --disable-cuda-graph --max-total-tokens 32768 --skip-tokenizer-init"
    flags += " --sleep-on-idle"
    started = {}
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", TINY, "--port", str(port)]
        log = (tmp_path_factory.mktemp("server") / "log").open("w")
        options = {"env": SGLANG_ENVIRONMENT, "stdout": log, "stderr": log, "start_new_session": True}
        started[f"http://127.0.0.1:{port}"] = subprocess.Popen(command + flags.split(), **options)
    for url, process in started.items():
        wait_for(lambda: is_ready(url), process)
    yield started
    for process in started.values():
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def real_sglang(monkeypatch):
    """Lets this process import sglang on a CPU."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.syspath_prepend(STUBS)


@pytest.mark.sglang
def test_servers_agree_with_the_actor(tmp_path, servers):
    flags = "--prompts_per_step 8 --group_size 4 --max_new_tokens 64 --lr 1e-4 --eval_every 0 --steps 4"
    command = ["train.py", *flags.split(), "--engine", ",".join(servers), "--output_dir", tmp_path]
    done = run(*command, processes=2, timeout=400, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    history = [record for record in history if "logprob_diff" in record]
    assert len(history) == 4
    assert all(record["logprob_diff"] < 1e-6 for record in history)


@pytest.mark.sglang
def test_a_push_may_come_in_the_middle_of_a_completion(servers, mesh, real_sglang):
    """Compares each log-prob with that of the weights that the token claims to come from, and the others."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    weights = dict(model.named_parameters())
    old = {name: value.detach().clone() for name, value in weights.items()}
    new = {name: 0.5 * value for name, value in old.items()}
    engine = start_engine(next(iter(servers)), mesh)
    engine.sampling |= {"ignore_eos": True, "stop_token_ids": []}
    engine.push(iter([list(old.items())]))
    threading.Thread(target=engine.loop.run_forever, daemon=True).start()
    prompts = [[5, 6, 7, 8 + i] for i in range(8)]
    requests = [engine.generate(np.array(ids), 1.0, 0, 900) for ids in prompts]
    futures = [asyncio.run_coroutine_threadsafe(request, engine.loop) for request in requests]
    time.sleep(0.7)
    engine.push(iter([list(new.items())]))
    completions = [future.result() for future in futures]
    assert sum(len(set(completion[2])) == 2 for completion in completions) > 4
    for version, values in ((1, old), (2, new)):
        model.load_state_dict(values, strict=False)
        for prompt, (ids, logprobs, versions, _) in zip(prompts, completions):
            expected = token_logprobs(model, prompt, ids)
            diff = (torch.tensor(logprobs) - expected).abs()
            is_own = torch.tensor(versions) == version
            assert is_own.sum() > 20 and diff[is_own].mean() < 1e-4
            assert diff[~is_own].mean() > 1e-2
    engine.close()
    engine.loop.call_soon_threadsafe(engine.loop.stop)


@torch.no_grad()
def token_logprobs(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probs [t] of ids [t] after a prompt."""
    whole = torch.tensor([*prompt, *ids])
    logprobs = torch.log_softmax(model(whole[None, :-1]).logits[0], -1)
    return logprobs.gather(1, whole[1:, None])[len(prompt) - 1 :, 0]


@pytest.mark.sglang
def test_servers_score_the_tokens_of_a_student(servers, columns):
    """For recipes/distill.py: the log-probs are the model's, and the server names its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = DistillConfig(model=str(TINY), teacher=",".join(servers), engine="local", device="cpu")
    add_column("teacher_logprob")
    teacher = TeacherServers(config)
    samples = [Sample([], {}) for _ in range(4)]
    prompt = [5, 6, 7]
    for i, sample in enumerate(samples):
        sample.append(prompt)
        sample.append(range(20 + i, 60), mask=1)

    async def score():
        await teacher.check(config)
        for server in teacher.servers:  # other tests have pushed other weights
            await server.post("update_weights_from_disk", model_path=str(TINY))
        await asyncio.gather(*[teacher.score(sample) for sample in samples])
        await teacher.close()

    asyncio.run(score())
    for sample in samples:
        found = torch.from_numpy(sample.tokens["teacher_logprob"].copy())
        expected = token_logprobs(model, prompt, sample.tokens["id"][3:].tolist())
        assert found[:3].tolist() == [0, 0, 0]
        torch.testing.assert_close(found[3:], expected, rtol=0, atol=1e-4)


@pytest.mark.sglang
def test_responses_over_http(servers, mesh, real_sglang):
    """What the real server does with a wrong request, and what a server that is not there is."""
    engine = start_engine(next(iter(servers)), mesh)
    (server,) = engine.servers
    with pytest.raises(UserError, match="refused generate"):
        engine.run_coroutine(server.post("generate", input_ids=[], sampling_params={}))
    with pytest.raises(UserError, match="refused no_such_path"):
        engine.run_coroutine(server.post("no_such_path"))
    engine.close()
    with pytest.raises(UserError, match="--engine http://127.0.0.1:9 cannot be used"):
        start_engine("http://127.0.0.1:9", mesh)


@pytest.mark.sglang
@pytest.mark.parametrize("how", ["STOP", "KILL"])  # the second for good
def test_the_death_of_one_of_two_servers_loses_no_sample(tmp_path, servers, how):
    url, other = servers
    done = run(
        __file__, f"{url},{other}", tmp_path, how, servers[url].pid, processes=2, timeout=400, **ON_CPU
    )
    os.killpg(servers[url].pid, signal.SIGCONT)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        record = json.loads((tmp_path / f"{rank}.json").read_text())
        assert record == {"before": 32, "during": 32, "after": 32, "versions": [1, 2], "alive": [other]}
    said = "was silent for 10 s" if how == "STOP" else ""
    assert done.stdout.count(f"continuing without {url}: {url} {said}") == 1
    assert int(done.stdout.partition("open requests: ")[2].split()[0]) > 4


def completed(results: list) -> list:
    return [result for result in results if not isinstance(result, Exception)]


def worker(urls: str, output: str, how: str, pid: str):
    """Signals the first of two servers in the middle of a rollout, and pushes and samples once more."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    weights = [(name, value.detach()) for name, value in model.named_parameters()]
    mesh = train.init_distributed(CPU)
    engine = start_engine(urls, mesh, engine_timeout=10 if how == "STOP" else 100)
    engine.push(iter([list(weights)]))
    record = {"before": len(generate(engine, 32))}

    def strike():
        server = next(server for server in engine.servers if server.url == urls.split(",")[0])
        while server.open_requests < 12:  # of about 16: some end before the signal
            time.sleep(0.001)
        print(f"open requests: {server.open_requests}", flush=True)
        if how == "STOP":
            os.killpg(int(pid), signal.SIGSTOP)
        else:
            os.kill(int(pid), signal.SIGKILL)

    if dist.get_rank() == 0:
        threading.Thread(target=strike, daemon=True).start()
    during = generate(engine, 32)
    engine.push(iter([weights[:3], weights[3:]]))
    after = generate(engine, 32)
    record |= {"during": len(completed(during)), "after": len(completed(after))}
    completions = completed(during + after)
    record["versions"] = sorted({version for completion in completions for version in completion[2]})
    record["alive"] = [server.url for server in engine.alive]
    Path(output, f"{dist.get_rank()}.json").write_text(json.dumps(record))
    engine.close()


if __name__ == "__main__":
    worker(*sys.argv[1:])
