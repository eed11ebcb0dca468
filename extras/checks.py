"""Mistakes end a run early, with one line that names the flag, its value and what to do.

`extend` checks the flags, the model, the data and the output folder before anything slow starts, ends a run
in which too many samples fail or gradients are not finite, and turns errors of the machine (no memory, full
disk, a lost process) into one line. Without this file train.py does the same work, and errors are tracebacks.
"""

import argparse
import errno
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import jinja2
import torch
import torch.distributed as dist
import wandb
from accelerate.utils import set_seed
from huggingface_hub import snapshot_download
from torch.distributed import distributed_c10d
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers.hf_argparser import HfArgumentParser

from train import RANK, RLDataset, UserError, encode_prompt, reduce_over

POSITIVE = (
    "prompts_per_step group_size max_new_tokens max_turns temperature updates_per_step lr max_grad_norm "
    "tp_size dp_replicate tokens_per_micro_batch engine_timeout reward_timeout"
).split()
NOT_NEGATIVE = (
    "clip_low clip_high kl_coef entropy_coef tis_cap steps warmup_steps eval_every eval_temperature "
    "save_every reward_workers max_failures token_groups"
).split()
FAMILIES = ("qwen2", "qwen3", "llama")  # Qwen2.5 is a qwen2
SECRET = re.compile("api_key|password|secret|auth_token|access_token")
FIRST_ROWS = 8  # of a dataset, made prompts before the run starts
MAX_SKIPPED_STEPS = 5  # in a row, without a finite gradient
GPU_FILE = Path("/dev/nvidia0")  # is there if the machine has a GPU and its driver
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
WANDB_SECONDS = 60  # for the last numbers of a run; without a limit wandb waits for its server for ever


def brief(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- Flags -----------------------------------------------------------------------------------------------
def raise_parser_error(parser: argparse.ArgumentParser, message: str):
    """Takes the place of ArgumentParser.error, which prints the usage and exits."""
    module = sys.modules["__main__"].__spec__  # set by python -m
    program = f"-m {module.name}" if module else parser.prog
    message = f"{message} (python {program} --help lists all flags)"
    report_to_torchrun(message)
    raise UserError(message)


def check_config(config):
    """Raises UserError for values out of range, and for flags that contradict each other."""
    for name in POSITIVE:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, not {getattr(config, name)}")
    for name in NOT_NEGATIVE:
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name} must be 0 or more and finite, not {getattr(config, name)}")
    if config.group_size < 2 and compares_groups(config):
        raise UserError(
            f"--group_size must be 2 or more, not {config.group_size}: an advantage is relative to the group"
        )
    if config.steps == 0 and not (config.eval_data and config.eval_every):
        raise UserError("--steps 0 only evaluates: set --eval_data, and --eval_every above 0")
    if config.reward_workers and sys.platform != "linux":
        raise UserError(f"--reward_workers {config.reward_workers} requires Linux; set it to 0")
    check_engine_flags(config)
    check_secrets(config)


def compares_groups(config) -> bool:
    """Whether an advantage depends on the rest of a group; a recipe's config may say otherwise."""
    found = getattr(config, "compares_groups", True)
    return found() if callable(found) else found


def check_engine_flags(config):
    """Raises UserError for an engine that does not exist, and for --sglang_args that are no JSON object."""
    if config.engine == "sglang" and not importlib.util.find_spec("sglang"):
        raise UserError("--engine sglang: SGLang is not installed; pip install -r requirements.txt")
    if config.engine not in ("sglang", "local") and not config.engine.startswith(("http://", "https://")):
        raise UserError(f"--engine must be sglang, local or http://host:port[,...], not {config.engine!r}")
    try:
        is_object = isinstance(json.loads(config.sglang_args), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise UserError(
            f"--sglang_args must be a JSON object such as '{{\"mem_fraction_static\": 0.5}}', "
            f"not {config.sglang_args!r}"
        )


def check_secrets(config):
    """Raises UserError for a secret in a flag: flags are written to config.json and sent to wandb."""
    for name, value in vars(config).items():
        urls = value.split(",") if isinstance(value, str) and "://" in value else []
        for url in urls:
            host = url.partition("://")[2].split("/")[0]
            if "@" in host:
                raise UserError(
                    f"--{name} contains a user or a password, and flags are written to config.json; let a "
                    "proxy on this machine add them"
                )
    for name in json.loads(config.sglang_args):
        if SECRET.search(name):
            raise UserError(
                f"--sglang_args contains {name}, and flags are written to config.json; leave it out"
            )


def check_processes(config):
    """Raises UserError where the number of processes or GPUs does not fit the flags."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    tp = config.tp_size
    if local % tp:
        raise UserError(f"--tp_size {tp} does not divide the number of processes, {local} per machine")
    if config.compile and tp > 1:  # torch 2.13 and 2.14: endless recursion over DTensors of changing lengths
        raise UserError("--compile: torch cannot compile tensor-parallel layers; set --tp_size 1")
    ranks = world // tp
    if ranks % config.dp_replicate:
        raise UserError(
            f"--dp_replicate {config.dp_replicate} does not divide the {ranks} data-parallel ranks"
        )
    if config.prompts_per_step < ranks * config.updates_per_step:
        least = ranks * config.updates_per_step
        raise UserError(
            f"--prompts_per_step must be at least {least}, not {config.prompts_per_step}: a prompt for each "
            f"of {ranks} data-parallel ranks, times --updates_per_step"
        )
    if config.device == "cuda" and torch.cuda.is_available() and local > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"torchrun started {local} processes on {count} GPUs; set --nproc_per_node={count}")


def check_gpu(config, arguments: list[str]):
    """Raises UserError if torch cannot use a GPU that is there, or that --device asks for."""
    is_given = any(argument.split("=")[0] == "--device" for argument in arguments)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    expected = config.device == "cuda" or (GPU_FILE.exists() and not is_given and not is_hidden)
    if expected and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False"
        except Exception as error:
            reason = brief(error)
        raise UserError(f"torch cannot use a GPU: {reason}; repair this, or set --device cpu")


def check_output(config):
    """Raises UserError for an output folder that holds a run, or cannot be written."""
    folder = Path(config.output_dir or "runs")
    if not config.resume and (folder / "metrics.jsonl").exists():
        raise UserError(f"--output_dir {folder} already holds a run; choose another folder, or --resume it")
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir {folder} cannot be written: {existing} is not a writable folder")


# ---- Model, tokenizer, data ------------------------------------------------------------------------------
def check_model(config) -> tuple[str, int]:
    """The folder of --model, fetched if necessary, and the longest prompt that fits, in tokens."""
    name = config.model
    files = ["*.json", "*.jinja", "*.safetensors", "*.txt"]
    try:
        path = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=files)
        found = AutoConfig.from_pretrained(path)
    except Exception as error:
        raise UserError(f"--model {name} is neither a model folder nor on the Hub: {brief(error)}") from error
    if found.model_type not in FAMILIES:
        raise UserError(f"--model {name} is a {found.model_type}; it must be one of {', '.join(FAMILIES)}")
    if not list(Path(path).glob("*.safetensors")):
        raise UserError(f"--model {name} has no weights: no *.safetensors in {path}")
    if getattr(found, "use_sliding_window", False):
        raise UserError(f"--model {name} uses sliding-window attention, which is not implemented")
    for size in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        if getattr(found, size) % config.tp_size:
            raise UserError(
                f"--tp_size {config.tp_size} does not divide the model's {size} {getattr(found, size)}"
            )
    room = found.max_position_embeddings - config.max_new_tokens
    if room < 1:
        context = found.max_position_embeddings
        raise UserError(
            f"--max_new_tokens {config.max_new_tokens} leaves no room for a prompt in a context of {context} "
            "tokens; lower it"
        )
    return path, room


def check_tokenizer(path: str):
    """The tokenizer of a model's folder. Raises UserError if it cannot make prompts or end a turn."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise UserError(f"--model {path}: its tokenizer cannot be loaded: {brief(error)}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"--model {path}: its tokenizer has no chat template; use an instruct model, or add one"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--model {path}: its tokenizer has no eos_token; name the token that ends a turn, for example "
            f"<|im_end|>, in {Path(path) / 'tokenizer_config.json'}"
        )
    return tokenizer


def check_source(name: str, source: str):
    """Raises UserError if a source can only be a typing error, or has a row that is not JSON."""
    file = Path(source.partition(":")[0])
    if file.suffix not in (".json", ".jsonl", ".parquet") and (file.is_file() or "/" not in str(file)):
        raise UserError(
            f"{name} {source} is neither a .jsonl, .json or .parquet file nor owner/name[/config] on the Hub"
        )
    text = file.read_text(encoding="utf-8-sig") if file.suffix in (".json", ".jsonl") else "["
    lines = [] if text.lstrip().startswith("[") else text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line or "null")
        except ValueError as error:
            raise UserError(f"{name} {source}: line {number} is not JSON: {brief(error)}") from error


def checked(dataset_class: type, config, tokenizer, room: int) -> type:
    """A dataset class whose mistakes are UserErrors, found in the first rows before the run starts."""
    if not isinstance(dataset_class, type):
        raise UserError("main(dataset=...) takes a class, such as a subclass of RLDataset, not an instance")

    class CheckedDataset(dataset_class):
        def __init__(self, source: str):
            name = "--eval_data" if source == config.eval_data and source != config.data else "--data"
            self.flag = f"{name} {source}"
            try:
                super().__init__(source)
                count = len(self)
            except UserError:
                raise
            except Exception as error:
                if dataset_class.__init__ is RLDataset.__init__ and not isinstance(error, OSError):
                    check_source(name, source)
                raise UserError(f"{self.flag} cannot be read, or is empty: {brief(error)}") from error
            if count == 0:
                raise UserError(f"{self.flag} has no rows")
            lengths = [self.prompt_length(index) for index in range(min(FIRST_ROWS, count))]
            if min(lengths) > room:
                raise UserError(
                    f"{self.flag}: the first {len(lengths)} prompts have {min(lengths)} tokens or more; the "
                    f"model's context leaves room for {room} beside --max_new_tokens {config.max_new_tokens}"
                )

        def __getitem__(self, index: int):
            try:
                return super().__getitem__(index)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, IndexError) and index >= len(self):
                    raise  # ends a loop over the dataset
                raise UserError(
                    f"{self.flag}: row {index} cannot be made a prompt: {type(error).__name__}: "
                    f"{brief(error)}; see {dataset_class.__name__}.__getitem__"
                ) from error

        def prompt_length(self, index: int) -> int:
            """Tokens of a row's prompt."""
            messages = self[index].messages
            try:
                return len(encode_prompt(tokenizer, messages))
            except Exception as error:
                raise UserError(
                    f"{self.flag}: the prompt of row {index} does not fit the chat template: "
                    f"{type(error).__name__}: {brief(error)}"
                ) from error

    return CheckedDataset


# ---- Errors while a run goes on --------------------------------------------------------------------------
def explain(error: BaseException) -> str:
    """One line for an error whose traceback would not help; else ""."""
    if isinstance(error, UserError | ConnectionError | TimeoutError):
        return " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{brief(error).partition('. ')[0]}: lower --tokens_per_micro_batch, or mem_fraction_static in "
            "--sglang_args, or set --offload True; python -m tools.plan counts what fits"
        )
    if isinstance(error, shutil.Error):  # of copytree: a list of all files that could not be copied
        source, target, reason = error.args[0][0]
        return f"{target} could not be written: {reason}"
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return f"{error.strerror}: {error.filename or 'a file of this run'}; free space, and --resume the run"
    if isinstance(error, jinja2.TemplateError):
        return f"a prompt does not fit the chat template: {brief(error)}"
    return explain_lost_contact(error) if isinstance(error, RuntimeError) else ""


def explain_lost_contact(error: RuntimeError) -> str:
    """One line for a broken connection between ranks; "" for other errors. gloo's errors have no type."""
    message = brief(error)
    if "gloo/transport" not in message:
        return ""
    detail = message.partition("] ")[2].split(". ")[0]
    if "connectFullMesh" in message:
        return f"the ranks cannot reach each other ({detail}); set GLOO_SOCKET_IFNAME to the network device"
    return (
        f"another rank ended, or was silent for 3 times --engine_timeout ({detail}); see its own message, "
        "which may be on another machine"
    )


def report_to_torchrun(message: str):
    """Writes what torchrun shows at the very end as the root cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        content = {"message": message, "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": content}))


@contextmanager
def one_line_errors():
    """Makes UserErrors of errors that have an explanation, and reports every error to torchrun."""
    try:
        yield
    except Exception as error:
        line = explain(error)
        report_to_torchrun(line or f"{type(error).__name__}: {brief(error)}")
        if not line:
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end this rank while it waits
        if explain_lost_contact(error):
            time.sleep(2)  # the rank that broke the connection prints its message first
        raise UserError(line) from error


def set_timeouts(seconds: float):
    """Sets how long ranks wait for each other, in every process group."""
    limit = timedelta(seconds=seconds)
    set_timeout = (
        getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    )  # public in torch 2.14
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(limit, group)


@contextmanager
def wandb_or_offline():
    """Makes wandb.init log offline where its server cannot be reached. A refused key is a UserError."""
    init = wandb.init

    def init_or_offline(mode: str, **options):
        options["settings"] = wandb.Settings(finish_timeout=WANDB_SECONDS)
        try:
            return init(mode=mode, **options)
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise UserError(f"--wandb {mode}: {brief(error)}") from error
        except wandb.Error as error:
            folder = options.get("dir")
            tqdm.write(f"wandb: {brief(error)}; logged in {folder}/wandb, for `wandb sync` to send later")
            return init(mode="offline", **options)

    wandb.init = init_or_offline
    try:
        yield
    finally:
        wandb.init = init


def check_failures(samples: list, share: float, mesh):
    """Raises UserError on all ranks if more than this share of all ranks' samples failed."""
    failures = [sample.failure for sample in samples if sample.failure]
    parts = [None] * mesh.size()
    dist.all_gather_object(parts, (len(failures), len(samples), failures[:1]), group=mesh.get_group())
    failed = sum(part[0] for part in parts)
    total = sum(part[1] for part in parts)
    if failed > share * total:
        first = next(failure for part in parts for failure in part[2])
        raise UserError(
            f"{failed} of {total} samples failed (--max_failures {share:g}), the first one: {first}"
        )


def extend(trainer_class: type) -> type:
    """A trainer that reports mistakes in one line; also changes how argparse, stdout and torch report."""
    HfArgumentParser.error = raise_parser_error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character that the screen lacks ends no run
    for name in ("torch.distributed.tensor._redistribute", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hints that are no news to the user

    class CheckedTrainer(trainer_class):
        def __init__(self, config, dataset_class, reward_fn, env_step):
            with one_line_errors():
                check_gpu(config, sys.argv[1:])
                check_config(config)
                check_processes(config)
                if RANK == 0:
                    check_output(config)
                path, room = check_model(config)
                dataset_class = checked(dataset_class, config, check_tokenizer(path), room)
                super().__init__(config, dataset_class, reward_fn, env_step)
                set_timeouts(3 * config.engine_timeout)
                set_seed(config.seed + RANK)  # now: SGLang has drawn its ports from Python's generator
            self.skipped_prompts = 0  # of this rank's rollout
            self.skipped_steps = 0  # in a row

        def fit(self):
            with one_line_errors():
                super().fit()

        def open_log(self):
            try:
                with wandb_or_offline():
                    super().open_log()
            except OSError as error:
                raise UserError(f"--output_dir {self.folder} cannot be written: {error}") from error

        def sample(self, dataset, prompts: list, group_size: int, temperature: float) -> list:
            samples = super().sample(dataset, prompts, group_size, temperature)
            self.skipped_prompts = len(prompts) - len(samples) // group_size
            self.sampled = samples
            return samples

        async def score(self, sample):
            try:
                await super().score(sample)
            except TimeoutError as error:
                limit = self.config.reward_timeout
                raise TimeoutError(
                    str(error) or f"reward_fn took over {limit:g} s (--reward_timeout)"
                ) from error

        async def episode(self, sample, temperature: float):
            sample = await super().episode(sample, temperature)
            if sample.failure.rstrip().endswith("TimeoutError"):  # without a message: of the core's own limit
                limit = self.config.reward_timeout
                sample.failure = f"TimeoutError: env_step took over {limit:g} s (--reward_timeout)"
            return sample

        def learn(self, samples: list) -> dict[str, float]:
            """The update, if enough samples could be scored."""
            dp = self.mesh["dp"]
            skipped, total = reduce_over(dp, [self.skipped_prompts, len(samples)])
            if total == 0:
                raise UserError("all prompts of this step are too long; lower --max_new_tokens")
            check_failures(samples, self.config.max_failures, dp)
            metrics = super().learn(samples)
            self.skipped_steps = 0 if math.isfinite(metrics["grad_norm"]) else self.skipped_steps + 1
            if self.skipped_steps >= MAX_SKIPPED_STEPS:
                raise UserError(
                    f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite, and changed "
                    "nothing: lower --lr, or see the rewards in samples.jsonl"
                )
            return metrics | ({"skipped_prompts": skipped} if skipped else {})

        def evaluate(self) -> dict[str, float]:
            try:
                metrics = super().evaluate()
            except ZeroDivisionError as error:
                raise UserError("all prompts of --eval_data are too long; lower --max_new_tokens") from error
            check_failures(self.sampled, self.config.max_failures, self.mesh["dp"])
            return metrics

        def write(self, step: int, metrics: dict[str, float], samples: list):
            try:
                super().write(step, metrics, samples)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error

    return CheckedTrainer
