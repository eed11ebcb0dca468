"""A critic, for recipes: a model that says what return to expect, and the advantages that follow from it."""
import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_module

from tools.packing import column
from train import Actor, Batch, empty_model, shard


def gae(rewards: list[float], values: list[float], discounts: list[float], gae_lambda: float) -> list[float]:
    """Advantages [K] of actions with rewards, values before them, and the discounts of what follows them, all [K]."""
    advantages, advantage, following = [], 0.0, 0.0
    for reward, value, discount in reversed([*zip(rewards, values, discounts)]):
        advantage = reward + discount * following - value + discount * gae_lambda * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def critic_metrics(sums: dict[str, float], updates: int) -> dict[str, float]:
    """Means over all ranks, from what `Critic.loss` counts; values that say nothing have an explained variance of 0."""
    tokens = sums["tokens"] or 1
    variance = sums["squares"] / tokens - (sums["returns"] / tokens) ** 2
    return dict(value_loss=sums["loss"] / updates, value=sums["values"] / tokens,
                explained_variance=1 - sums["errors"] / tokens / (variance or 1))


class Critic(Actor):
    """An actor whose head gives a value; it starts from the policy's weights, and with 0 for every state."""
    summarize = staticmethod(critic_metrics)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.value_head.weight.data.zero_()

    def build(self, path: str):
        """The sharded model with one more layer."""
        model, tp = empty_model(path), self.mesh["tp"]
        with torch.device("meta"):
            model.value_head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        if tp.size() > 1:
            distribute_module(model.value_head, tp)         # whole on each rank
        model = shard(model, self.mesh, self.config)
        model.values = lambda batch: values_of(model, batch)
        register_fsdp_forward_method(model, "values")
        return model

    def weights(self) -> dict[str, DTensor]:
        """Those that the policy's file has, too."""
        return {name: value for name, value in super().weights().items() if not name.startswith("value_head")}

    def loss(self, batch: Batch):
        """The clipped value loss of a micro-batch, and sums over its tokens."""
        values, old, returns = self.model.values(batch), column(batch, "values"), column(batch, "returns")
        bounded = old + (values - old).clamp(-self.config.value_clip, self.config.value_clip)
        loss = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
        real = batch.weights > 0
        sums = dict(tokens=real, values=old * real, returns=returns * real, squares=returns ** 2 * real,
                    errors=(old - returns) ** 2 * real)
        return (batch.weights * loss).sum(), {name: value.sum().float() for name, value in sums.items()}, 0.0


def values_of(model, batch: Batch) -> torch.Tensor:
    """Values [N], fp32, of the states that the trained tokens were sampled in."""
    states = model.model(batch.ids, position_ids=batch.positions, use_cache=False, bounds=batch.bounds,
                         longest=batch.longest).last_hidden_state[0, batch.source]
    weight = model.value_head.weight
    return (states @ (weight.to_local() if isinstance(weight, DTensor) else weight)[0]).float()
