"""What a user hands in: flags, a model, data, prompts. Each is checked, and what is wrong ends in one clear line."""
import json
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import ReadInstruction, load_dataset
from huggingface_hub import snapshot_download
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers.hf_argparser import HfArg, HfArgumentParser

FAMILIES = ("qwen2", "qwen3", "llama")      # Qwen2.5 is a qwen2


class UserError(Exception):
    """Something that the user can mend: `main` prints its one line, without a traceback, and exits with code 2."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())     # whatever text it quotes


class JSON(dict):
    """The type of a flag whose value is a JSON object."""

    def __init__(self, *text, **items):
        super().__init__(*(json.loads(part) if isinstance(part, str) else part for part in text), **items)

    def copy(self) -> "JSON":
        """A new one with the same items."""
        return JSON(self)


def flag(default, text: str):
    """A field of a configuration: the default of its flag, and what --help says of it."""
    values = dict(default_factory=default.copy) if isinstance(default, dict) else dict(default=default)
    return HfArg(help=text, **values)


def parse_flags(config_class, tiny: dict, arguments: list[str], saved=None):
    """Flags to an instance of a dataclass; `tiny` gives other defaults where there is neither a GPU nor a --model.

    With --data of one's own the default --eval_data is none; with --resume the defaults are saved(resume, output_dir),
    the flags of that run. Raises UserError, with argparse's sentence for an unknown flag or a wrong type.
    """
    def raise_user_error(message: str):
        raise UserError(message)

    parser = HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = raise_user_error
    given = {argument.split("=")[0] for argument in arguments}
    if not torch.cuda.is_available() and "--model" not in given:
        parser.set_defaults(**tiny)
    if "--data" in given:
        parser.set_defaults(eval_data="")
    flags = vars(parser.parse_args(arguments))
    if flags.get("resume"):
        older = saved(flags["resume"], flags["output_dir"])
        chosen = {field.name for field in fields(config_class) if field.default is None} if "--algo" in given else ()
        parser.set_defaults(**{name: older[name] for name in older.keys() & flags.keys() - set(chosen)})
        flags = vars(parser.parse_args(arguments))
    return config_class(**flags)


def find_model(name: str, tp_size: int) -> tuple[str, int]:
    """A model's folder, fetched from the Hub if it is none, and its context in tokens. Raises UserError if unfit."""
    try:
        path = name if Path(name).is_dir() else snapshot_download(
            name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.txt"])
        config = AutoConfig.from_pretrained(path)
    except Exception as error:
        raise UserError(f"--model {name} is neither a model folder nor on the Hub: {brief(error)}") from error
    if config.model_type not in FAMILIES:
        raise UserError(f"--model {name} is a {config.model_type}; it must be one of {', '.join(FAMILIES)}")
    if not list(Path(path).glob("*.safetensors")):
        raise UserError(f"--model {name} has no weights: no *.safetensors in {path}")
    if getattr(config, "use_sliding_window", False):
        raise UserError(f"--model {name} attends within a sliding window, which is not implemented")
    for what in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        if getattr(config, what) % tp_size:
            raise UserError(f"--tp_size {tp_size} does not divide the model's {what} {getattr(config, what)}")
    return path, config.max_position_embeddings


def find_tokenizer(path: str):
    """The tokenizer of a model's folder. Raises UserError if it cannot make prompts, or end a turn; pad needs none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise UserError(f"--model {path}: its tokenizer cannot be loaded: {brief(error)}") from error
    if not tokenizer.chat_template:
        raise UserError(f"--model {path}: its tokenizer has no chat template; take an instruct model, or add one")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {path}: its tokenizer has no eos_token; name the token that ends a turn, such as "
                        f"<|im_end|>, in {Path(path) / 'tokenizer_config.json'}")
    return tokenizer


def load_rows(source: str):
    """Rows of "file[:split]" or "owner/name[/config][:split]"; a split may be a slice, such as train[:100].

    A file is .jsonl, .json or .parquet. Raises UserError where nothing can be read.
    """
    name, _, split = source.partition(":")
    kind, split = Path(name).suffix, split or "train"
    parts = name.split("/")     # owner, name and maybe a configuration of a Hub dataset
    try:
        if kind in (".jsonl", ".json"):
            rows = JSONRows(Path(name))
            slices = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
            rows.rows = [row for part in slices for row in rows.rows[part.from_:part.to]]
        elif kind == ".parquet":
            rows = load_dataset("parquet", data_files=name, split=split)
        elif Path(name).is_file():
            raise ValueError("a file must be .jsonl, .json or .parquet")
        else:
            rows = load_dataset("/".join(parts[:2]), "/".join(parts[2:]) or None, split=split)
    except Exception as error:
        raise UserError(f"--data {source} cannot be read, or is empty: {brief(error)}") from error
    if len(rows) == 0:
        raise UserError(f"--data {source} has no rows")
    return rows


class JSONRows:
    """Rows of a file with a JSON object a line, or with a list of them: as the file says, and new at each access.

    The loader of `datasets` changes some: a column of dates is no text, a large integer is rounded, and a line that is
    null ends the process. Raises ValueError for a line that is no object.
    """

    def __init__(self, path: Path):
        text = path.read_text(encoding="utf-8-sig")
        as_list = text.lstrip().startswith("[")
        self.rows = list(map(json.dumps, json.loads(text))) if as_list else text.split("\n")
        for number, row in enumerate(self.rows, 1):
            try:
                if row.strip() and not isinstance(json.loads(row), dict):
                    raise ValueError(f"{row:.40} is no JSON object")
            except ValueError as error:
                raise ValueError(f"{'row' if as_list else 'line'} {number}: {error}") from error
        self.rows = [row for row in self.rows if row.strip()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return json.loads(self.rows[index])


def check_prompts(datasets: list, encode, room: int):
    """Raises UserError for the first prompt that `make_prompt` cannot make. Ranks share the work."""
    for dataset in datasets:
        mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
        for index in tqdm(mine, desc="checking prompts", leave=False, disable=None, delay=2):
            make_prompt(dataset, index, encode, room)


def make_prompt(dataset, index: int, encode, room: int):
    """A row as a sample that begins with its prompt's ids, which are `encode(sample)`, [T].

    Raises UserError where the dataset or the chat template fails, and for over `room` tokens.
    """
    try:
        sample = dataset[index]
        sample.append(encode(sample), mask=0)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--data {dataset.source}: row {index} cannot be made a prompt: {type(error).__name__}: "
                        f"{brief(error)}") from error
    if len(sample.ids) > room:
        raise UserError(f"--data {dataset.source}: the prompt of row {index} has {len(sample.ids)} tokens; the model's "
                        f"context less --max_new_tokens leaves room for {room}")
    return sample


def prompt_order(draw: int, rows: int, config) -> list[tuple[int, int]]:
    """The prompts of a draw, from 1 on, as (place in the run, row): every epoch is a permutation of its own."""
    places = range((draw - 1) * config.prompts_per_step, draw * config.prompts_per_step)
    orders = {epoch: torch.randperm(rows, generator=torch.Generator().manual_seed(hash((config.seed, epoch)))).tolist()
              for epoch in {place // rows for place in places}}
    return [(place, orders[place // rows][place % rows]) for place in places]


def one_line(error: Exception) -> tuple[str, int]:
    """What to say of an error in place of a traceback, and the exit code; "" where only a traceback helps."""
    if isinstance(error, UserError | ConnectionError | TimeoutError):
        return str(error), 2
    if isinstance(error, torch.OutOfMemoryError):
        said, _, _ = brief(error).partition(". ")
        return (f"{said}: lower --tokens_per_micro_batch or mem_fraction_static in --sglang_args, or take --offload "
                "True; python -m tools.plan counts what fits"), 1
    return lost_contact(error) if isinstance(error, RuntimeError) else "", 1


def lost_contact(error: RuntimeError) -> str:
    """What a broken connection between ranks means, in one line; empty for any other error. gloo's have no type."""
    said = brief(error)
    if "gloo/transport" not in said:
        return ""
    detail = said.partition("] ")[2].split(". ")[0]
    if "connectFullMesh" in said:
        return f"the ranks cannot reach each other ({detail}); set GLOO_SOCKET_IFNAME to each machine's network device"
    return (f"another rank ended, or was silent for 3 times --engine_timeout ({detail}); see what it said, maybe on "
            "its own machine")


def brief(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
