"""What tests with the real SGLang share: its settings for a CPU, which .ci/sglang_cpu/install sets up."""

import subprocess
import time

from tests.conftest import ENVIRONMENT, HERE

STUBS = HERE / ".ci/sglang_cpu"
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{HERE}:{STUBS}"}
SGLANG_ENVIRONMENT = ENVIRONMENT | ON_CPU


def wait_for(condition, process: subprocess.Popen, seconds: int = 300):
    """Waits until a condition holds, while a process lives."""
    for _ in range(10 * seconds):
        if condition():
            return
        assert process.poll() is None, "the process ended"
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")
