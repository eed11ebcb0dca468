"""Tests of tools/mutants.py: which mutants are drawn, and which tests each one gets."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import mutants

CODE = """\
LIMIT = 3


def double(x):
    if x > LIMIT:
        return (
            x
            + x
        )
    return 0
"""


def item(file: str, line: int, operator: str):
    """A work item of cosmic-ray, as far as it is used."""
    mutation = SimpleNamespace(module_path=Path(file), start_pos=(line, 0), operator_name=operator)
    return SimpleNamespace(mutations=(mutation,))


def test_places_are_drawn_in_proportion_once_and_with_a_seed():
    """Twelve mutations of one operator at a place do not make the place twelve times as likely."""
    items = [item("a.py", line, f"{i}") for line in range(30) for i in range(12)]
    items += [item("b.py", line, "0") for line in range(10)]
    drawn = mutants.draw(items, 8, 0)
    places = [(str(one.mutations[0].module_path), one.mutations[0].start_pos) for one in drawn]
    assert len(set(places)) == 8 and Counter(file for file, _ in places) == {"a.py": 6, "b.py": 2}
    assert drawn == mutants.draw(items, 8, 0) != mutants.draw(items, 8, 1)
    assert len(mutants.draw(items, 99, 0)) == 40


@pytest.fixture
def reach(tmp_path):
    """A map of CODE with three tests, of which the last has a fixture that another one made."""
    (tmp_path / "copy0").mkdir()
    (tmp_path / "copy0/code.py").write_text(CODE)
    (tmp_path / "fast").mkdir()
    reached = {
        "code.py": {"1": [""], "4": [""], "5": ["t_small", "t_large"], "8": ["t_large"], "10": ["made"]}
    }
    tests = {"t_small": (2.0, []), "t_large": (1.0, []), "t_made": (3.0, ["made"])}
    tests = {name: {"seconds": s, "contexts": [name, *more]} for name, (s, more) in tests.items()}
    (tmp_path / "fast/map.json").write_text(json.dumps({"reached": reached, "tests": tests}))
    return mutants.Map(tmp_path, "fast")


@pytest.mark.parametrize(
    "line, expected",
    [
        (5, ["t_large", "t_small"]),  # the condition alone, the fastest test first
        (7, ["t_large"]),  # any line of a statement stands for all of it
        (10, ["t_made"]),  # reached by the fixture of a test
        (1, ["t_large", "t_small", "t_made"]),  # at import: every test of the file
        (4, ["t_large", "t_small", "t_made"]),
    ],
)
def test_a_mutant_gets_the_tests_that_reach_its_statement(reach, line, expected):
    assert reach.reaching("code.py", line) == expected


def test_a_file_that_no_test_reaches_has_none(reach):
    (reach.copy / "other.py").write_text(CODE)
    assert reach.reaching("other.py", 5) == []
