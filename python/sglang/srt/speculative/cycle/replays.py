"""Tensors that are read behind the next replay of a CUDA graph.

All graphs of a server share one pool of memory: the target's, the draft's, and those of prefills. A graph may
have its intermediate results where another one has its outputs. So a replay may overwrite whatever the other
graphs have left. Every tensor that lives longer lies outside the pool, or is copied out of it.

The table has all of them. Add a row before a step reads something of a forward that is not the last one. A
rehearsal checks the rows in each cycle, and its graphs forget all that a replay may overwrite.
"""

# Attributes of the worker, or of `block`, the cycle's DraftBlock -> writer, reader, and where they lie.
ACROSS_REPLAYS = {
    "block.tokens": "the draft, for verify and acceptance: of DFlash `_blocks`, otherwise concatenated anew",
    "block.probs.ids": "the draft, for rejection: copied from DFlash2's graph, else found outside graphs",
    "block.probs.probs": "the draft, for rejection: computed outside graphs",
    "drafter._model._blocks": "DFlash's forward, its blocks; or rows for P-EAGLE's: allocated with the pools",
    "drafter._pending": "P-EAGLE's commit, for its next forward: allocated with the pools",
    "drafter._fused_in_graph": "the verify graph, for P-EAGLE's commit: allocated with the pools",
    "verify_tail._runner.graph_shared_output": "the verify graph, its logits: SGLang allocates them outside",
    "acceptor._relay": "acceptance, for the next cycle's block: allocated with the request table",
    "penalties": "acceptance, for later logits: allocated with the request table",
}
