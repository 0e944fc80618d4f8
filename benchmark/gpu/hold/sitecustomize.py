"""Let a server import everything, then wait for a file before it touches the GPU.

Python imports this at start-up if its folder is on PYTHONPATH. GPU_BENCHMARK_RELEASE names the file.
"""

import os
import sys
import time
from pathlib import Path


def wait_before_the_model(module) -> None:
    init_model_worker = module.Scheduler.init_model_worker

    def init_when_released(scheduler):
        release = Path(os.environ["GPU_BENCHMARK_RELEASE"])
        while not release.exists():
            time.sleep(0.05)
        init_model_worker(scheduler)

    module.Scheduler.init_model_worker = init_when_released


sys.path.append(str(Path(__file__).parents[2]))
from after_import import after_import  # noqa: E402

after_import({"sglang.srt.managers.scheduler": wait_before_the_model})
