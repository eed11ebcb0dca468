"""train.py and rewards.py alone, or with the local engine beside them: the screen and the exit code."""

import json
import shutil

import pytest

from tests.conftest import COUNTDOWN, HERE, TINY, random_model, run

SMALL = ["--model", str(TINY), "--data", str(COUNTDOWN / "train.jsonl"), "--steps", "1", "--eval_every", "0"]
SMALL += ["--prompts_per_step", "4", "--group_size", "2", "--max_new_tokens", "8", "--device", "cpu"]
# One interpreter imports train.py once, and forks for each command line.
DRIVER = """
import json, os, sys
import train

def typo(sample):
    return lenght(sample.text)

answers = {}
for name, arguments in json.load(open("cases.json")).items():
    child = os.fork()
    if child == 0:
        log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.argv = ["train.py", *arguments]
        train.main(**{"reward_fn": typo} if name.startswith("typo") else {})
        os._exit(0)
    answers[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), open(f"{name}.log").read()]
json.dump(answers, open("answers.json", "w"))
"""
CASES = {
    "resume": [*SMALL, "--output_dir", "run", "--resume", "auto"],
    "unknown": [*SMALL, "--lrr", "1"],
    "bare": [],
    "bare_data": ["--data", "mine.jsonl"],
    "typo": [*SMALL, "--output_dir", "typo"],
    "too_long": [*SMALL, "--max_new_tokens", "1020", "--output_dir", "long"],
    "group_of_1": [*SMALL, "--group_size", "1", "--output_dir", "one"],
    "trains": [*SMALL, "--output_dir", "run"],
    "hybrid": [*SMALL, "--model", "hybrid"],
    "again": [*SMALL, "--output_dir", "run"],
}


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """A folder with three files, and what each of CASES ended in there: (exit code, screen)."""
    folder = tmp_path_factory.mktemp("lone")
    (folder / "extras").mkdir()
    for name in ("train.py", "rewards.py", "extras/local_engine.py"):
        shutil.copy(HERE / name, folder / name)
    random_model(folder / "hybrid", "qwen3_5", max_position_embeddings=1024)
    (folder / "cases.json").write_text(json.dumps(CASES))
    done = run("-c", DRIVER, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize(
    "name, said",
    [
        ("resume", "--resume auto requires extras/checkpoint.py and __init__.py"),
        ("unknown", "--lrr 1 is unknown; --help lists all flags"),
        ("bare", "no GPU, and no assets/embedded.json for CPUs: set --model and --data"),
        ("bare_data", "no GPU, and no assets/embedded.json for CPUs: set --model and --data"),
        ("too_long", "all prompts are too long for the model's context: lower --max_new_tokens"),
        ("group_of_1", "--group_size must be 2 or more"),
        ("hybrid", "No module named 'extras.hybrid'"),
        ("again", "--output_dir run already holds a run"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(lone, name, said):
    code, screen = lone[1][name]
    (line,) = [line for line in screen.splitlines() if line.startswith("train.py: ")]
    assert said in line and code == 2 and "Traceback" not in screen
    if name not in ("too_long", "group_of_1", "hybrid", "again"):  # these start a run first
        assert screen.strip() == line


def test_a_typo_in_the_reward_is_shown_and_ends_the_run(lone):
    folder, answers = lone
    code, screen = answers["typo"]
    assert code == 2 and screen.count("lenght(sample.text)") <= 2
    assert screen.count("A sample failed; its group is left out of the loss:") == 1
    assert "NameError: name 'lenght' is not defined" in screen
    (line,) = [line for line in screen.splitlines() if line.startswith("train.py: ")]
    assert "8 of 8 samples failed, too many: " in line and "in typo" in line
    assert not (folder / "typo/model").exists()


def test_the_first_run_stays_as_it_was(lone):
    folder, answers = lone
    assert answers["trains"][0] == 0
    steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").open()]
    assert steps == [0, 1] and (folder / "run/model/config.json").exists()
