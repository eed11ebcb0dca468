"""Mistakes end a run early, with one line that names the flag, its value and what to do.

`extend` checks the flags, the model, the data and the output folder before anything slow starts, ends a run
whose gradients are not finite, and turns system errors (out of memory, full disk, lost process) into one
line. Without this file train.py does the same work, but most of these errors are tracebacks.
"""

import argparse
import errno
import importlib.util
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import jinja2
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import set_seed
from huggingface_hub import snapshot_download
from safetensors import safe_open
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from train import FILES, RANK, RLDataset, Sample, UserError, empty_model, encode_prompt, flag, reduce_over

POSITIVE = (
    "prompts_per_step group_size max_new_tokens max_turns temperature updates_per_step lr max_grad_norm "
    "tp_size dp_replicate tokens_per_micro_batch engine_timeout reward_timeout"
).split()
NOT_NEGATIVE = (
    "clip_low clip_high kl_coef entropy_coef tis_cap steps warmup_steps eval_every eval_temperature "
    "save_every reward_workers max_failures token_groups"
).split()
FAMILIES = ("qwen2", "qwen3", "llama")  # Qwen2.5 has the type qwen2
SECRET = re.compile("api_key|password|secret|auth_token|access_token")
FIRST_ROWS = 8  # rows that are turned into prompts before the run starts
MAX_SKIPPED_STEPS = 5  # consecutive steps without a finite gradient
GPU_FILE = Path("/dev/nvidia0")  # exists if the machine has a GPU and its driver
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MANY_COMPLETIONS = 100_000  # per step; more of them cause a warning
REMINDER_SECONDS = 60  # before a line says that one call of reward_fn is still running


@dataclass
class Flags:
    max_failures: float = flag(0.1, "largest share of failed samples in a step before the run ends")


def brief(error: BaseException) -> str:
    """The first line of an error's message, with the second if the first only announces it."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join([first, *map(str.strip, rest[: first.endswith(":")])])


# ---- Flags -----------------------------------------------------------------------------------------------
def raise_parser_error(parser: argparse.ArgumentParser, message: str):
    """Replaces ArgumentParser.error, which prints the usage and exits."""
    module = sys.modules["__main__"].__spec__  # set by python -m
    program = f"-m {module.name}" if module else parser.prog
    message = f"{message} (python {program} --help lists all flags)"
    report_to_torchrun(message)
    raise UserError(message)


def declared(config, names: list[str]) -> list[str]:
    """Those of the names that are flags: extras and recipes declare their own."""
    return [name for name in names if hasattr(config, name)]


def check_config(config):
    """Raises UserError for values out of range, and for flags that contradict each other."""
    for name in declared(config, POSITIVE):
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, not {getattr(config, name)}")
    for name in declared(config, NOT_NEGATIVE):
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name} must be 0 or more and finite, not {getattr(config, name)}")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"--seed must be from 0 to 4294967295 (2**32 - 1), not {config.seed}")
    if config.group_size < 2 and compares_groups(config):
        raise UserError(
            f"--group_size must be 2 or more, not {config.group_size}: an advantage is relative to the group"
        )
    if config.steps == 0 and not (config.eval_data and config.eval_every):
        raise UserError("--steps 0 only evaluates: set --eval_data, and --eval_every above 0")
    check_engine_flags(config)
    check_secrets(config)


def compares_groups(config) -> bool:
    """Whether an advantage depends on the rest of a group; a recipe's config may say otherwise."""
    found = getattr(config, "compares_groups", True)
    return found() if callable(found) else found


def check_engine_flags(config):
    """Raises UserError for an unknown engine, and for --sglang_args that are not a JSON object."""
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
    try:
        for path in (folder / "metrics.jsonl", *map(Path, folder.parts)):
            path.exists()
    except OSError as error:  # a name is too long, or a parent cannot be searched
        raise UserError(f"--output_dir cannot be written ({error.strerror}): {folder}") from error
    if not getattr(config, "resume", "") and (folder / "metrics.jsonl").exists():
        raise UserError(f"--output_dir {folder} already holds a run; choose another folder, or --resume it")
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir {folder} cannot be written: {existing} is not a writable folder")


# ---- Model, tokenizer, data ------------------------------------------------------------------------------
def check_model(config) -> tuple[str, int]:
    """The folder of --model, downloaded if necessary, and the longest prompt that fits, in tokens."""
    name = config.model
    try:
        path = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=FILES)
        found = AutoConfig.from_pretrained(path)
    except Exception as error:
        raise UserError(f"--model {name} is neither a model folder nor on the Hub: {brief(error)}") from error
    if found.model_type not in FAMILIES:
        raise UserError(f"--model {name} is a {found.model_type}; it must be one of {', '.join(FAMILIES)}")
    if not list(Path(path).glob("*.safetensors")):
        raise UserError(f"--model {name} has no weights: no *.safetensors in {path}")
    if getattr(found, "use_sliding_window", False):
        raise UserError(f"--model {name} uses sliding-window attention, which is not implemented")
    if getattr(found, "quantization_config", None):
        raise UserError(f"--model {name} is quantized; training needs the weights it was made from")
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


def check_weights(path: str):
    """Raises UserError if a model's folder lacks weights; reads only the headers of its files."""
    index = Path(path) / "model.safetensors.index.json"
    names = sorted(file.name for file in Path(path).glob("*.safetensors"))
    used = "config.json"
    try:
        model = empty_model(path)
        for used in names:
            with safe_open(Path(path) / used, "pt"):
                pass
        metadata = dcp.HuggingFaceStorageReader(path).read_metadata()  # load_policy reads these tensors
        used = index.name
        listed = json.loads(index.read_text()).get("weight_map", {}) if index.exists() else {}
    except Exception as error:
        raise UserError(f"--model {path}: {used} is damaged ({brief(error)}); download it again") from error
    files = {one.fqn: Path(info.relative_path).name for one, info in metadata.storage_data.items()}
    for name, weight in model.named_parameters():
        found = metadata.state_dict_metadata.get(name)
        is_tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if not found and not is_tied:
            file = listed.get(name, names[0] if len(names) == 1 else "*.safetensors")
            raise UserError(f"--model {path}: {file} lacks {name}; download it again")
        if found and found.size != weight.shape:
            raise UserError(
                f"--model {path}: {name} in {files[name]} has the shape {[*found.size]}; config.json asks "
                f"for {[*weight.shape]}"
            )


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
    """Raises UserError if a source can only be a mistake. Given /a/b.txt, `datasets` would read all of /a."""
    file = source.partition(":")[0]
    is_path = os.path.isfile(file) or os.path.isabs(file) or "/" not in file
    if is_path and not file.endswith((".json", ".jsonl", ".parquet")):
        raise UserError(
            f"{name} {source} is neither a .jsonl, .json or .parquet file nor owner/name[/config] on the Hub"
        )


def check_json(name: str, source: str):
    """Raises UserError if a file is not UTF-8, or has a row that is not JSON."""
    file = Path(source.partition(":")[0])
    try:
        text = file.read_text(encoding="utf-8-sig") if file.suffix in (".json", ".jsonl") else "["
    except UnicodeDecodeError as error:
        raise UserError(f"{name} {source} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
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
            is_plain = dataset_class.__init__ is RLDataset.__init__
            try:
                if is_plain:
                    check_source(name, source)
                super().__init__(source)
                count = len(self)
            except UserError:
                raise
            except Exception as error:
                if is_plain and not isinstance(error, OSError):
                    check_json(name, source)
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
                sample = super().__getitem__(index)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, IndexError) and index >= len(self):
                    raise  # this ends a loop over the dataset
                raise UserError(
                    f"{self.flag}: row {index} cannot be made a prompt: {type(error).__name__}: "
                    f"{brief(error)}; see {dataset_class.__name__}.__getitem__"
                ) from error
            if not isinstance(sample, Sample):
                found = "None" if sample is None else f"a {type(sample).__name__}"
                raise UserError(
                    f"{self.flag}: {dataset_class.__name__}.__getitem__ returned {found} for row {index}; it "
                    "must return a Sample"
                )
            for field, value in vars(sample).items():
                try:
                    deepcopy(value)
                except Exception as error:
                    raise UserError(
                        f"{self.flag}: row {index}: sample.{field} cannot be copied for each completion: "
                        f"{brief(error)}; create it in env_step or reward_fn instead"
                    ) from error
            return sample

        def prompt_length(self, index: int) -> int:
            """Tokens of a row's prompt."""
            messages = self[index].messages
            is_list = isinstance(messages, list)
            if not is_list or not all(isinstance(one, dict) and "role" in one for one in messages):
                raise UserError(
                    f"{self.flag}: sample.messages of row {index} must be a list such as "
                    f'[{{"role": "user", "content": "Hi"}}], not {messages!r:.60}'
                )
            try:
                length = len(encode_prompt(tokenizer, messages))
            except Exception as error:
                raise UserError(
                    f"{self.flag}: the prompt of row {index} does not fit the chat template: "
                    f"{type(error).__name__}: {brief(error)}"
                ) from error
            if length == 0:
                raise UserError(
                    f"{self.flag}: the prompt of row {index} has no tokens; see the tokenizer and the chat "
                    "template of --model"
                )
            return length

    return CheckedDataset


# ---- Errors during a run ---------------------------------------------------------------------------------
def explain(error: BaseException) -> str:
    """One line for an error whose traceback would not help; else ""."""
    if isinstance(error, UserError | ConnectionError | TimeoutError):
        return " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{brief(error).partition('. ')[0]}: lower --tokens_per_micro_batch, or mem_fraction_static in "
            "--sglang_args, or set --offload True; python -m tools.plan computes what fits"
        )
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
    """Turns errors that can be explained into UserErrors, and reports every error to torchrun."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        line = explain(error)
        report_to_torchrun(line or f"{type(error).__name__}: {brief(error)}")
        if not line:
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end this rank while it waits
        if explain_lost_contact(error):
            time.sleep(2)  # the rank that broke the connection prints its message first
        raise UserError(line) from error


def with_reminders(reward_fn):
    """The same function; if a call blocks its rank for 1, 2, 4, ... minutes, a line names the place.

    An async function that waits blocks nothing and has --reward_timeout. Uses SIGALRM, unless reward_fn does.
    """

    @wraps(reward_fn)
    def call(sample):
        is_free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        if not is_free or threading.current_thread() is not threading.main_thread():
            return reward_fn(sample)
        start = time.monotonic()

        def remind(number, frame):
            frames = [frame]  # from the innermost frame to that of `call`
            while frames[-1].f_code is not call.__code__:
                frames.append(frames[-1].f_back)
            file = frames[-2:][0].f_code.co_filename  # reward_fn's own
            line = next(one.f_lineno for one in frames if one.f_code.co_filename == file)
            seconds = time.monotonic() - start
            with suppress(RuntimeError):  # raised if reward_fn itself was printing
                tqdm.write(
                    f"rank {RANK}: reward_fn has been running for {seconds:.0f} s, now at {file}:{line}, and "
                    "everything else waits for it; make it async, or set --reward_workers"
                )
            signal.setitimer(signal.ITIMER_REAL, seconds)

        try:
            signal.signal(signal.SIGALRM, remind)
            signal.setitimer(signal.ITIMER_REAL, REMINDER_SECONDS)
            return reward_fn(sample)
        finally:
            if signal.getsignal(signal.SIGALRM) is remind:  # unless reward_fn has installed its own
                signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: remind would set the timer again
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)

    return call


def extend(trainer_class: type) -> type:
    """A trainer that reports mistakes in one line; also changes how argparse, stdout and torch report."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an unprintable character must not end a run
    for name in ("torch.distributed.tensor._redistribute", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hints that do not help the user

    class Parser(trainer_class.parser_class):
        error = raise_parser_error

    class CheckedTrainer(trainer_class):
        parser_class = Parser

        def __init__(self, config, dataset_class, reward_fn, env_step):
            with one_line_errors():
                check_gpu(config, sys.argv[1:])
                check_config(config)
                check_processes(config)
                if RANK == 0:
                    check_output(config)
                path, room = check_model(config)
                check_weights(path)
                isolated = getattr(config, "reward_workers", 0)
                reward_fn = reward_fn if isolated else with_reminders(reward_fn)
                dataset_class = checked(dataset_class, config, check_tokenizer(path), room)
                super().__init__(config, dataset_class, reward_fn, env_step)
                seed = (config.seed + RANK) % 2**32
                set_seed(seed)  # now: SGLang has drawn its ports from Python's generator
            self.max_failures = config.max_failures
            self.skipped_prompts = 0  # in this rank's rollout
            self.skipped_steps = 0  # consecutive ones

        def fit(self):
            with one_line_errors():
                super().fit()

        def open_log(self):
            try:
                super().open_log()
            except OSError as error:
                raise UserError(f"--output_dir {self.folder} cannot be written: {error}") from error
            completions = self.config.prompts_per_step * self.config.group_size
            if completions > MANY_COMPLETIONS:
                tqdm.write(
                    f"Each step samples {completions:,} completions (--prompts_per_step times --group_size), "
                    "and may take hours; a --group_size of 8 to 64 is common"
                )

        def sample(self, dataset, prompts: list, group_size: int, temperature: float) -> list:
            samples = super().sample(dataset, prompts, group_size, temperature)
            self.skipped_prompts = len(prompts) - len(samples) // group_size
            return samples

        async def episode(self, sample, temperature: float):
            sample = await super().episode(sample, temperature)
            if sample.failure.rstrip().endswith("TimeoutError"):  # no message: from the core's own limit
                limit = f"{self.config.reward_timeout:g} s (--reward_timeout)"
                sample.failure = f"TimeoutError: reward_fn or env_step took over {limit}"
            return sample

        def learn(self, samples: list) -> dict[str, float]:
            """The update, if enough samples could be scored."""
            (skipped,) = reduce_over(self.mesh["dp"], [self.skipped_prompts])
            metrics = super().learn(samples)
            self.skipped_steps = 0 if math.isfinite(metrics["grad_norm"]) else self.skipped_steps + 1
            if self.skipped_steps >= MAX_SKIPPED_STEPS:
                raise UserError(
                    f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite, and were "
                    "skipped: lower --lr, or check the rewards in samples.jsonl"
                )
            return metrics | ({"skipped_prompts": skipped} if skipped else {})

        def write(self, step: int, metrics: dict[str, float], samples: list):
            try:
                super().write(step, metrics, samples)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error

    return CheckedTrainer
