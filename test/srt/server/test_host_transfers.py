"""No step of the decode path waits for the GPU: CUDA itself objects to a synchronisation.

Without a GPU the rehearsal says the same of tensors that stand for the device's (`test_rehearsal.py`).
"""

import pytest
import torch
from serving import DRAFT, PEAGLE_DRAFT, TARGET, dflash_arguments, serve
from support.servers import patched


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["DFlash", "P-EAGLE"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_cuda_sees_no_synchronisation_in_a_decode_step(method, draft):
    """In CUDA's error mode, `DFlashWorker.decode` would die of a synchronisation."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    arguments = "--model-path", TARGET, *dflash_arguments(draft), "--attention-backend", "triton"
    asked = {"max_new_tokens": 48, "ignore_eos": True}
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 4}
    with serve(*arguments, "--speculative-draft-sample-method", method, env=patched("strict_sync")) as server:
        for sampling in ({"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, **penalties}):
            answer = server.generate(text="def main():", sampling_params=asked | sampling)
            assert answer["meta_info"]["completion_tokens"] == 48
        assert "server patch: strict_sync" in server.log()
