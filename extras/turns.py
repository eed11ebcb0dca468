"""--max_turns: episodes of several turns, in which an env_step answers the policy.

    async def env_step(sample: Sample) -> str | None:
        return user_turn("higher")    # of recipes/turns.py; None ends the episode

    main(reward_fn=reward_fn, env_step=env_step)

The reply is in chat markup. env_step may be a plain function, too, and keep what it needs in sample.state.
Replies are not trained: their mask is 0. recipes/guess_number.py is a complete example.
"""

from dataclasses import dataclass

from train import Sample, Trainer, UserError, call, flag, rollout

HEADER = "<|im_start|>assistant\n"  # of the policy's turn, at the end of a reply


@dataclass
class Flags:
    max_turns: int = flag(1, "policy turns per episode; above 1, env_step answers each of them")


def opening(tokenizer, messages: list[dict]) -> str:
    """What the chat template puts after the header of the policy's turn, such as an empty <think> block."""
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return chat.rpartition(HEADER)[2] if HEADER in chat else ""


def extend(trainer_class: type) -> type:
    """A trainer with these episodes, unless it has some of its own."""
    if trainer_class.play is not Trainer.play:
        return trainer_class

    class TurnsTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            if config.max_turns > 1 and not self.env_step:
                raise UserError(f"--max_turns {config.max_turns} requires an env_step, an argument of main")

        async def play(self, sample: Sample, temperature: float):
            """Plays an episode in place. No turn begins after more than prompt_limit tokens."""
            config = self.config
            for turn in range(config.max_turns):
                await rollout(sample, self.engine, self.tokenizer, config, temperature, turn)
                if sample.truncated or self.env_step is None:
                    break
                reply = await call(self.env_step, sample, config.reward_timeout)
                if reply is None or turn == config.max_turns - 1:
                    break
                if reply.endswith(HEADER):
                    reply += opening(self.tokenizer, sample.messages)
                reply_ids = self.tokenizer.encode(reply, add_special_tokens=False)
                sample.truncated = len(sample.tokens) + len(reply_ids) > self.prompt_limit
                if sample.truncated:
                    break
                sample.append(reply_ids, turn=turn)

    return TurnsTrainer
