"""Mistakes end a run early, with one line that names the flag, its value and what to do.

`extend` checks the flags, the model, the data and the output folder before anything slow starts, ends a run
whose gradients are not finite, and turns system errors (out of memory, full disk, lost process) into one
line. Without this file train.py does the same work, but most of these errors are tracebacks.
"""

import errno
import faulthandler
import importlib
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

import torch
from accelerate.utils import set_seed
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from train import FILES, RANK, RLDataset, Sample, UserError, empty_model, encode_prompt, flag, reduce_over

POSITIVE = (
    "prompts_per_step group_size max_new_tokens max_turns temperature updates_per_step lr max_grad_norm "
    "tp_size dp_replicate tokens_per_micro_batch engine_timeout reward_timeout"
).split()
NOT_NEGATIVE = (
    "clip_low clip_high kl_coef entropy_coef tis_cap steps warmup_steps eval_every eval_temperature "
    "save_every reward_workers max_failures token_groups weight_decay"
).split()
FAMILIES = ("qwen2", "qwen3", "qwen3_5_text", "llama")  # Qwen2.5 is a qwen2; a qwen3_5 has a qwen3_5_text
FIRST_ROWS = 8  # rows that are turned into prompts before the run starts
MAX_SKIPPED_STEPS = 5  # consecutive steps without a finite gradient
GPU_FILE = Path("/dev/nvidia0")  # exists if the machine has a GPU and its driver
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)
REMINDER_SECONDS = 60.0  # between tracebacks of a call of reward_fn that does not return


@dataclass
class Flags:
    max_failures: float = flag(0.1, "largest share of failed samples in a step before the run ends")


def brief(error: BaseException) -> str:
    """An error's message as one line that is not too long."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def blaming(message: str):
    """Turns any error of the block into a UserError: the message, and what the error says."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{message}: {type(error).__name__}: {brief(error)}") from error


# ---- Flags -----------------------------------------------------------------------------------------------
def one_line_parser(parser_class: type) -> type:
    """A parser class that raises UserError for a mistake; argparse prints the usage and exits."""

    class Parser(parser_class):
        def error(self, message: str):
            message = f"{message}; --help lists all flags"
            report_to_torchrun(message)
            raise UserError(message)

    return Parser


def check_config(config):
    """Raises UserError for values out of range, and for flags that contradict each other."""
    for name, value in vars(config).items():
        if name in POSITIVE and not 0 < value < math.inf:
            raise UserError(f"--{name} must be above 0 and finite, not {value}")
        if name in NOT_NEGATIVE and not 0 <= value < math.inf:
            raise UserError(f"--{name} must be 0 or more and finite, not {value}")
        if name in ("adam_beta1", "adam_beta2") and not 0 <= value < 1:
            raise UserError(f"--{name} must be at least 0 and below 1, not {value}")
    if not 0 <= config.seed < 2**32:
        raise UserError(f"--seed must be from 0 to 4294967295 (2**32 - 1), not {config.seed}")
    if config.group_size < 2 and getattr(config, "compares_groups", True):  # a recipe may say otherwise
        raise UserError("--group_size must be 2 or more: an advantage is relative to the group")
    if config.steps == 0 and not (config.eval_data and config.eval_every):
        raise UserError("--steps 0 only evaluates: set --eval_data, and --eval_every above 0")
    if config.engine == "sglang" and not importlib.util.find_spec("sglang"):
        raise UserError("--engine sglang: SGLang is not installed; pip install -r requirements.txt")
    if config.engine not in ("sglang", "local") and not config.engine.startswith(("http://", "https://")):
        raise UserError(f"--engine must be sglang, local or http://host:port[,...], not {config.engine!r}")
    if re.search("api_key|password", config.sglang_args):
        raise UserError("--sglang_args holds a key or a password, which config.json would show: leave it out")
    for name in ("sglang_args", "chat_template_kwargs"):
        text = getattr(config, name, "") or "{}"
        with blaming(f'--{name} must be a JSON object like {{"a": 1}}, not {text!r}'):
            dict(**json.loads(text))


def check_processes(config):
    """Raises UserError where the number of processes or GPUs does not fit the flags."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local % config.tp_size:
        raise UserError(f"--tp_size {config.tp_size} does not divide the {local} processes per machine")
    ranks = world // config.tp_size
    if ranks % config.dp_replicate:
        raise UserError(f"--dp_replicate {config.dp_replicate} does not divide {ranks} data-parallel ranks")
    least = ranks * getattr(config, "updates_per_step", 1)
    if config.prompts_per_step < least:
        raise UserError(
            f"--prompts_per_step must be at least {least}: data-parallel ranks x --updates_per_step"
        )
    gpus = torch.cuda.device_count()
    if config.device == "cuda" and 0 < gpus < local:
        raise UserError(f"torchrun started {local} processes on {gpus} GPUs; set --nproc_per_node={gpus}")


def check_gpu(config, arguments: list[str]):
    """Raises UserError if torch cannot use a GPU that is there, or that --device asks for."""
    is_given = any(argument.split("=")[0] == "--device" for argument in arguments)
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_expected = config.device == "cuda" or (GPU_FILE.exists() and not is_given and not is_hidden)
    if is_expected and not torch.cuda.is_available():
        with blaming("torch cannot use a GPU; repair this, or set --device cpu"):
            torch.cuda.init()  # says why


def check_output(config):
    """Raises UserError for an output folder that holds a run, or cannot be written."""
    folder = Path(config.output_dir or "runs")
    with blaming(f"--output_dir {folder} cannot be written"):
        holds_run = (folder / "metrics.jsonl").exists()
        existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if holds_run and not getattr(config, "resume", ""):
        raise UserError(f"--output_dir {folder} already holds a run; choose another folder, or --resume it")
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir {folder} cannot be written: {existing} is not a writable folder")


# ---- Model, tokenizer, data ------------------------------------------------------------------------------
def check_model(config) -> tuple[str, int]:
    """The folder of --model, downloaded if necessary, and the longest prompt that fits, in tokens."""
    name = config.model
    with blaming(f"--model {name} is neither a model folder nor on the Hub"):
        path = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=FILES)
        whole = AutoConfig.from_pretrained(path)
    found = whole.get_text_config()
    if found.model_type not in FAMILIES:
        raise UserError(f"--model {name} is a {found.model_type}; it must be one of {', '.join(FAMILIES)}")
    if getattr(found, "use_sliding_window", False):
        raise UserError(f"--model {name} uses sliding-window attention, which is not implemented")
    if getattr(whole, "quantization_config", None):
        raise UserError(f"--model {name} is quantized; training needs the weights it was made from")
    for size in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        if (count := getattr(found, size)) % config.tp_size:
            raise UserError(f"--tp_size {config.tp_size} does not divide the model's {size} {count}")
    context = found.max_position_embeddings
    room = context - config.max_new_tokens
    if room < 1:
        raise UserError(
            f"--max_new_tokens must be below {context}, the model's context, to leave room for a prompt"
        )
    return path, room


def check_weights(path: str):
    """Raises UserError if weights are missing, damaged or of another model; reads only the files' headers."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise UserError(f"--model {path} has no weights: no *.safetensors")
    for file in files:
        with blaming(f"--model {path}: {file.name} is damaged; download it again"):
            safe_open(file, "pt")
    model = empty_model(path)
    saved = model.reader.read_metadata().state_dict_metadata
    for name, weight in model.named_parameters():
        found = [*saved[name].size] if name in saved else "missing"
        is_tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if found != [*weight.shape] and not (is_tied and found == "missing"):
            raise UserError(f"--model {path}: {name} is {found}; config.json asks for {[*weight.shape]}")


def check_tokenizer(path: str):
    """The tokenizer of a model's folder. Raises UserError if it cannot make prompts or end a turn."""
    with blaming(f"--model {path}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise UserError(f"--model {path}: its tokenizer has no chat template; use an instruct model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {path}: tokenizer_config.json names no eos_token, which ends a turn")
    return tokenizer


def check_source(name: str, source: str):
    """Raises UserError if a source can only be a mistake. Given /a/b.txt, `datasets` would read all of /a."""
    file = source.partition(":")[0]
    is_path = os.path.isfile(file) or os.path.isabs(file) or "/" not in file
    if is_path and not file.endswith((".json", ".jsonl", ".parquet")):
        raise UserError(f"{name} {source} is neither a .jsonl, .json or .parquet file nor on the Hub")


def check_lines(name: str, source: str):
    """Raises UserError for the first line of a .json or .jsonl file that is not JSON."""
    text = Path(source.partition(":")[0]).read_text(encoding="utf-8-sig")
    lines = [] if text.lstrip().startswith("[") else text.split("\n")
    for number, line in enumerate(lines, 1):
        with blaming(f"{name} {source}: line {number} is not JSON"):
            json.loads(line or "null")


def checked(dataset_class: type, config, tokenizer, room: int) -> type:
    """A dataset class whose mistakes are UserErrors, found in the first rows before the run starts."""
    if not isinstance(dataset_class, type):
        raise UserError("main(dataset=...) takes a class, such as a subclass of RLDataset, not an instance")

    class CheckedDataset(dataset_class):
        def __init__(self, source: str):
            name = "--eval_data" if source == config.eval_data and source != config.data else "--data"
            self.flag = f"{name} {source}"
            is_plain = dataset_class.__init__ is RLDataset.__init__
            with blaming(f"{self.flag} cannot be read, or is empty"):
                if is_plain:
                    check_source(name, source)
                try:
                    super().__init__(source)
                except json.JSONDecodeError:  # it counts the lines of all rows joined
                    if is_plain:
                        check_lines(name, source)
                    raise
            if len(self) == 0:
                raise UserError(f"{self.flag} has no rows")
            lengths = [self.prompt_length(index) for index in range(min(FIRST_ROWS, len(self)))]
            if min(lengths) > room:
                shortest = f"the first {len(lengths)} prompts have {min(lengths)} tokens or more"
                raise UserError(f"{self.flag}: {shortest}; {room} fit beside --max_new_tokens new ones")

        def __getitem__(self, index: int):
            if index >= len(self):
                raise IndexError(index)  # this ends a loop over the dataset
            method = f"{dataset_class.__name__}.__getitem__"
            with blaming(f"{self.flag}: row {index} cannot be made a prompt by {method}"):
                sample = super().__getitem__(index)
                deepcopy(sample)  # each completion gets a copy
            if not isinstance(sample, Sample):
                raise UserError(f"{self.flag}: {method} must return a Sample, not {sample!r:.60}")
            return sample

        def prompt_length(self, index: int) -> int:
            """Tokens of a row's prompt."""
            messages = self[index].messages
            with blaming(f"{self.flag}: row {index}: sample.messages do not fit the chat template"):
                for message in messages:
                    message["role"]  # a template overlooks what is missing
                return len(encode_prompt(tokenizer, messages))

    return CheckedDataset


# ---- Errors during a run ---------------------------------------------------------------------------------
def explain(error: BaseException) -> str:
    """One line for an error whose traceback would not help; else ""."""
    if isinstance(error, UserError | ConnectionError | TimeoutError):
        return " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower --tokens_per_micro_batch or SGLang's mem_fraction_static, or set --offload True"
        return f"{brief(error).partition('. ')[0]}: {advice}; python -m tools.plan computes what fits"
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        file = error.filename or "a file of this run"
        return f"{error.strerror}: {file}; free space or set another --output_dir, and --resume the run"
    if isinstance(error, RuntimeError) and "gloo/transport" in str(error):
        causes = "was silent for 3 times --engine_timeout, or cannot be reached (see GLOO_SOCKET_IFNAME)"
        return f"another rank ended, {causes}; see its own message: {brief(error)}"
    return ""


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
        if line.startswith("another rank ended"):
            time.sleep(2)  # that rank prints its own message first
        raise UserError(line) from error


def with_reminders(reward_fn):
    """The same function; while one call of it blocks its rank, a traceback every minute shows where."""

    @wraps(reward_fn)
    def call(sample):
        faulthandler.dump_traceback_later(REMINDER_SECONDS, repeat=True, file=sys.__stderr__)
        try:
            return reward_fn(sample)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return call


def extend(trainer_class: type) -> type:
    """A trainer that reports mistakes in one line; also changes how stdout and torch's logs report."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an unprintable character must not end a run
    for name in ("torch.distributed.tensor._redistribute", "transformers.tokenization_utils_base"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hints that do not help the user

    class CheckedTrainer(trainer_class):
        parser_class = one_line_parser(trainer_class.parser_class)

        def __init__(self, config, dataset_class, reward_fn, env_step):
            with one_line_errors():
                check_gpu(config, sys.argv[1:])
                check_config(config)
                check_processes(config)
                if RANK == 0:
                    check_output(config)
                path, room = check_model(config)
                check_weights(path)
                tokenizer = check_tokenizer(path)
                if getattr(config, "chat_template_kwargs", ""):  # its file may be missing
                    importlib.import_module("extras.chat_template").set_arguments(tokenizer, config)
                dataset_class = checked(dataset_class, config, tokenizer, room)
                if not getattr(config, "reward_workers", 0):  # these have a limit
                    reward_fn = with_reminders(reward_fn)
                super().__init__(config, dataset_class, reward_fn, env_step)
                set_seed((config.seed + RANK) % 2**32)  # now that SGLang has drawn its ports
            self.max_failures = config.max_failures
            self.skipped_prompts = 0  # in this rank's rollout
            self.skipped_steps = 0  # consecutive ones

        def fit(self):
            with one_line_errors():
                super().fit()

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
                steps = f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite"
                raise UserError(f"{steps}: lower --lr, or check the rewards in samples.jsonl")
            return metrics | ({"skipped_prompts": skipped} if skipped else {})

    return CheckedTrainer
