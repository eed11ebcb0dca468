"""--wandb online or offline: metrics go to Weights & Biases, too.

If its server cannot be reached, a run is logged offline, for `wandb sync` to send later.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import wandb
from tqdm import tqdm

from train import UserError, flag

SECONDS = 60  # to send a run's last numbers; without a limit wandb waits for its server forever


@dataclass
class Flags:
    wandb: Literal["online", "offline", "disabled"] = flag("disabled", "Weights & Biases mode")


def start(mode: str, **options):
    """Starts a run of Weights & Biases. Raises UserError if it refuses a key or a setting."""
    options["settings"] = wandb.Settings(finish_timeout=SECONDS)
    try:
        wandb.init(mode=mode, **options)
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        raise UserError(f"--wandb {mode}: {error}") from error
    except wandb.Error as error:
        folder = options.get("dir")
        tqdm.write(f"wandb: {error}; logged in {folder}/wandb, for `wandb sync` to send later")
        wandb.init(mode="offline", **options)


def extend(trainer_class: type) -> type:
    """A trainer that logs to Weights & Biases."""

    class WandbTrainer(trainer_class):
        logs = False  # whether this run is logged, and has not ended

        def open_log(self):
            super().open_log()
            self.logs = self.config.wandb != "disabled"
            if self.logs:
                start(self.config.wandb, project="grpo", config=asdict(self.config), dir=self.folder)

        def write(self, step: int, metrics: dict[str, float], samples: list):
            super().write(step, metrics, samples)
            if self.logs:
                wandb.log(metrics, step=step)
                if step == self.config.steps:
                    self.end_log(0)  # before SGLang's shutdown, which kills all children of this process

        def fit(self):
            try:
                super().fit()
            except UserError:
                self.end_log(1)
                raise
            finally:  # also if a signal has ended the run
                self.end_log(0)

        def end_log(self, exit_code: int):
            """Waits until all numbers are saved or sent."""
            if self.logs:
                self.logs = False
                wandb.teardown(exit_code)

    return WandbTrainer
