"""Tests of episodes with several turns (extras/turns.py)."""

import asyncio

import pytest

import train
from tests.conftest import GREETING, Config, play
from train import Trainer, UserError


async def again(sample):
    return "again"


def test_replies_are_masked_and_the_sampled_ids_are_kept(tokenizer):
    letters = tokenizer.encode("no")[:1] + [tokenizer.convert_tokens_to_ids(c) for c in "yes"]
    answers = [(letters, [-0.1] * len(letters), 7, False), ([2], [-0.5], [8], False)]
    replies = {1: "again", 2: None}
    sample = play(tokenizer, answers, lambda sample: replies[len(sample.turns)], max_turns=3)
    reply = tokenizer.encode("again")
    prompt = len(train.encode_prompt(tokenizer, GREETING))
    tokens, n, k = sample.tokens[prompt:], len(letters), len(reply)
    assert tokens["id"].tolist() == [*letters, *reply, 2]
    assert tokens["mask"].tolist() == [1] * n + [0] * k + [1] and not sample.tokens["mask"][:prompt].any()
    assert tokens["turn"].tolist() == [0] * (n + k) + [1]
    assert tokens["version"].tolist() == [7] * n + [0] * k + [8]
    assert tokens["logprob"].tolist() == pytest.approx([-0.1] * n + [0] * k + [-0.5])
    assert sample.state["seen"][1] == sample.tokens["id"][:-1].tolist()
    assert sample.turns == [tokenizer.decode(letters), ""] and not sample.truncated


TURN = ([5, 6], [-1.0, -1.0], 1, False)  # ids, log-probs, version, whether it is cut off


@pytest.mark.parametrize(
    "turn, env_step, max_turns, expected",
    [((*TURN[:3], True), again, 3, 1), (TURN, again, 2, 2), (TURN, None, 3, 1)],
)
def test_an_episode_ends_with_a_turn_of_the_policy(tokenizer, turn, env_step, max_turns, expected):
    sample = play(tokenizer, [turn] * 3, env_step, max_turns=max_turns)
    assert len(sample.turns) == expected and sample.truncated == turn[3]
    assert sample.tokens["mask"].sum() == 2 * expected and sample.tokens["mask"][-1] == 1


@pytest.mark.parametrize("missing, count", [(0, 2), (1, 1)])
def test_an_episode_ends_where_a_reply_does_not_fit(tokenizer, missing, count):
    limit = len(train.encode_prompt(tokenizer, GREETING)) + 2 + len(tokenizer.encode("again")) - missing
    sample = play(tokenizer, [TURN] * 3, again, limit, max_turns=9)
    assert sample.truncated and sample.tokens["mask"].sum() == 2 * count
    assert sample.tokens["mask"][-1] == 1  # what does not fit is not run through the update


def test_env_step_may_be_plain_and_sees_the_last_turn_too(tokenizer):
    called = []  # for example to see whether a last guess was right
    sample = play(tokenizer, [TURN] * 2, lambda one: called.append(len(one.turns)) or "again", max_turns=2)
    assert called == [1, 2]
    assert sample.tokens.tolist() == play(tokenizer, [TURN] * 2, again, max_turns=2).tokens.tolist()


def test_env_step_has_a_deadline(tokenizer):
    async def hang(sample):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        play(tokenizer, [([5], [-1.0], 1, False)], hang, max_turns=2, reward_timeout=0.01)


def test_env_step_is_refused_where_nothing_would_call_it():
    with pytest.raises(UserError, match="env_step requires extras/turns.py"):
        Trainer(Config(), None, None, again)


def test_several_turns_require_an_env_step(whole):
    with pytest.raises(UserError, match="--max_turns 2 requires an env_step"):
        whole(max_turns=2)
    assert whole(max_turns=2, env_step=again).env_step is again
