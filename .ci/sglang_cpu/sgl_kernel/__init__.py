"""Test support, not product code: a stub for sglang's kernels, which have no build for a CPU without AMX."""


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """For request r, row req_to_token[r, start:end] takes the next end - start entries of out_cache_loc."""
    used = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        req_to_token[request, first:last] = out_cache_loc[used : used + last - first]
        used += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return absent
