"""Tests of tools/gpus.py: what it proposes fits, and nothing before it in its order does."""

import json

import pytest

from tools import gpus, plan
from tools.shapes import known_config


@pytest.mark.parametrize(
    "name, gb, count, described",
    [
        ("Qwen2.5-3B-Instruct", 80, 4, "16k tokens, share 0.7"),
        ("Qwen2.5-7B-Instruct", 80, 2, "tp 2, share 0.2"),
        ("Qwen2.5-32B-Instruct", 80, 8, "tp 4, offload, 2k tokens, share 0.5"),
        ("Qwen2.5-32B-Instruct", 48, 8, "does not fit"),
    ],
)
def test_cells_of_the_table(name, gb, count, described):
    assert gpus.described(gpus.first_that_fits(name, gb, count)) == described


def test_a_proposal_fits_and_a_larger_share_for_sglang_does_not():
    config = gpus.first_that_fits("Qwen2.5-1.5B-Instruct", 48, 2)
    share = json.loads(config.sglang_args)["mem_fraction_static"]
    larger = json.dumps({"mem_fraction_static": round(share + 0.1, 1)})
    model_config = known_config("Qwen2.5-1.5B-Instruct")
    assert plan.fits(config, model_config) and not plan.fits(config, model_config, sglang_args=larger)
