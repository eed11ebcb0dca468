"""Tests of main: extras are optional and wrap the Trainer in order, mistakes end in one line."""

import sys
from types import SimpleNamespace

import pytest

import train
from train import UserError


def test_extras_are_optional_unless_a_flag_requires_them(monkeypatch):
    assert train.load_extra("local_engine").Engine and train.load_extra("no_such_extra") is None
    with pytest.raises(
        UserError, match="^extras/no_such_extra.py is missing beside train.py: --engine requires it$"
    ):
        train.load_extra("no_such_extra", "--engine")
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert train.load_extra("monitor") is None


def test_main_prints_a_users_error_as_one_line(monkeypatch, capsys):
    def fit(self):
        raise UserError("--tp_size 3 does not divide\n   2 processes")

    codes = []
    monkeypatch.setattr(train, "load_extra", lambda name: None)
    monkeypatch.setattr(train.os, "_exit", lambda code: codes.append(code) or sys.exit(code))
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "x"])
    trainer = type("Failing", (), {"__init__": lambda self, *args: None, "fit": fit})
    with pytest.raises(SystemExit):
        train.main(trainer=trainer)
    assert codes == [2]
    assert capsys.readouterr().err == "train.py: --tp_size 3 does not divide 2 processes\n"


def test_main_wraps_the_trainer_in_the_extras_that_are_there(monkeypatch):
    class Core:
        def __init__(self, *args):
            Core.made = args

        def fit(self):
            Core.wrapped = [base.__name__ for base in type(self).__mro__]

    def load(name):
        missing = name in ("compile", "checks")
        return None if missing else SimpleNamespace(extend=lambda trainer: type(name, (trainer,), {}))

    monkeypatch.setattr(train, "load_extra", load)
    monkeypatch.setattr(train.dist, "barrier", lambda: None)
    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "x", "--steps", "3"])
    train.main(reward_fn=1, env_step=2, dataset=3, trainer=Core)
    extras = [name for name in train.EXTRAS.split() if name not in ("compile", "checks")]
    assert Core.wrapped == [*reversed(extras), "Core", "object"] and Core.made[1:] == (3, 1, 2)
    assert (Core.made[0].model, Core.made[0].steps) == ("x", 3)


@pytest.mark.parametrize(
    "inner, outer",
    [
        ("balance", "monitor"),  # which counts the tokens that this rank really runs through
        ("offload", "monitor"),  # whose seconds contain the moves
        ("monitor", "checkpoint"),  # which saves the monitor's state after a step is logged
        ("gate", "checkpoint"),  # which resumes the gate's number of pushes
        ("checkpoint", "checks"),  # which turn errors of everything else into one line
    ],
)
def test_extras_wrap_each_other_in_an_order_that_matters(inner, outer):
    names = train.EXTRAS.split()
    assert names.index(inner) < names.index(outer)
