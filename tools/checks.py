"""What may not be in a configuration: numbers out of their range, and flags that would do nothing beside others."""
import math
import re
import sys
from importlib.util import find_spec

from tools.inputs import UserError

POSITIVE = ("prompts_per_step", "group_size", "max_new_tokens", "max_turns", "temperature", "updates_per_step", "steps",
            "lr", "max_grad_norm", "tokens_per_micro_batch", "bucket_mb", "engine_timeout", "dp_replicate",
            "eval_samples", "keep_checkpoints", "reward_timeout",
            "max_skipped_steps")
NOT_NEGATIVE = ("gamma", "clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef", "tis_cap", "dynamic_sampling",
                "overlong_buffer", "eval_temperature", "warmup_steps", "eval_every", "save_every", "reward_workers",
                "max_reward_failures")
SECRET = re.compile("api_key|password|secret|auth_token|access_token")


def check_config(config, given: set[str]):
    """Raises UserError for what cannot be. `given` are the flags that have a value which --algo did not choose."""
    for name in POSITIVE:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"--{name} must be above 0, not {getattr(config, name)}")
    for name in NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise UserError(f"--{name} must be 0 or more, not {value}")
    if 0 < config.dual_clip <= 1:
        raise UserError(f"--dual_clip must be above 1, or 0 for none, not {config.dual_clip}")
    if config.overlong_buffer > 1:
        raise UserError(f"--overlong_buffer is a share of --max_new_tokens, 1 at most, not {config.overlong_buffer}")
    if config.overlong_buffer and config.max_turns > 1:
        raise UserError("--overlong_buffer must be 0 with --max_turns above 1: it measures a completion of one turn")
    if config.group_size < 2 and compares_groups(config):
        raise UserError(f"--group_size must be 2 or more, not {config.group_size}: a group is its own measure with "
                        f"--baseline {config.baseline} and --normalize {config.normalize}")
    if config.eval_only and not (config.eval_data and config.eval_every):
        raise UserError("--eval_only needs --eval_data, and an --eval_every above 0")
    if config.reward_workers and sys.platform != "linux":
        raise UserError("--reward_workers needs Linux; take 0")
    if config.eval_only and config.resume:
        raise UserError("--eval_only measures a --model; that of a checkpoint is the folder model/ in it")
    if config.engine not in ("sglang", "local") and not config.engine.startswith(("http://", "https://")):
        raise UserError(f"--engine must be auto, sglang, local or http://host:port, not {config.engine}")
    if config.engine != "local" and not find_spec("sglang"):
        raise UserError(f"--engine {config.engine}: sglang is not installed; requirements.txt has it")
    refuse_idle(config, given)
    refuse_secrets(config)


def compares_groups(config) -> bool:
    """Whether an advantage depends on the rest of a group."""
    return config.baseline != "none" or config.normalize == "group"


def refuse_idle(config, given: set[str]):
    """Raises UserError for a flag that was given and would do nothing."""
    cases = (
        ("clip_low clip_high ratio", config.surrogate == "reinforce", "--surrogate reinforce has no ratio"),
        ("dual_clip", config.surrogate != "clip", "only --surrogate clip has a bound for A < 0"),
        ("kl_estimator kl_in", not config.kl_coef, "--kl_coef is 0"),
        ("dynamic_sampling", not compares_groups(config), f"it looks for groups that teach, and --algo {config.algo} "
         "compares no groups"))
    for names, idle, why in cases:
        for name in names.split():
            if idle and name in given and getattr(config, name):
                raise UserError(f"--{name} {getattr(config, name)} would do nothing: {why}")


def refuse_secrets(config):
    """Raises UserError for a secret in a flag: flags are written to config.json, to checkpoints and to wandb."""
    for name, value in vars(config).items():
        for url in value.split(",") if isinstance(value, str) and "://" in value else ():
            if "@" in url.split("://", 1)[1].split("/")[0]:
                raise UserError(f"--{name} has a user or a password in it, and flags are written down: let a proxy "
                                "on this machine add them")
    for name in config.sglang_args:
        if SECRET.search(name):
            raise UserError(f"--sglang_args has {name}, and flags are written down; nothing here needs it")
