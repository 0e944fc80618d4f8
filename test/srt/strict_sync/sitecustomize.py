"""For a server under test: CUDA raises on a synchronisation inside `DFlashWorker._decode`.

Python imports this file at start-up wherever its folder is on PYTHONPATH. The worker does not exist yet then, so the
module is watched for.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

WATCHED = "sglang_dflash.srt.speculative.dflash_worker"


class _Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _watch(module.DFlashWorker)

        spec.loader.exec_module = exec_module
        return spec


def _watch(worker_class) -> None:
    import torch

    decode = worker_class._decode

    def strict_decode(self, *args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    worker_class._decode = strict_decode
    print("strict_sync: decode steps are watched", flush=True)


sys.meta_path.insert(0, _Watch())
