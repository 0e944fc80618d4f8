"""SGLang attention backends by what a draft's attention needs of them."""

# Backends that run draft blocks, in order of preference if the target's own does not suit the draft.
DRAFT_ATTENTION_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")
# Backends that read whole pages of the KV cache.
PAGED_BACKENDS = ("fa3", "fa4")
# In a verify forward, FlashInfer cuts a sliding layer's keys once per block, the others once per query.
COUNT_WINDOW_FROM_ANCHOR = ("flashinfer",)
COUNT_WINDOW_FROM_QUERY = ("triton", "fa3", "fa4")
