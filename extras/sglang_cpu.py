"""--engine sglang --device cpu: arguments that SGLang needs on a CPU, and pushes in reused memory.

Without this file they must be set in --sglang_args, and a push takes ten times as long: it goes through
shared memory, and allocating new shared memory takes longer than everything else.
"""

import json

import torch

ARGUMENTS = {  # these run without CUDA kernels
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "sleep_on_idle": True,  # or it would take a core from the actor during the update
}


def keep_pages():
    """Makes sglang flatten buckets into shared memory that is reused from bucket to bucket."""
    from sglang.srt.weight_sync import tensor_bucket

    bucket_class = tensor_bucket.FlattenedTensorBucket
    pages = torch.empty(0, dtype=torch.uint8)

    class KeptBucket(bucket_class):
        def __init__(self, named_tensors: list):
            nonlocal pages
            super().__init__(named_tensors=[(name, tensor.to("meta")) for name, tensor in named_tensors])
            size = sum(tensor.nbytes for _, tensor in named_tensors)
            if len(pages) < size:
                pages = torch.empty(size, dtype=torch.uint8).share_memory_()
            parts = [tensor.flatten().view(torch.uint8) for _, tensor in named_tensors]
            self.flattened_tensor = torch.cat(parts, out=pages[:size])

    tensor_bucket.FlattenedTensorBucket = KeptBucket


def extend(trainer_class: type) -> type:
    """A trainer whose SGLang runs on a CPU."""

    class CPUTrainer(trainer_class):
        def __init__(self, config, *arguments):
            if config.device == "cpu" and config.engine == "sglang":
                config.sglang_args = json.dumps(ARGUMENTS | json.loads(config.sglang_args))
                keep_pages()
            super().__init__(config, *arguments)

    return CPUTrainer
