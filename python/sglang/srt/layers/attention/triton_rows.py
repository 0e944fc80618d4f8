"""SGLang's Triton attention for packed rows of a verify forward.

The kernel reads each request's first row from `qo_indptr`, so it takes any layout. Only the preparation of a
verify forward assumes blocks of one width.
"""

from typing import Any


def takes_rows(backend: Any) -> bool:
    """Tell whether `take_layouts` fits a backend.

    The kernel of deterministic inference has its own preparation, which divides rows evenly.
    """
    return type(backend).__name__ == "TritonAttnBackend" and not backend.enable_deterministic


def take_layouts(backend: Any) -> None:
    """Have a `TritonAttnBackend` verify the rows of `spec_info.ragged_verify_layout`.

    This changes one object, so backends of whole blocks and of the draft stay as they are.
    """
    block_size = backend.target_verify_num_tokens_per_req
    fill_buffers, prepare = backend._update_target_verify_buffers, backend.init_forward_metadata

    def most_rows(spec_info: Any) -> int:
        """Return the rows of a request that the kernel is launched for, for each forward."""
        return block_size

    def fill_graph_buffers(
        plan: Any, bs: int, seq_lens: Any, spec_info: Any, req_pool_indices: Any
    ) -> tuple[Any, ...]:
        filled = fill_buffers(plan, bs, seq_lens, spec_info, req_pool_indices)
        filled[0].copy_(spec_info.ragged_verify_layout.qo_indptr_device)
        return filled

    def prepare_without_graph(forward_batch: Any) -> None:
        prepare(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            layout = forward_batch.spec_info.ragged_verify_layout
            backend.forward_metadata.qo_indptr = layout.qo_indptr_device

    backend._target_verify_num_tokens_per_req = most_rows
    backend._update_target_verify_buffers = fill_graph_buffers
    backend.init_forward_metadata = prepare_without_graph
