"""How long does a push of new weights into SGLang take, compared with a plain copy of the same bytes?

    python -m bench.push [--rounds 7] [--sizes "small middle large"] [--output assets/records/push.json]

Requires sglang (without a GPU: .ci/sglang_cpu/install and the variables in its first lines). For each size of
a Qwen3 with random weights it starts a trainer with a colocated engine, and times in turn `sleep` (flush the
cache, release the memory), `push` (gather, flatten, send, load), and copying every tensor into another one
that exists. Wall time, medians.
"""

import json
from statistics import median

import torch
from transformers import Qwen3Config

from bench.cost import make_trainer, print_result, run_case
from bench.measure import in_turn, options, ratio, record, show
from bench.memory import make_model
from train import Config

SIZES = {  # hidden size, MLP size, layers, vocabulary
    "small": (256, 768, 6, 8192),
    "middle": (640, 1920, 10, 32768),
    "large": (1024, 3072, 22, 151936),
}


def make_qwen(folder: str, size: str) -> str:
    """A folder with a Qwen3 of this size."""
    hidden, mlp, layers, vocab = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": hidden // 8}
    shape = Qwen3Config(**sizes, vocab_size=vocab, max_position_embeddings=2048, tie_word_embeddings=True)
    return make_model(folder, shape, getattr(torch, Config.dtype))


def measure_push(case: dict) -> dict:
    """GB of the weights, and seconds of each action in turn."""
    model = make_qwen(f"{case['folder']}/model", case["size"])
    machine = {"engine": "sglang", "device": Config.device, "dtype": Config.dtype, "gate": "off"}
    trainer = make_trainer(case["folder"], model=model, **machine)
    whole = [value.clone() for bucket in trainer.actor.whole_weights() for _, value in bucket]
    copies = [torch.empty_like(value) for value in whole]
    actions = {
        "sleep": trainer.engine.sleep,
        "push": lambda: trainer.engine.push(trainer.actor.whole_weights()),
        "copy": lambda: [copy.copy_(value) for copy, value in zip(copies, whole)],
    }
    times = in_turn(actions, case["rounds"])
    trainer.engine.close()
    return {"GB": sum(value.nbytes for value in whole) / 1e9, "times": times}


def main():
    """Measures all sizes, prints the table, writes the numbers."""
    sizes = (" ".join(SIZES), "of the models")
    flags = options(__doc__, "push", sizes=sizes, case=("", "internal: one size, as JSON"))
    if flags.case:
        return print_result(measure_push(json.loads(flags.case)))
    rows = []
    numbers = {}
    for size in flags.sizes.split():
        found = run_case("bench.push", {"size": size, "rounds": flags.rounds, "ranks": 1})
        times = found["times"]
        row = {"model": size, "GB": found["GB"]}
        for action in times:
            row[f"{action} (s)"] = median(times[action]["wall"])
        row["push / copy"] = ratio(times["push"]["wall"], times["copy"]["wall"])
        rows.append(row)
        show(rows[-1:])
        numbers[size] = times
    show(rows)
    record(flags.output, {"A push into SGLang compared with a plain copy": rows}, times=numbers)


if __name__ == "__main__":
    main()
