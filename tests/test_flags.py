"""Tests of Config and the command line: defaults, flags of recipes, mistakes, --help."""

import re
import sys
from dataclasses import dataclass, fields

import pytest

import train
from extras import embedded, help
from recipes.one_step_off import OneStepOffConfig
from tests.conftest import HERE, Config, parse_flags
from train import Trainer, UserError, flag


def test_a_bare_command_on_a_cpu_is_the_embedded_job(monkeypatch):
    monkeypatch.setattr(train, "GPU", False)
    config = parse_flags(Config, [])
    assert config.model.endswith("assets/tiny") and config.data.endswith("countdown/train.jsonl")
    assert config.eval_data.endswith("countdown/test.jsonl") and (config.steps, config.lr) == (30, 1e-4)
    assert parse_flags(Config, ["--steps", "7"]).steps == 7
    assert parse_flags(Config, ["--model", "x"]) == parse_flags(Config, ["--model=x"]) == Config(model="x")
    for data in (["--data", "mine.jsonl"], ["--data=mine.jsonl"]):  # is evaluated only by own --eval_data
        own = parse_flags(Config, data)
        assert own.model.endswith("assets/tiny") and (own.data, own.eval_data) == ("mine.jsonl", "")
        assert parse_flags(Config, [*data, "--eval_data", "b"]).eval_data == "b"
    monkeypatch.setattr(train, "GPU", True)
    assert parse_flags(Config, []) == Config()


def test_without_a_gpu_and_without_assets_no_large_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "FILE", tmp_path / "embedded.json")
    monkeypatch.setattr(train, "GPU", False)
    with pytest.raises(UserError, match="no GPU, and no assets/embedded.json .*: set --model and --data"):
        parse_flags(Config, ["--data", "mine.jsonl"])
    assert parse_flags(Config, ["--model", "x"]).model == "x"


def test_a_recipe_changes_defaults_and_flags_win():
    @dataclass
    class Recipe(Config):
        lr: float = flag(0.5, "peak learning rate")
        judge: str = flag("", "name of a judge")

    assert parse_flags(Recipe, ["--model", "x"]).lr == 0.5
    config = parse_flags(Recipe, ["--model", "x", "--lr", "2", "--judge", "me"])
    assert (config.lr, config.judge, config.steps) == (2.0, "me", Config.steps)


@pytest.mark.parametrize(
    "arguments, file",
    [("--resume auto", "checkpoint"), ("--save_every=2", "checkpoint"), ("--offload", "offload")]
    + [("--tis_cap 2", "variants"), ("--wandb=online", "wandb_log"), ("--no_dither", "dither")]
    + [("--updates-per-step 2", "updates"), ("--max_turns=2", "turns"), ("--no-dither", "dither")]
    + [(unknown, "") for unknown in ("--lrr 1", "--step 1", "x", "a(b", "--no", "--res", "--extras")],
)
def test_unknown_flags_and_those_of_a_missing_file_are_refused_in_one_line(arguments, file):
    needed = f"requires extras/{file}.py and __init__.py" if file else "is unknown; --help lists all flags"
    with pytest.raises(UserError, match=f"^{re.escape(arguments)} {needed}$"):
        train.parse_flags(train.Config, ["--model", "m", *arguments.split()])


@pytest.mark.parametrize("arguments", [["--lr", "a"], ["--device", "no"], ["--steps", "1.5"]])
def test_wrong_values_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_flags(Config, arguments)
    said = capsys.readouterr().err
    assert arguments[0].strip("-") in said and len(said) < 300


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
def test_every_flag_has_a_noun_phrase_as_help(field):
    text = field.metadata["help"]
    assert 8 < len(text) < 90 and not text.endswith(".") and "%" not in text
    verbs = "use run set enable disable give take whether divide normalize sample evaluate save recompute is"
    assert text.split()[0].lower() not in verbs.split()


def help_of(config_class, monkeypatch, capsys) -> str:
    parser_class = help.extend(Trainer).parser_class
    monkeypatch.setattr(train, "GPU", False)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        train.parse_flags(config_class, ["--help"], parser_class)
    return capsys.readouterr().out


def test_help_shows_every_flag_once_in_groups(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as without python -m
    text = help_of(Config, monkeypatch, capsys)
    shown = re.findall(r"^  --(\w+) ", text, re.MULTILINE)
    assert sorted(shown) == sorted(field.name for field in fields(Config))
    assert shown[: len(help.FIRST)] == help.FIRST
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    sections = ["task and rollout", "algorithm and optimizer", "machine", "run"]
    core, files = titles[:5], titles[5:]
    assert core == ["the flags that people change", *sections]
    assert "extras/checkpoint.py" in files and all(re.fullmatch(r"extras/\w+\.py", file) for file in files)
    assert "assets/embedded.json" in text and str(HERE.parent) not in text and "--no_" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_a_recipe_names_its_own_flags_apart(monkeypatch, capsys):
    text = help_of(OneStepOffConfig, monkeypatch, capsys)
    _, _, own = text.partition("flags of this recipe:\n")
    assert re.findall(r"--(\w+) ", own.partition("\n\n")[0]) == ["max_staleness"]
    assert text.count("--max_staleness ") == 1
