"""--engine sglang --device cpu: the arguments that SGLang needs; without this file, set --sglang_args."""

import json

ARGUMENTS = {  # these run without CUDA kernels
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "sleep_on_idle": True,  # or it would take a core from the actor during the update
}


def extend(trainer_class: type) -> type:
    """A trainer whose SGLang runs on a CPU."""

    class CPUTrainer(trainer_class):
        def __init__(self, config, *arguments):
            if config.device == "cpu" and config.engine == "sglang":
                config.sglang_args = json.dumps(ARGUMENTS | json.loads(config.sglang_args))
            super().__init__(config, *arguments)

    return CPUTrainer
