"""The control: train.py as it is, but trained on a coin that knows nothing of the answer. Nothing must climb.

    torchrun --standalone --nproc_per_node=2 -m bench.random_reward [flags of train.py]

Evaluations ask the real reward. What it would have given in training is the metric `solved`.
"""

import random

from train import Sample, Trainer, main

CHANCE = 0.25  # about what the embedded model gets at first, so that groups carry as much signal


class CoinTrainer(Trainer):
    """Throws a coin for each sample just before it is compared to its group."""

    def compare(self, samples: list[Sample]):
        for sample in samples:
            sample.metrics["solved"] = sample.reward
            coin = random.Random(f"{self.config.seed} {sample.key}")  # the same on any number of ranks
            sample.reward = float(coin.random() < CHANCE)
        super().compare(samples)


if __name__ == "__main__":
    main(trainer=CoinTrainer)
