"""FlashInfer's kernels, below its own Python wrappers.

`plan` leaves a schedule in pinned memory and in the wrapper's workspace, where a captured kernel finds it.
Like the kernel, a run takes the size and the planned number of chunks from the schedule, and everything else
from the device's arrays. If the device's lengths have another number of chunks, a GPU would silently merge
the partial results of other rows: here it is reported. So is another length than the planned one, and pinned
memory that is overwritten while its copy may still wait behind other work.
"""

import math
from dataclasses import dataclass

import torch
from support.rehearsal import flashinfer_planner, launches, report, steps
from support.rehearsal.attention import attend
from support.rehearsal.graphs import kernel

# So few that the keys of short requests fill the grid.
NUM_PROCESSORS = 8


@dataclass
class Schedule:
    qo_indptr: list[int]
    made: flashinfer_planner.Plan
    heads: tuple[int, int]
    in_graph: bool


_schedules: dict[int, Schedule] = {}  # by the address of the workspace
_steps: dict[int, int] = {}  # the step that planned last in pinned memory at an address


class PrefillModule:
    """The module that `get_batch_prefill_module` compiles."""

    workspace_size = None

    def __init__(
        self, backend, q_dtype, kv_dtype, o_dtype, id_dtype, d_qk, d_vo, pos_mode, use_window, use_softcap, *_
    ):
        assert backend == "fa2", backend
        self._use_window, self._use_softcap = use_window, use_softcap
        self.paged_run = kernel("flashinfer_paged_run", self._run)

    def plan(
        self,
        float_workspace,
        int_workspace,
        pinned,
        qo_host,
        kv_host,
        lengths,
        rows,
        bs,
        q_heads,
        kv_heads,
        page,
        in_graph,
        d_qk,
        d_vo,
        causal,
        window_left,
        fixed_chunk,
        disable_split_kv,
        num_colocated_ctas,
        uniform_queries,
    ):
        for given in (qo_host, kv_host, lengths):
            assert given.device.type == "cpu" and given.dtype == torch.int32, given.dtype
        assert not disable_split_kv and not num_colocated_ctas and page == 1
        report.order.append("plan")
        with launches.one_operation("flashinfer:plan"):
            if steps.is_running(_steps.get(pinned.data_ptr(), 0)):
                report.problem("FlashInfer: pinned memory of a plan is overwritten before its copy is over")
            _steps[pinned.data_ptr()] = steps.launched
            made = flashinfer_planner.plan(
                kv_host.diff().tolist(),
                qo_host.diff().tolist(),
                (q_heads, kv_heads),
                num_processors=NUM_PROCESSORS,
                max_rows=rows,
                head_dim=d_qk,
                in_graph=in_graph,
                fixed_chunk=fixed_chunk,
                uniform_queries=uniform_queries,
            )
            start = made.information[flashinfer_planner.CHUNK_OFFSET]
            pinned[start : start + 4].view(torch.int32).fill_(made.chunk)
            _schedules[int_workspace.data_ptr()] = Schedule(
                qo_host.tolist(), made, (q_heads, kv_heads), in_graph
            )
        return made.information

    def _run(
        self,
        float_workspace,
        int_workspace,
        plan_info,
        q,
        k_cache,
        v_cache,
        qo,
        kv,
        indices,
        last_page,
        out,
        lse,
        mask_mode,
        layout,
        window_left,
        pdl,
        mask,
        mask_indptr,
        alibi,
        prefix_len,
        token_pos,
        max_item,
        softcap,
        scale,
        *_,
    ):
        schedule = _schedules[int_workspace.data_ptr()]
        assert mask_mode in (0, 1), mask_mode
        heads = q.shape[1], k_cache.shape[-2]
        if schedule.heads != heads:
            report.problem(f"FlashInfer was planned for {schedule.heads} heads and is run with {heads}")
        pools = [cache.reshape(-1, *cache.shape[-2:]) for cache in (k_cache, v_cache)]
        qo, kv = qo.tolist(), kv.tolist()
        made = schedule.made
        if schedule.qo_indptr != qo[: len(made.lengths) + 1]:
            report.problem(f"FlashInfer: qo_indptr on the host {schedule.qo_indptr}, on the device {qo}")
        if made.information != list(plan_info):
            report.problem(f"FlashInfer: planned with layout {made.information}, captured with {plan_info}")
        out.zero_()
        for lane, host_length in enumerate(made.lengths):
            rows, length = slice(qo[lane], qo[lane + 1]), kv[lane + 1] - kv[lane]
            slots = indices[kv[lane] : kv[lane + 1]].long()
            causal = mask_mode == 1
            window = window_left if self._use_window else -1
            is_padding = schedule.in_graph and host_length == 1  # SGLang's lanes that pad a graph
            is_empty = (length, host_length) == (0, 1)  # FlashInfer's empty prefix
            if not is_padding and not is_empty and length != host_length:
                report.problem(
                    f"FlashInfer, lane {lane}: {host_length} keys on the host, {length} on the device"
                )
            found = flashinfer_planner.ceil_div(max(length, 1), made.chunk)
            if found != made.counts[lane]:
                report.problem(
                    f"FlashInfer, lane {lane}: planned for {made.counts[lane]} chunks of {made.chunk} keys, "
                    f"{found} on the device"
                )
                slots, causal, window = slots[: made.chunk], False, -1
            keys, values = (pool[slots] for pool in pools)
            attended, sums = attend(
                q[rows],
                keys,
                values,
                causal=causal,
                scale=scale,
                back=window,
                softcap=softcap if self._use_softcap else 0.0,
            )
            out[rows] = attended.to(out.dtype)
            if lse is not None:
                lse[rows] = sums


class Ragged:
    """BatchPrefillWithRaggedKVCacheWrapper: a prefill's new tokens among themselves."""

    def __init__(self, workspace, layout="NHD", backend="auto", **_):
        pass

    def begin_forward(self, qo, kv, num_qo_heads, num_kv_heads, head_dim, q_data_type=None, **_):
        self._qo, self._kv = qo.tolist(), kv.tolist()

    def forward(self, *args, **kwargs):
        return self.forward_return_lse(*args, **kwargs)[0]

    def forward_return_lse(
        self, q, k, v, causal=False, sm_scale=None, logits_soft_cap=None, window_left=-1, **_
    ):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
        for i in range(len(self._qo) - 1):
            rows, new = slice(self._qo[i], self._qo[i + 1]), slice(self._kv[i], self._kv[i + 1])
            if rows.start < rows.stop:
                attended, sums = attend(
                    q[rows],
                    k[new],
                    v[new],
                    causal=causal,
                    scale=sm_scale,
                    back=window_left,
                    softcap=logits_soft_cap or 0.0,
                )
                out[rows], lse[rows] = attended.to(out.dtype), sums
        return out, lse


class Decode:
    """BatchDecodeWithPagedKVCacheWrapper, which a server that verifies blocks never runs."""

    def __init__(self, *args, **kwargs):
        pass
