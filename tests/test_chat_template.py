"""Tests of extras/chat_template.py: the same prompts wherever a run encodes one."""

import asyncio
import json
from copy import deepcopy
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

import train
from extras import chat_template, gate
from recipes.one_step_off import OneStepOff
from recipes.turns import user_turn
from tests.conftest import COUNTDOWN, TINY, VariantTrainer, play, random_model, run
from train import UserError

EMPTY = "<think>\n\n</think>\n\n"
OFF = '{"enable_thinking": false}'
THINKING = "{% if enable_thinking is defined and not enable_thinking %}" + EMPTY + "{% endif %}"  # as Qwen3's


def thinking_tokenizer(kwargs: str = ""):
    """The tiny tokenizer with a template that reads enable_thinking, as a run has it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    end = "assistant\n{% endif %}"
    assert tokenizer.chat_template.count(end) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(end, f"assistant\n{THINKING}{{% endif %}}")
    chat_template.set_arguments(tokenizer, SimpleNamespace(chat_template_kwargs=kwargs))
    return tokenizer


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory):
    """A folder with a small model and that template."""
    folder = random_model(tmp_path_factory.mktemp("thinking"))
    thinking_tokenizer().save_pretrained(folder)
    return folder


def test_the_arguments_change_the_prompt():
    messages = [{"role": "user", "content": "2 + 2"}]
    plain = train.encode_prompt(AutoTokenizer.from_pretrained(TINY), messages)
    tokenizer = thinking_tokenizer(OFF)
    assert train.encode_prompt(tokenizer, messages) == plain + tokenizer.encode(EMPTY)
    for kwargs in ("", "{}", '{"enable_thinking": true}'):
        assert train.encode_prompt(thinking_tokenizer(kwargs), messages) == plain


@pytest.mark.parametrize(
    "name", ["enable_thinkng", "enable", "tokenize", "messages", "add_generation_prompt"]
)
def test_an_argument_that_the_template_does_not_take_is_refused(name):
    with pytest.raises(UserError, match=f"^--chat_template_kwargs: the chat template .* takes no '{name}'$"):
        thinking_tokenizer(json.dumps({name: False}))


def test_training_evaluation_and_gate_have_the_same_prompts(whole, thinking_model):
    """Also those of a trainer that samples ahead."""
    trainer_class = gate.extend(chat_template.extend(VariantTrainer))
    flags = {"model": str(thinking_model), "chat_template_kwargs": OFF, "max_new_tokens": 2}
    flags |= {"data": f"{COUNTDOWN}/train.jsonl:train[:4]", "eval_data": f"{COUNTDOWN}/train.jsonl:train[:4]"}
    trainer = whole(trainer_class=trainer_class, **flags)
    trainer.engine.push(trainer.actor.whole_weights())
    chats = [trainer.data[i].messages for i in range(4)]
    expected = [train.encode_prompt(thinking_tokenizer(OFF), chat) for chat in chats]
    assert expected != [train.encode_prompt(thinking_tokenizer(), chat) for chat in chats]

    def prompts(samples: list) -> list:
        """Ids before the first sampled token, without repetitions, in order of the rows."""
        found = {
            json.dumps(sample.messages): sample.tokens["id"][sample.tokens["mask"] == 0].tolist()
            for sample in samples
        }
        return [found[json.dumps(chat)] for chat in chats]

    seen = []
    episode = trainer.episode
    trainer.episode = lambda sample, temperature: (
        seen.append(deepcopy(sample)) or episode(sample, temperature)
    )
    trainer.rollout()
    assert prompts(seen) == expected
    seen.clear()
    trainer.evaluate()
    assert prompts(seen) == expected
    assert prompts(trainer.gate.play(range(4), 0.0, 1)) == expected
    config = json.loads((trainer.folder / "config.json").read_text())
    assert config["chat_template_kwargs"] == OFF
    seen.clear()
    future = OneStepOff.begin(trainer, trainer.data, [(i, i) for i in range(4)], 1, 1.0)
    trainer.engine.loop.run_until_complete(asyncio.wrap_future(future, loop=trainer.engine.loop))
    assert prompts(seen) == expected


def test_later_turns_open_like_the_first_one():
    answers = [([5, 6], [-1.0, -1.0], 1, False)] * 2
    for kwargs, expected in (("", ""), (OFF, EMPTY)):
        tokenizer = thinking_tokenizer(kwargs)
        sample = play(tokenizer, answers, lambda sample: user_turn("higher"), max_turns=2)
        prompt = len(train.encode_prompt(tokenizer, sample.messages))
        assert tokenizer.decode(sample.tokens["id"][prompt + 2 : -2]) == user_turn("higher") + expected
        sample = play(tokenizer, answers, lambda sample: "no markup", max_turns=2)
        assert sample.state["seen"][1][-len(tokenizer.encode("no markup")) :] == tokenizer.encode("no markup")


def test_a_run_checks_its_first_prompts_with_the_arguments(thinking_model, tmp_path):
    """They fit without the empty block, not with it; and a wrong name ends in one line."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"nums": [1, 2], "target": 3}\n')
    tokenizer = thinking_tokenizer()
    (chat,) = [sample.messages for sample in train.RLDataset(str(data))][:1]
    room = 256 - len(train.encode_prompt(tokenizer, chat))
    flags = ["--model", thinking_model, "--data", data, "--steps", 1, "--output_dir", tmp_path / "run"]
    done = run("train.py", *flags, "--max_new_tokens", room, "--chat_template_kwargs", OFF)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{256 - room} fit beside --max_new_tokens" in done.stderr
