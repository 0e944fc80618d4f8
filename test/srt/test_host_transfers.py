"""No step of the decode path waits for the GPU: every possible wait has a reason here.

Static, so it holds without a GPU; the marked test lets CUDA itself object to a synchronisation.
"""

import ast

import pytest
import torch
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, dflash_arguments, serve
from support.servers import patched

SOURCE = ROOT / "python" / "sglang"
DECODE_PATH = (
    "srt/speculative/dflash_worker.py",
    "srt/speculative/dflash_info.py",
    "srt/speculative/acceptance/acceptor.py",
    "srt/speculative/acceptance/caps.py",
    "srt/speculative/acceptance/processors.py",
    "srt/speculative/acceptance/sampling_masks.py",
    "srt/layers/attention/flashinfer_keys.py",
    "srt/layers/attention/flashinfer_plans.py",
    "srt/layers/attention/gated_delta_rows.py",
    "srt/layers/attention/kv_chunks.py",
    "srt/layers/candidate_selector.py",
    "srt/layers/draft_probs.py",
    "srt/speculative/drafters/sampling.py",
    "srt/speculative/acceptance/constraints.py",
    "srt/speculative/drafters/ahead.py",
    "srt/speculative/drafters/copy_ahead.py",
    "srt/speculative/drafters/copy_stats.py",
    "srt/speculative/acceptance/penalties.py",
    "srt/speculative/cycle/in_flight.py",
    "srt/speculative/cycle/known_lengths.py",
    "srt/speculative/cycle/observer.py",
    "srt/speculative/cycle/prompts.py",
    "srt/speculative/cycle/relay.py",
    "srt/speculative/cycle/replay.py",
    "srt/speculative/cycle/rows.py",
    "srt/speculative/cycle/verify.py",
    "srt/speculative/acceptance/rejection.py",
    "srt/speculative/acceptance/simulated.py",
    "srt/speculative/acceptance/target_sampling.py",
    "srt/speculative/width/adaptive.py",
    "srt/speculative/width/clock.py",
    "srt/speculative/width/backends.py",
    "srt/speculative/width/plan.py",
    "srt/speculative/width/row_graphs.py",
    "srt/speculative/drafters/window.py",
    "srt/speculative/drafters/deferred_context.py",
    "srt/speculative/drafters/dflash.py",
    "srt/speculative/drafters/dflash2.py",
    "srt/speculative/drafters/peagle.py",
    "srt/models/dflash.py",
    "srt/models/dflash2.py",
    "srt/models/peagle.py",
    "srt/layers/vocab_argmax.py",
    "kernels/ops/speculative/block.py",
    "kernels/ops/speculative/accept.py",
    "kernels/ops/speculative/block_conv.py",
    "kernels/ops/speculative/context_kv.py",
    "kernels/ops/speculative/copy_ahead.py",
    "kernels/ops/speculative/peagle_rows.py",
    "kernels/ops/speculative/penalties.py",
    "kernels/ops/speculative/window.py",
    "kernels/ops/speculative/rejection.py",
    "kernels/ops/speculative/selector_walk.py",
)
# Methods and tensor functions that copy to the host, or whose result's shape depends on values.
METHODS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize", "unique", "masked_select"}
FUNCTIONS = {"int", "float", "bool", "nonzero", "synchronize"}

# (file, function, source of the call) -> why it does not wait
PLANS = "srt/layers/attention/flashinfer_plans.py"
ROWS = "srt/speculative/width/row_graphs.py"
ALLOWED = {
    ("srt/speculative/width/backends.py", "has_room_for_widths", "bool(left >= 0)"): "start-up, on the host",
    ("srt/speculative/width/backends.py", "follow", "int(lengths[0])"): "numpy",
    ("srt/speculative/width/backends.py", "follow", "(lengths + 1).tolist()"): "numpy",
    (ROWS, "follow", "bool((lengths == self._block_size - 1).all())"): "numpy",
    (ROWS, "_lay_out", "(lengths + 1).tolist()"): "numpy",
    (ROWS, "_lay_out", "int(lengths.max())"): "numpy",
    (ROWS, "_lay_out", "int(np.searchsorted(self.sizes, num_rows))"): "numpy",
    (ROWS, "of", "ends.tolist()"): "numpy",
    ("srt/speculative/dflash_info.py", "of_requests", "on_host.tolist()"): "numpy",
    (
        "srt/speculative/cycle/replay.py",
        "_has_graph",
        "bool(runs_graphs and graphs.can_run_graph(forward_batch))",
    ): "on the host",
    (
        "srt/speculative/acceptance/processors.py",
        "apply_processors",
        "blocks[row, 1:].tolist()",
    ): "lies on the host",
    (
        "srt/speculative/acceptance/processors.py",
        "is_disable_overlap_for_batch",
        "bool(info is not None and info.has_custom_logit_processor and self.result_queue)",
    ): "on the host",
    (PLANS, "prepare", "forward_batch.seq_lens_cpu.tolist()"): "lies on the host",
    (PLANS, "prepare", "self._queries_host.numpy()"): "lies on the host",
    (PLANS, "_probe", "int(information[_PADDED_BATCH_SIZE])"): "start-up, on the host",
    (PLANS, "_choose_plan", "self.keys.offsets.diff().cpu()"): "no plan holds; logged and counted",
    (PLANS, "_choose_plan", "self.keys.offsets.diff().cpu().tolist()"): "no plan holds; logged and counted",
    (PLANS, "next", "copied.synchronize()"): "over: SGLang waited for later work; else logged and counted",
    (PLANS, "_plan", "int(number)"): "FlashInfer's plan information, on the host",
    (PLANS, "_plan", "staging.numpy()"): "lies on the host",
    (PLANS, "_plan", "int(chunk_host[0])"): "lies on the host",
    (PLANS, "_compare", "copied.synchronize()"): "a switch for debugging; over unless 8 plans are unread",
    (PLANS, "_compare", "arrived.tolist()"): "lies on the host; a switch for debugging",
    ("srt/speculative/cycle/verify.py", "verify", "seq_lens_cpu.tolist()"): "lies on the host",
    (
        "srt/speculative/cycle/verify.py",
        "multimodal_positions",
        "int(inputs.mrope_position_delta)",
    ): "lies on the host",
    ("srt/speculative/drafters/dflash.py", "_run_block", "seq_lens_cpu.tolist()"): "lies on the host",
    (
        "srt/speculative/drafters/copy_ahead.py",
        "look_up",
        "int((batch.spec_info.reserved_lens_cpu if known is None else known).max())",
    ): "lies on the host",
    (
        "srt/speculative/drafters/copy_ahead.py",
        "look_up",
        "(self._keys.amax(dim=1) >> 32).numpy()",
    ): "the CPU's alone",
    (
        "srt/speculative/drafters/copy_ahead.py",
        "_needs_no_draft",
        "bool((self._lengths > 0).all())",
    ): "the CPU's alone",
    (
        "srt/speculative/drafters/copy_stats.py",
        "on_accept_lens",
        "cycle.transferred.synchronize()",
    ): "over: SGLang waited for later work",
    (
        "srt/speculative/drafters/copy_stats.py",
        "on_accept_lens",
        "cycle.lengths.tolist()",
    ): "lies on the host",
    (
        "kernels/ops/speculative/copy_ahead.py",
        "find_match_torch",
        "((text == suffix[:, :1]) & is_earlier).nonzero(as_tuple=True)",
    ): "the CPU's twin",
    ("srt/speculative/width/adaptive.py", "_agree", "bool(shared[2, 0])"): "numpy",
    ("srt/speculative/width/adaptive.py", "_count", "lengths.tolist()"): "numpy",
    ("srt/speculative/width/adaptive.py", "_expected_per_width", "float(seconds)"): "numpy; /server_info",
    (
        "srt/speculative/width/adaptive.py",
        "_expected_per_width",
        "self.chooser.costs.widths.tolist()",
    ): "numpy; /server_info",
    ("srt/speculative/width/backends.py", "follow", "int(lengths.max())"): "numpy",
    ("srt/speculative/width/adaptive.py", "on_accept_lens", "proposals.lengths.numpy()"): "lies on the host",
    ("srt/speculative/width/adaptive.py", "on_accept_lens", "proposals.right.numpy()"): "lies on the host",
    ("srt/speculative/width/adaptive.py", "report", "averages.tolist()"): "numpy; /server_info",
    (
        "srt/speculative/width/adaptive.py",
        "report",
        "self.chooser.costs.widths.tolist()",
    ): "numpy; /server_info",
    (
        "srt/speculative/width/adaptive.py",
        "report",
        "self.chooser.drafts.averages.round(3).tolist()",
    ): "numpy; /server_info",
    (
        "srt/speculative/cycle/in_flight.py",
        "num_drafted",
        "self.plan.verified_drafts(self.num_requests).tolist()",
    ): "numpy",
    ("srt/speculative/dflash_worker.py", "_draft_for_some", "bool(len(on_host))"): "a shape",
    (
        "srt/speculative/dflash_worker.py",
        "decode",
        "bool(caps.min() < self.block_size - 1)",
    ): "numpy",
    (
        "srt/speculative/width/plan.py",
        "exceeds",
        "bool((caps < (self.width - 1 if self.lengths is None else self.lengths)).any())",
    ): "numpy",
    ("srt/speculative/drafters/ahead.py", "copy_room", "batch.seq_lens.numpy()"): "the CPU's alone",
    ("srt/speculative/drafters/ahead.py", "on_copies", "is_long.tolist()"): "numpy",
    ("srt/speculative/drafters/peagle.py", "commit", "int(self._most_pending.max())"): "numpy",
    (
        "kernels/ops/speculative/peagle_rows.py",
        "append_rows_torch",
        "(torch.arange(width, device=requests.device) <= accept_len[:, None]).nonzero(as_tuple=True)",
    ): "the CPU's alone; CUDA has a kernel",
    (
        "srt/speculative/cycle/prompts.py",
        "packed_ranges",
        "int(on_host[1].sum())",
    ): "lies on the host; prefill",
    ("srt/speculative/drafters/peagle.py", "_run_blocks", "seq_lens_cpu.tolist()"): "lies on the host",
    ("srt/speculative/drafters/peagle.py", "_run_prompts", "int(lengths.sum())"): "lies on the host; prefill",
    (
        "srt/speculative/drafters/peagle.py",
        "_run_prompts",
        "first_rows[chosen].tolist()",
    ): "lies on the host; prefill",
    ("srt/speculative/drafters/peagle.py", "_run_prompts", "prefix.tolist()"): "lies on the host; prefill",
    ("srt/speculative/drafters/peagle.py", "_run_prompts", "extend.tolist()"): "lies on the host; prefill",
    ("kernels/ops/speculative/accept.py", "complete_blocks_torch", "bool(is_broken.any())"): "the CPU's twin",
    (
        "kernels/ops/speculative/context_kv.py",
        "write_context_kv_torch",
        "kept.flatten().nonzero()",
    ): "the CPU's twin",
    ("srt/models/dflash.py", "__init__", "bool(getattr(hf_config, 'attention_bias', False))"): "start-up",
}


def possible_transfers(name: str, source: str) -> set[tuple[str, str, str]]:
    """Return every call in a file that may wait for the device: (file, function, call)."""
    found = set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                return  # runs on the device
            function = node.name
        if isinstance(node, ast.Call):
            callee = node.func
            is_method = isinstance(callee, ast.Attribute) and callee.attr in METHODS
            is_function = isinstance(callee, ast.Name) and callee.id in FUNCTIONS
            if is_method or is_function:
                found.add((name, function, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "<module>")
    return found


def test_every_possible_host_transfer_is_accounted_for():
    found = set()
    for name in DECODE_PATH:
        found |= possible_transfers(name, (SOURCE / name).read_text())
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "call", ["lens.max().item()", "lens.cpu()", "bool((a == b).all())", "int(seq_lens[0])"]
)
def test_a_new_one_would_be_found(call):
    assert possible_transfers("x.py", f"def decode(lens):\n    return {call}\n") == {("x.py", "decode", call)}


def test_the_files_of_the_decode_path_exist():
    assert [name for name in DECODE_PATH if not (SOURCE / name).is_file()] == []


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
