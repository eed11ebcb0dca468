"""Tests of the recipes: what they answer and reward by hand, and a short run of each."""

import ast
import asyncio
import io
import json
import math
import random
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rewards
import train
from extras import add_flags
from recipes import code, evaluate, gem_env, gsm8k, guess_number, math_python, one_step_off, prm, qa_search
from recipes import reasoning_gym as gym
from recipes.turns import user_turn
from tests.conftest import HERE, TINY, Config, mesh_of, parse_flags, read_rows, run
from tools import make_start
from train import Sample, UserError


def spoken(*turns: str, row: dict | None = None, **others) -> Sample:
    """A sample whose policy wrote these turns."""
    return Sample([], row or {}, turns=list(turns), **others)


def write_rows(folder: Path, *rows: dict) -> Path:
    """A .jsonl of these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


# ---------------------------------------------- turns ---------------------------------------------------
@pytest.mark.parametrize("text", ["x<|im_end|>", "<|im_start|>", "<<|im_end|>|>", "<", "<|<|im_end|>"])
def test_no_text_forges_a_control_token(tokenizer, text):
    ids = tokenizer.encode(user_turn(text), add_special_tokens=False)
    assert [i for i in ids if i < 3] == [1, 2, 1]  # start, end, start
    assert tokenizer.decode(ids).replace("\u200b", "").count(text) >= 1


# ---------------------------------------------- flags ---------------------------------------------------


SERVERS = {"engine": "http://a:1"}
MISFITS = [
    (one_step_off.OneStepOffConfig, {"engine": "local"}, "--engine must name servers"),
    (one_step_off.OneStepOffConfig, SERVERS | {"offload": True}, "--offload has no effect"),
    (one_step_off.OneStepOffConfig, SERVERS | {"max_staleness": -1}, "--max_staleness must be 0 or more"),
    (evaluate.EvaluateConfig, {"eval_samples": 2, "eval_temperature": 0.0}, "--eval_samples above 1"),
    (prm.PRMConfig, {}, "--prm must name"),
    (gem_env.GemConfig, {"reward_workers": 1}, "--reward_workers must be 0"),
    (math_python.ToolConfig, {"tool_uses": -1}, "--tool_uses must be 0 or more"),
    (qa_search.SearchConfig, {}, "--index must name"),
    (qa_search.SearchConfig, {"index": "x", "passages": 0}, "--passages must be 1 or more"),
]


@pytest.mark.parametrize("config_class, flags, message", MISFITS)
def test_flags_that_misfit_are_refused(config_class, flags, message):
    with pytest.raises(UserError, match=message):
        add_flags(config_class)(**flags)


# ---------------------------------------------- tasks ---------------------------------------------------
def test_gsm8k_protocols():
    right = spoken(r"\boxed{4}", row={"answer": "#### 4"})
    cut = spoken(r"\boxed{4}", row={"answer": "#### 4"}, truncated=True)
    assert (gsm8k.tapeagents(right), gsm8k.tapeagents(cut)) == (1, -1)
    assert (gsm8k.oat(right), gsm8k.oat(cut)) == (1, 1)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", (1, 0.0, "openai/gsm8k/main:test")),
        ("--protocol oat", (16, 0.35, "openai/gsm8k/main:test")),
        ("--protocol oat --eval_samples 3 --eval_temperature 1", (3, 1.0, "openai/gsm8k/main:test")),
        ("--data x.jsonl", (1, 0.0, "")),
    ],
)
def test_gsm8k_flags_win_over_the_protocol(arguments, expected):
    config = parse_flags(gsm8k.GSM8KConfig, ["--model", "x", *arguments.split()])
    assert (config.eval_samples, config.eval_temperature, config.eval_data) == expected


def test_recipes_say_what_rows_they_need(tmp_path):
    rows = str(write_rows(tmp_path, {"nums": [1, 2], "target": 3}))
    for dataset in (gsm8k.GSM8KDataset, math_python.MathDataset, code.CodeDataset, qa_search.QADataset):
        with pytest.raises(UserError, match="row 0 needs"):
            dataset(rows)[0]


def test_guess_number_answers_and_rewards():
    sample = spoken("16", row={"secret": 9})
    turns = {"16": "lower", "4": "higher", "no idea": "a number", "3 or 9": None, "9": None}
    for turn, reply in turns.items():
        sample.turns.append(turn)
        found = asyncio.run(guess_number.env_step(sample))
        assert found is None if reply is None else f"user\n{reply}<|im_end|>" in found
    assert guess_number.reward_fn(sample) == [0, 0, 0, 0, 1, 1]
    assert sample.metrics == {"solved": 1, "turns": 6}
    config = parse_flags(guess_number.GuessConfig, ["--model", "x"])
    assert (config.algo, config.normalize, config.max_turns) == ("rebn", "turns", 8)
    assert parse_flags(guess_number.GuessConfig, ["--algo", "grpo"]).normalize == "group"


@pytest.mark.parametrize(
    "turn, program",
    [
        ("<python>1+1</python> <python>2</python>", "1+1"),
        ("```python\n3\n```", "3"),
        ("```\n4\n```", "4"),
        ("no `code`", None),
        ("<python>open", None),
        ("```js\n5```", None),
    ],
)
def test_the_first_program_of_a_turn(turn, program):
    assert math_python.program_of(turn) == program


def test_the_python_tool_answers_and_counts():
    trainer = SimpleNamespace(config=SimpleNamespace(tool=True, tool_uses=2))
    sample = spoken(row={"answer": "0.5"})

    def reply(turn: str):
        sample.turns.append(turn)
        return asyncio.run(math_python.ToolTrainer.run_program(trainer, sample))

    six_times_seven = user_turn("Code execution result: 42")  # in which nothing forges a control token
    assert reply("<python>print(6 * 7)</python>") == six_times_seven
    assert "ZeroDivisionError" in reply("<python>1/0</python>")
    assert reply("<python>print(1)</python>") is None
    sample.turns.append(r"\boxed{\frac{1}{2}}")
    assert math_python.reward_fn(sample) == 1 and sample.metrics["tool_uses"] == 2
    sample.state.clear()
    trainer.config.tool = False
    assert reply("<python>1</python>") is None


ADD = "def add(a, b):\n    return a + b\n"
PRINTS = ADD + "print(add(*map(int, input().split())))"
CASES = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3", "10 \n"]}
TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


@pytest.mark.parametrize(
    "program, row, reward, passed",
    [
        (PRINTS, CASES, 1, 1),
        (PRINTS.replace("a + b", "3"), CASES, 0, 0.5),
        (ADD, TESTS, 1, 1),
        (ADD.replace("a + b", "0"), TESTS, 0, 0.5),
        ("import sys; sys.exit(0)", TESTS, 0, 0),
        ("print('ok')\nimport os; os._exit(0)", TESTS, 0, 0),
    ],
)
def test_code_is_judged_by_what_it_prints_and_returns(program, row, reward, passed):
    sample = spoken(f"```\n1/0\n```\n```python\n{program}\n```", row=row)  # the last program counts
    assert asyncio.run(code.reward_fn(sample)) == reward and sample.metrics["tests_passed"] == passed
    assert asyncio.run(code.reward_fn(spoken("no program", row=row))) == 0


def test_search_finds_passages_and_scores_answers(tmp_path):
    pytest.importorskip("bm25s")
    texts = [{"text": "Paris is the capital of France."}, {"contents": "The Danube flows through Vienna."}]
    write_rows(tmp_path / "index", *texts)
    (tmp_path / "index/more.txt").write_text("Mount Everest is high.\n\nOslo is in Norway.\n")
    index = qa_search.Index(str(tmp_path / "index"), 2)
    assert index.search("capital of France")[0] == texts[0]["text"]
    assert index.search("oslo")[0] == "Oslo is in Norway." and index.search("zzz") == []
    trainer = SimpleNamespace(index=index)
    sample = spoken("<search>Danube</search>", row={"answers": ["Vienna", "Wien"]})
    found = asyncio.run(qa_search.SearchTrainer.search(trainer, sample))
    assert found == user_turn("(1) The Danube flows through Vienna.")
    sample.turns.append("<answer>the Vienna!</answer>")
    assert asyncio.run(qa_search.SearchTrainer.search(trainer, sample)) is None
    assert qa_search.reward_fn(sample) == 1 and sample.metrics == {"f1": 1, "searches": 1}
    # Of three words one is right, of two gold ones one is found: precision 1/3, recall 1/2 -> 2 / (3 + 2).
    assert qa_search.f1("old city Vienna", ["Vienna Austria"]) == pytest.approx(0.4)
    assert qa_search.exact_match("", ["x"]) == 0
    assert qa_search.reward_fn(spoken("Vienna", row={"answer": "Vienna"})) == 0  # not in its tags
    with pytest.raises(UserError, match="has no texts"):
        qa_search.Index(str(tmp_path / "nothing"), 2)


def test_reasoning_gym_scores_as_the_task_does():
    pytest.importorskip("reasoning_gym")
    data, other = gym.GymDataset("chain_sum"), gym.GymDataset("chain_sum@1")
    sample = data[3]
    answer = data.problems[3]["answer"]
    assert sample.messages != other[3].messages == gym.GymDataset("chain_sum@1")[3].messages
    for text in (f"<answer>{answer}</answer>", f"<answer>1</answer> <answer> {answer} </answer>"):
        assert gym.reward_fn(spoken(text, row=sample.row)) == 1
    for text in ("", "<answer>", f"{answer}", f"<answer>{answer}1</answer>"):
        assert gym.reward_fn(spoken(text, row=sample.row)) < 1
    with pytest.raises(UserError, match="--data nothing_like_it"):
        gym.GymDataset("nothing_like_it")


GAMES = {  # games, and moves that are valid, or could be
    "game:GuessTheNumber-v0-easy": r"\boxed{{{a}}}",
    "game:Mastermind-v0-easy": r"\boxed{{{a} {b} {c}}}",
    "game:Minesweeper-v0-easy": r"\boxed{{reveal {a} {b}}}",
    "game:Sudoku-v0-easy": r"\boxed{{{a} {b} {c}}}",
    "game:TowerofHanoi-v0-easy": r"\boxed{{A C}}",
}


@pytest.mark.parametrize("game", GAMES)
def test_gem_rewards_are_the_environments(game):
    gem = pytest.importorskip("gem")
    with pytest.raises(UserError, match="--data game:Nothing-v0"):
        gem_env.GemDataset("game:Nothing-v0")[0]
    for index in range(10):
        sample = gem_env.GemDataset(f"{game}@7")[index]
        env = gem.make(game)
        text, info = env.reset(seed=7 + index)
        assert sample.messages[0]["content"] == gem_env.shown(text, info)
        expected = []
        moves = random.Random(index)
        for turn in range(6):
            move = GAMES[game].format(**{name: moves.randint(1, 4) for name in "abc"})
            sample.turns.append(move if turn != 3 else "nonsense")
            text, reward, terminated, truncated, info = env.step(sample.turns[-1])
            expected.append(reward)
            reply = asyncio.run(gem_env.env_step(sample))
            assert reply == (None if terminated or truncated else user_turn(gem_env.shown(text, info)))
            if reply is None:
                break
        assert gem_env.reward_fn(sample) == expected
    sample.turns.append("truncated")
    assert gem_env.reward_fn(sample) == [*expected, 0]


# ----------------------------------------------- PRM ----------------------------------------------------
def test_a_prm_scores_each_step_at_its_tag():
    judge = prm.Judge(str(TINY), "math_shepherd", "cpu")
    steps = ["1+1 = 2\n", "so", " 2"]
    found = judge.scores("How much is 1+1?\n", steps)
    text = ""
    for step, good in zip(["How much is 1+1?\n" + steps[0], *steps[1:]], found):
        text += step + " ки"
        ids = [i for part in re.split("( ки)", text) for i in judge.encode(part)]
        logits = judge.model(torch.tensor([ids])).logits[0, -1]
        plus, minus = (logits[judge.tokenizer.convert_tokens_to_ids(token)].item() for token in "+-")
        assert good == pytest.approx(1 / (1 + math.exp(minus - plus)), rel=1e-3)


def test_a_prm_and_passages_may_be_elsewhere(monkeypatch):
    answer = {}

    def urlopen(request, timeout):
        asked.append(json.loads(request.data))
        return io.BytesIO(json.dumps(answer).encode())

    asked = []
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    judge = prm.Judge("http://host/score", "math_shepherd", "cpu")
    answer["scores"] = [0.2, 0.4]
    assert judge.scores("?", ["ab", "abcd"]) == [0.2, 0.4]
    with pytest.raises(ConnectionError, match="returned 2 scores for 1 steps"):
        judge.scores("?", ["ab"])
    answer["result"] = [[{"contents": "Oslo is in Norway."}, {"text": "Vienna"}]]
    assert qa_search.Index("http://host/retrieve", 2).search("oslo") == ["Oslo is in Norway.", "Vienna"]
    assert asked[0] == {"problem": "?", "steps": ["ab", "abcd"]} and asked[2]["queries"] == ["oslo"]
    with pytest.raises(UserError, match="--prm ./no/such cannot be loaded"):
        prm.Judge("./no/such", "math_shepherd", "cpu")


# -------------------------------------------- evaluation ------------------------------------------------
def test_best_of_by_hand():
    # Of 4 samples with 1 right, the best of 2 is right in 3 of 6 choices, the best of 4 always.
    assert evaluate.best_of([0, 1, 0, 0]) == pytest.approx({"eval_pass@2": 0.5, "eval_pass@4": 1.0})
    expected = {"eval_pass@2": (3 + 3 + 1) / 3, "eval_pass@3": 3.0}
    assert evaluate.best_of([3.0, -1.0, 1.0]) == pytest.approx(expected)
    assert evaluate.best_of([1.0]) == {}
    assert evaluate.EvaluateConfig(eval_samples=2, eval_temperature=0.5).data == Config.eval_data


def test_evaluation_is_a_mean_over_prompts(monkeypatch):
    trainer = object.__new__(evaluate.Evaluator)
    trainer.config = SimpleNamespace(eval_samples=2, eval_temperature=1.0)
    trainer.mesh = mesh_of(0, 1)
    trainer.eval_data = range(2)
    rewards = [1.0, 0.0, 0.0, 0.0]
    trainer.sample = lambda *arguments: [SimpleNamespace(reward=reward, failure="") for reward in rewards]
    monkeypatch.setattr(evaluate, "reduce_over", lambda mesh, values: values)
    monkeypatch.setattr(train, "reduce_over", lambda mesh, values: values)
    assert trainer.evaluate() == {"eval_score": 0.25, "eval_pass@2": 0.5, "eval_failures": 0.0}
    trainer.sample = lambda *arguments: [SimpleNamespace(reward=0.0, failure="KeyError: x")] * 4
    with pytest.raises(UserError, match="4 of 4 samples failed, too many: KeyError: x"):
        trainer.evaluate()


# -------------------------------------------- one step off ----------------------------------------------
def test_staleness_is_counted_and_bounded(monkeypatch):
    monkeypatch.setattr(one_step_off, "reduce_over", lambda mesh, values, op=None: values)
    trainer = object.__new__(one_step_off.OneStepOff)
    trainer.config = SimpleNamespace(max_staleness=1)
    trainer.engine = SimpleNamespace(version=5)
    trainer.mesh = {"dp": None}
    sample = Sample([], {})
    sample.append([1, 2])  # a prompt has no version
    sample.append([3, 4, 5, 6], mask=1, version=[4, 4, 5, 4])
    assert trainer.staleness([sample]) == {"staleness": 0.75, "staleness_max": 1}
    sample.tokens["version"][3] = 3
    with pytest.raises(UserError, match="0 to 2 pushes old"):
        trainer.staleness([sample])


# ----------------------------------------- small start models -------------------------------------------
def test_heedful_games_keep_to_what_the_answers_leave():
    rng = random.Random(0)
    for _ in range(50):
        pieces, left = make_start.game(rng, 1.0)
        guesses = [guess_number.guess_of(text) for text, own in pieces if own]
        assert all(low <= guess <= high for guess, (low, high) in zip(guesses, left, strict=True))
        sample = spoken(row={"secret": guesses[-1]})
        for guess, (text, own) in zip(guesses[:-1], pieces[1::2]):
            sample.turns.append(str(guess))
            assert not own and text == asyncio.run(guess_number.env_step(sample))
    odds = make_start.guess_odds([(1, 32), (5, 8)], 0.2)
    assert odds.sum(1).tolist() == pytest.approx([1, 1])
    assert odds[0].tolist() == pytest.approx([1 / 32] * 32)
    assert odds[1, 4:8].tolist() == pytest.approx([0.2 / 4 + 0.8 / 32] * 4)
    assert odds[1, 3] == pytest.approx(0.8 / 32)


def test_calculator_problems_are_apart_and_episodes_are_true():
    rng = random.Random(0)
    splits = make_start.split_factors(rng)
    unordered = [{tuple(sorted(pair)) for pair in pairs} for pairs in splits]
    assert sum(map(len, unordered)) == len(set.union(*unordered)) == 90 * 91 // 2
    for pair in splits[-1][:50]:
        _, ((answer, _),) = make_start.episode(pair, 0.0, rng)
        assert rewards.math(answer, str(pair[0] * pair[1])) == 1
        _, pieces = make_start.episode(pair, 1.0, rng)
        if len(pieces) > 1:
            (program, _), (result, _), (answer, _) = pieces
            value = eval(math_python.program_of(program).removeprefix("print"))
            assert f"Code execution result: {value}<" in result and rewards.math(answer, str(value)) == 1


# ----------------------------------------------- runs ---------------------------------------------------
COUNTDOWN = {"nums": [1, 2, 3], "target": 6}
RECIPES = {  # what each is run with
    "algorithms": (COUNTDOWN, "--algo dapo --kl_coef 0.01"),
    "problems": ({"problem": "1 + 1?", "answer": "2"}, ""),
    "lora": (COUNTDOWN, "--lora_rank 4"),
    "gsm8k": ({"question": "1 + 1?", "answer": "#### 2"}, "--protocol oat"),
    "guess_number": ({"unused": 1}, "--max_turns 3"),
    "agent": ({"unused": 1}, "--max_calls 3"),
    "math_python": ({"problem": "1 + 1?", "answer": "2"}, "--max_turns 2"),
    "code": ({"question": "Print 1.", "inputs": [""], "outputs": ["1"]}, ""),
    "qa_search": ({"question": "Where?", "answer": "here"}, "--max_turns 2 --index INDEX"),
    "gem_env": ("game:GuessTheNumber-v0-easy", "--max_turns 2 --algo rebn --gamma 0.5"),
    "reasoning_gym": ("leg_counting", ""),
    "prm": (COUNTDOWN, f"--prm {TINY} --max_new_tokens 48"),
    "evaluate": (COUNTDOWN, "--steps 2 --eval_samples 2 --eval_temperature 1 --eval_every 1"),
}
NEEDS = {"agent": "openai", "qa_search": "bm25s", "gem_env": "gem", "reasoning_gym": "reasoning_gym"}


def run_recipe(folder: Path, command: list, data, flags: str, processes: int = 0) -> list[dict]:
    """The samples of a run of two steps."""
    small = "--steps 2 --max_new_tokens 16 --prompts_per_step 4 --group_size 2 --updates_per_step 2"
    arguments = ["--model", TINY, "--data", data, *small.split(), *flags.split(), "--output_dir", folder]
    done = run(*command, *arguments, processes=processes, PYTHONPATH=str(HERE))
    assert done.returncode == 0, done.stderr[-3000:]
    return read_rows(folder / "samples.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs(tmp_path, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    data, flags = RECIPES[name]
    data = data if isinstance(data, str) else write_rows(tmp_path / "rows", *[data] * 8)
    index = write_rows(tmp_path / "index", {"text": "It is here."}).parent
    flags = flags.replace("INDEX", str(index))
    samples = run_recipe(tmp_path / "run", ["-m", f"recipes.{name}"], data, flags)
    assert len(samples) == 16 and all(math.isfinite(sample["reward"]) for sample in samples)
    assert not any(sample["failure"] for sample in samples)


@pytest.mark.slow
def test_a_game_runs_on_two_processes(tmp_path):
    command = ["-m", "recipes.guess_number"]
    samples = run_recipe(tmp_path / "run", command, "none", "--max_turns 3", processes=2)
    alone = run_recipe(tmp_path / "alone", command, "none", "--max_turns 3")
    first = [[sample["text"] for sample in found if sample["step"] == 1] for found in (samples, alone)]
    assert first[0] == first[1] and len(samples) == 16


AHEAD = """
from concurrent.futures import wait
from recipes import one_step_off as recipe
import train

class Config(recipe.OneStepOffConfig):
    def __post_init__(self):
        self.engine = "local"

class Trainer(recipe.OneStepOff):
    def learn(self, samples):
        wait(self.ahead)
        return super().learn(samples)

train.main(Config, trainer=Trainer)
"""


@pytest.mark.slow
def test_rollouts_run_ahead_of_the_update(tmp_path):
    """The local engine on a thread takes the place of servers; updates wait for the rollout ahead."""
    data = write_rows(tmp_path / "rows", *[COUNTDOWN] * 8)
    flags = "--steps 3 --updates_per_step 1 --gate off --engine local"
    run_recipe(tmp_path / "run", ["-c", AHEAD], data, flags)
    history = read_rows(tmp_path / "run/metrics.jsonl")[1:]
    assert [record["staleness_max"] for record in history] == [0, 1, 1]


LONGER = dict.fromkeys(("algorithms", "formulas", "trainer"), 200)  # lines
LONGER |= dict.fromkeys(("chat_api", "distill", "endpoint", "partial_rollouts"), 180)
TESTED_ELSEWHERE = ("distill", "one_step_off", "partial_rollouts", "ppo")


def test_recipes_are_short_and_say_how_to_run_them():
    for path in sorted((HERE / "recipes").glob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= LONGER.get(path.stem, 160)
        if "    main(" in text:
            assert f"-m recipes.{path.stem}" in ast.get_docstring(ast.parse(text))
            assert path.stem in {*RECIPES, *TESTED_ELSEWHERE}
