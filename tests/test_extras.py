"""Tests of main and extras/__init__.py: extras are optional, wrap the Trainer in order, declare flags."""

import importlib
import re
import sys
from dataclasses import dataclass, fields
from types import ModuleType

import pytest

import extras
import train
from tests.conftest import HERE
from train import Config, Trainer, UserError, flag

MODULES = {name: importlib.import_module(f"extras.{name}") for name in extras.ORDER}


def test_a_foreign_module_called_extras_is_none_of_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    monkeypatch.setitem(sys.modules, "extras", ModuleType("extras"))  # no package
    made = run_main(monkeypatch, ["--model", "x"])
    assert type(made["config"]).__name__ == "Config" and not hasattr(made["config"], "resume")


def run_main(monkeypatch, arguments: list[str], **parts) -> dict:
    """Runs main with a Trainer that only notes what it is made with."""
    made = {}

    class Core:
        parser_class = Trainer.parser_class

        def __init__(self, config, *arguments):
            made.update(config=config, arguments=arguments)

        def fit(self):
            """Trains nothing."""

    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    train.main(trainer=Core, **parts)
    return made


@pytest.mark.parametrize(
    "error, said",
    [(UserError("--tp_size 3 does not divide\n   2 processes"), "--tp_size 3 does not divide 2 processes")]
    + [(KeyboardInterrupt(), "interrupted"), (ModuleNotFoundError("No module named 'sglang'"),) * 2],
)
def test_main_prints_a_users_error_as_one_line(monkeypatch, capsys, error, said):
    def fit(self):
        raise error

    codes = []
    monkeypatch.setattr(train.os, "_exit", lambda code: codes.append(code) or sys.exit(code))
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "x"])
    monkeypatch.setattr(extras, "ORDER", [])
    trainer = type("Failing", (Trainer,), {"__init__": lambda self, *args: None, "fit": fit})
    with pytest.raises(SystemExit):
        train.main(trainer=trainer)
    assert codes == [2]
    assert capsys.readouterr().err == f"train.py: {said}\n"


def test_main_passes_on_what_a_recipe_replaces(monkeypatch):
    monkeypatch.setattr(extras, "ORDER", [])
    parts = {"dataset": 3, "reward_fn": 1, "env_step": 2}
    made = run_main(monkeypatch, ["--model", "x", "--steps", "3"], **parts)
    assert made["arguments"] == (3, 1, 2) and (made["config"].model, made["config"].steps) == ("x", 3)


def test_extras_wrap_the_trainer_in_order(monkeypatch):
    names = ["variants", "offload", "monitor", "gate"]
    monkeypatch.setattr(extras, "ORDER", names)
    _, trainer = extras.extend(Config, type("Core", (), {}))
    wrapped = list(dict.fromkeys(base.__module__ for base in trainer.__mro__[:-2]))
    assert wrapped == [f"extras.{name}" for name in reversed(names)]


def test_missing_extras_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "offload.py").touch()
    assert extras.load_all() == [MODULES["offload"]]
    names = {field.name for field in fields(extras.add_flags(Config))}
    assert names - {field.name for field in fields(Config)} == {"offload"}


def test_every_file_in_extras_has_its_place():
    files = {path.stem for path in (HERE / "extras").glob("*.py")}
    assert files == {*extras.ORDER, "__init__", "local_engine", "servers", "sandbox"}


def test_train_names_the_file_of_every_flag_that_extras_declare():
    found = re.findall(r"(\w+)\.py((?:\s+--\w+)+)", train.__doc__)
    named = {name: sorted(re.findall(r"--(\w+)", flags)) for name, flags in found}
    flags = {name: module.Flags for name, module in MODULES.items() if hasattr(module, "Flags")}
    declared = {name: sorted(field.name for field in fields(owner)) for name, owner in flags.items()}
    assert named == declared
    core = {field.name for field in fields(Config)}
    assert not core & {name for flags in declared.values() for name in flags}


def test_a_recipe_may_declare_flags_of_extras_in_any_order_and_its_defaults_have_priority():
    @dataclass
    class Recipe(Config, MODULES["offload"].Flags, MODULES["dither"].Flags, MODULES["variants"].Flags):
        offload: bool = flag(True, "as in extras/offload.py")
        judge: str = flag("me", "name of a judge")

        def __post_init__(self):
            self.judge += "!"

    found = train.parse_flags(extras.add_flags(Recipe), ["--model", "x"])
    assert (found.offload, found.judge, found.save_every) == (True, "me!", 0)
    found = train.parse_flags(extras.add_flags(Recipe), "--model x --offload False --kl_coef 2".split())
    assert (found.offload, found.kl_coef) == (False, 2)


INNER_AND_OUTER = {
    ("variants", "compile"),  # which compiles the reference, too
    ("variants", "offload"),
    ("wandb_log", "monitor"),  # whose numbers are logged
    ("balance", "monitor"),  # which counts the tokens that this rank really runs through
    ("offload", "monitor"),  # whose seconds contain the moves
    ("offload", "checkpoint"),  # which saves what a rollout that a signal ends has brought back
    ("checkpoint", "embedded"),  # whose flags precede those of a checkpoint
    ("checkpoint", "checks"),  # which turn errors of everything else into one line
}


def test_extras_wrap_each_other_in_an_order_that_matters():
    place = extras.ORDER.index
    assert not [pair for pair in INNER_AND_OUTER if place(pair[0]) > place(pair[1])]
