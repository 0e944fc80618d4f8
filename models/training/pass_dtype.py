"""The dtype of weights and activations in passes on this CPU."""

import torch

# A CPU without AVX-512 multiplies bfloat16 ten times slower than float32.
PASS_DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
