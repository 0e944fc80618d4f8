"""The CUDA path, rehearsed on CPU tensors (docs/dev/testing.md).

Real: SGLang's FlashInfer, FA3 and Triton attention backends with their metadata, its CUDA graph runners,
the overlap scheduler, FlashInfer's own `plan`, our CUDA branches and Triton kernels (interpreted).
Replaced: the bodies of the attention kernels (`attention.py` and beside it), the graph object
(`graphs.py`), streams, events, pinned memory.

`play.py` starts such a server and reads its report; inside the server `stage.py` installs everything.
"""
