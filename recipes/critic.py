"""A critic for recipes/ppo.py: a model that predicts returns, and the advantages that follow from it."""

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_module

import train
from recipes.trainer import column
from train import Actor


def gae(rewards: list, values: list, discounts: list, gae_lambda: float) -> list[float]:
    """Advantages [K] of actions, arXiv:1506.02438 eq. 16, from lists [K].

    The lists hold the actions' rewards, the values before them, and the discounts of what follows them.
    """
    advantages = []
    advantage = 0.0
    following = 0.0
    for reward, value, discount in reversed(list(zip(rewards, values, discounts))):
        delta = reward + discount * following - value
        advantage = delta + discount * gae_lambda * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def load_critic(path: str, mesh: dict, config):
    """The policy's weights with a value head of zeros, sharded, and values(batch) -> [N] in fp32."""
    model = train.empty_model(path)
    with torch.device("meta"):
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    if mesh["tp"].size() > 1:
        distribute_module(model.value_head, mesh["tp"])  # replicated on each rank
    model = train.shard(model, mesh, config)

    def values(batch) -> torch.Tensor:
        """Values [N] of the states in which the trained tokens were sampled."""
        states = model.model(batch.ids, use_cache=False, **batch.layout).last_hidden_state[0, batch.source]
        head = model.value_head.weight
        head = head.to_local() if isinstance(head, DTensor) else head
        return (states @ head[0]).float()

    model.values = values
    register_fsdp_forward_method(model, "values")
    weights = dict(model.named_parameters())
    weights.pop("value_head.weight").data.zero_()  # it predicts 0 at first
    train.dcp.load(weights, storage_reader=model.reader)
    return model


class Critic(Actor):
    """A critic that learns: a sharded model and its optimizer."""

    def loss(self, batch) -> tuple[torch.Tensor, dict]:
        """The clipped value loss of a micro-batch, and the metrics to average, [N] each."""
        values = self.model.values(batch)
        old_values = column(batch, "value")
        returns = column(batch, "return")
        change = (values - old_values).clamp(-self.config.value_clip, self.config.value_clip)
        unclipped = (values - returns) ** 2
        clipped = (old_values + change - returns) ** 2
        loss = 0.5 * torch.maximum(unclipped, clipped)
        stats = {"value": old_values, "return": returns, "return_squared": returns**2}
        stats["error_squared"] = (old_values - returns) ** 2
        return (batch.weights * loss).sum(), stats


def critic_metrics(means: dict[str, float]) -> dict[str, float]:
    """The metrics, from the means that Critic.backward returns; useless values explain no variance."""
    variance = means["return_squared"] - means["return"] ** 2
    explained = 1 - means["error_squared"] / (variance or 1)
    return {"value_loss": means["loss"], "value": means["value"], "explained_variance": explained}
