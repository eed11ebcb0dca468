"""README.md and docs/ keep in step with the code: what they quote is there, what they name exists."""

import inspect
import re
import textwrap

import pytest

import train
from tests.conftest import HERE

TEXTS = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]
CODE = "\n".join(path.read_text() for path in HERE.rglob("*.py") if ".venv" not in path.parts)
KNOWN = {name for found in re.findall(r"\b(\w+)(?:: |=)|[\"']--(\w+)[\"']", CODE) for name in found}
FOREIGN = {  # flags of torchrun, pip, pytest, ruff and other programs, and placeholders
    *("standalone", "nproc_per_node", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("master_addr", "master_port", "check", "something", "old", "help", "durations", "host", "port"),
}


@pytest.mark.parametrize("function", [train.RLDataset.__getitem__, train.reward_fn])
def test_the_readme_quotes_the_two_functions_to_edit(function):
    assert textwrap.dedent(inspect.getsource(function)) in (HERE / "README.md").read_text()


def test_the_readme_is_short():
    assert len((HERE / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_flag_that_a_text_names_exists(path):
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]*)(?![\w-])", path.read_text()))
    assert named - FOREIGN <= KNOWN


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_file_that_a_text_names_exists(path):
    named = set(
        re.findall(r"\b((?:extras|recipes|tools|bench|tests|docs|assets)/[\w/]+\.\w+)", path.read_text())
    )
    assert not {name for name in named if "NAME" not in name and not (HERE / name).exists()}
    modules = set(re.findall(r"-m ((?:recipes|tools|bench)\.\w+)", path.read_text()))
    modules -= {"recipes.NAME", "recipes.name", "bench.NAME", "tools.NAME"}
    assert not {name for name in modules if not (HERE / f"{name.replace('.', '/')}.py").exists()}
