"""LoRA: small matrices learn beside frozen weights, which need neither gradients nor Adam's moments.

    torchrun --standalone --nproc_per_node=1 -m recipes.lora --model Qwen/Qwen2.5-3B-Instruct
    torchrun --standalone --nproc_per_node=2 -m recipes.lora --lr 1e-3    # no GPU: the tiny Qwen

Each linear layer in --lora_targets computes W x + alpha / r B A x (arXiv:2106.09685 sec. 4.1): A [r, in] is
random at first, B [out, r] is zero, and W stays frozen. --lr is ten times that of full fine-tuning
(thinkingmachines.ai/blog/lora). Engines get merged weights. A run ends with model/ and, for peft, adapter/.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear

from extras import dither
from recipes.problems import ProblemDataset, reward_fn
from train import RANK, Actor, Config, Trainer, UserError, empty_model, flag, main, policy_logprobs, shard

TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z out_proj"


@dataclass
class LoRAConfig(Config, dither.Flags):
    """The core's flags, and those of the adapters."""

    lora_rank: int = flag(32, "rank r of the adapters")
    lora_alpha: float = flag(32, "numerator of the adapters' scale, lora_alpha / lora_rank")
    lora_targets: str = flag(TARGETS, "names of the linear layers with adapters, where a model has them")
    base_dtype: Literal["bfloat16", "float16", "float32"] = flag(Config.dtype, "dtype of the frozen weights")
    lr: float = flag(1e-5, "peak learning rate of AdamW; ten times that of full fine-tuning")

    def __post_init__(self):
        if self.lora_rank < 1 or not 0 < self.lora_alpha < float("inf"):
            raise UserError("--lora_rank must be at least 1, and --lora_alpha above 0")


class LoRALinear(Linear):
    """A linear layer with an adapter; made in place from one without."""

    scale: float  # alpha / r
    switched_on = True  # for all adapters at once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        if not LoRALinear.switched_on:
            return super().forward(x)
        return super().forward(x) + self.scale * linear(linear(x, self.lora_A), self.lora_B)


def add_adapters(model, config: LoRAConfig):
    """Gives the layers of an empty model adapters in fp32. Raises UserError for unknown targets."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, config.base_dtype))
    rank, targets = config.lora_rank, config.lora_targets.split()
    layers = [(name.split(".")[-1], m) for name, m in model.model.named_modules() if isinstance(m, Linear)]
    known = dict.fromkeys(kind for kind, _ in layers)
    if not {*targets} & known.keys() or not {*targets} <= {*known, *TARGETS.split()}:
        raise UserError(f"--lora_targets must be some of {' '.join(known)}, not {config.lora_targets!r}")
    for layer in [layer for kind, layer in layers if kind in targets]:
        layer.__class__ = LoRALinear
        layer.scale = config.lora_alpha / rank
        layer.lora_A = Parameter(torch.empty(rank, layer.in_features, device="meta"))
        layer.lora_B = Parameter(torch.empty(layer.out_features, rank, device="meta"))
    return model


@torch.no_grad()
def fill(weight: DTensor, whole: torch.Tensor):
    """Gives each rank its part of a whole tensor."""
    whole = whole.to(weight.device)
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


def start_adapters(model, seed: int):
    """Fills a sharded model's adapters with numbers that do not depend on the ranks; freezes the rest."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.requires_grad = "lora_" in name
        if weight.requires_grad:
            bound = weight.shape[1] ** -0.5 if name.endswith("lora_A") else 0
            fill(weight, torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))


class LoRAActor(Actor):
    """An actor whose model has adapters."""

    def whole_weights(self):
        """Yields what the core's actor yields, with the adapters merged."""
        return map(self.merge, super().whole_weights())

    def merge(self, bucket: list) -> list:
        """Adds the adapters to the weights of a bucket, in place."""
        weights = dict(bucket)
        for name in [name for name in weights if name.endswith("lora_A")]:
            a, b = (weights.pop(name.removesuffix("A") + part).float() for part in "AB")
            weight = weights[name.removesuffix("lora_A") + "weight"]
            update = self.config.lora_alpha / self.config.lora_rank * (b @ a)
            dither.add(weight, update, name if self.config.dither else "")  # this rounds; the actor does not
        bucket[:] = weights.items()
        return bucket

    def save(self, path: str, folder: Path):
        """Writes the merged model as the core does, and beside it the folder adapter/."""
        super().save(path, folder)
        whole = {name: weight.full_tensor().detach().cpu() for name, weight in self.parameters.items()}
        config = self.config
        content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model}
        targets = sorted({name.split(".")[-2] for name in self.parameters})
        content |= {"target_modules": targets, "lora_alpha": config.lora_alpha}
        if RANK == 0:
            adapter = folder.parent / "adapter"
            adapter.mkdir(exist_ok=True)
            (adapter / "adapter_config.json").write_text(json.dumps(content | {"r": config.lora_rank}))
            whole = {f"base_model.model.{name}.weight": weight for name, weight in whole.items()}
            save_file(whole, adapter / "adapter_model.safetensors")


class LoRATrainer(Trainer):
    """A Trainer of adapters."""

    def __init__(self, config, *arguments):
        super().__init__(config, *arguments)
        self.actor = LoRAActor(self.actor.model, self.mesh, config)

    def load_policy(self):
        """The model with adapters; called again, the reference: the same model without them."""
        if not hasattr(self, "actor"):
            model = shard(add_adapters(empty_model(self.path), self.config), self.mesh, self.config)
            saved = {name: weight for name, weight in model.named_parameters() if "lora_" not in name}
            dcp.load(saved, storage_reader=model.reader)
            start_adapters(model, self.config.seed)
            sizes = {"vocab_size": self.engine.vocab_size, "tp": self.mesh["tp"]}
            model.logprobs = partial(policy_logprobs, model, temperature=self.config.temperature, **sizes)
            register_fsdp_forward_method(model, "logprobs")
            return model
        model = self.actor.model

        def logprobs(batch):
            LoRALinear.switched_on = False
            found = model.logprobs(batch)
            LoRALinear.switched_on = True
            return found

        return SimpleNamespace(logprobs=logprobs, reshard=model.reshard, model=model.model)


if __name__ == "__main__":
    main(LoRAConfig, ProblemDataset, reward_fn, trainer=LoRATrainer)
