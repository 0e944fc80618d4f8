"""Changes to a server under test.

Python imports this file at start-up if its folder is on PYTHONPATH. SERVER_PATCH names the changes,
separated by spaces. A module that is not imported yet is patched when it is.
"""

import functools
import importlib
import itertools
import os
import sys
from pathlib import Path


def _give_costs(module, verify, draft) -> None:
    """Give adaptive width the costs of its cycles instead of measuring them.

    verify: seconds of [loads, 1] requests that verify [slots] each. draft: of a draft for [loads] requests.
    """
    assert hasattr(module, "_measure")

    def costs(worker, backends, verify_lens, budget):
        loads, slots = module.np.array([1, 64]), module.np.array(verify_lens)
        return module.Costs(loads, slots, verify(loads[:, None], slots), draft(loads))

    module._measure = costs
    sys.modules[module.Policy.__module__].Pace.observe = lambda *_: None  # nor does a cycle correct them


def known_costs(module) -> None:
    """Let drafting pay for a few dozen requests; their own acceptance decides how much of a block."""
    _give_costs(module, lambda n, slots: 0.010 + 0.00006 * n * slots, lambda n: 0.002 + 0.00005 * n)


def cheap_rows(module) -> None:
    """Let a row cost a hundredth of an anchor-only cycle, and a draft 0.3 of one."""
    _give_costs(module, lambda n, slots: 1 + 0.01 * n * (slots - 1), lambda n: 0.3 + 0 * n)


def strict_sync(module) -> None:
    """Let CUDA raise on a synchronisation inside a decode step."""
    import torch

    decode = module.DFlashWorker.decode

    def strict_decode(self, *args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    module.DFlashWorker.decode = strict_decode


def misdeclared_draft(module) -> None:
    """Declare a flatter draft distribution than the drafted tokens come from."""
    choose = module.choose_tokens

    def misdeclare(*args, **kwargs):
        tokens, draft = choose(*args, **kwargs)
        flatter = draft.probs.sqrt()
        return tokens, module.DraftProbs(draft.ids, flatter / flatter.sum(dim=-1, keepdim=True))

    module.choose_tokens = misdeclare


def eager_copies(module) -> None:
    """Let a request copy whenever its last token has occurred before."""
    module.SHORTEST_MATCH = 1


def broken_logits(module) -> None:
    """Set the target's logits at each position of a request's blocks from its custom_params."""

    from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

    class BreakLogits(CycleObserver):
        def on_drafted(self, batch, cycle, block):
            self.rows = cycle.layout

        def on_verified(self, batch, block, logits):
            wanted = [(req.sampling_params.custom_params or {}).get("logit", 0) for req in batch.reqs]
            values = self.rows.repeat(logits.new_tensor([*map(float, wanted)]))
            logits[:, 7] = values.where(values != 0, logits[:, 7])

    from_environment = module.observers_from_environment
    module.observers_from_environment = lambda: [*from_environment(), BreakLogits()]


# Cycles from one planted fault to the next.
PLANTED_EVERY = 25


def leaked_slot(module) -> None:
    """Leak a KV slot: nothing frees it."""
    decode, cycles = module.DFlashWorker.decode, itertools.count(1)

    def leak_and_decode(self, batch, *args):
        if next(cycles) == PLANTED_EVERY:
            batch.token_to_kv_pool_allocator.alloc(self.target_worker.model_runner.page_size)
        return decode(self, batch, *args)

    module.DFlashWorker.decode = leak_and_decode


def _every_so_often(module, change) -> None:
    """Change what is accepted in one cycle of PLANTED_EVERY."""
    accept, cycles = module.Acceptor.accept, itertools.count(1)

    def accept_and_change(self, *args, **kwargs):
        accepted = accept(self, *args, **kwargs)
        return accepted if next(cycles) % PLANTED_EVERY else change(accepted)

    module.Acceptor.accept = accept_and_change


def dropped_accept(module) -> None:
    """Drop the last accepted drafted token; the bonus token takes its place."""

    def drop(accepted):
        reported, less = accepted.reported.clone(), (accepted.accept_len > 0).int()
        for row in less.nonzero()[:, 0].tolist():
            last = int(accepted.accept_len[row])
            reported[row, last - 1] = reported[row, last]
        names = ("accept_len", "commit_lens", "committed")
        shorter = {name: getattr(accepted, name) - less for name in names}
        return accepted._replace(tokens=reported, reported=reported, **shorter)

    _every_so_often(module, drop)


def swapped_request(module) -> None:
    """Let two requests of a batch report each other's tokens."""

    def swap(accepted):
        reported = accepted.reported.clone()
        reported[:2] = accepted.reported[:2].flip(0)
        return accepted._replace(reported=reported)

    _every_so_often(module, swap)


def lora_on_cpu(module) -> None:
    """Let SGLang's LoRA run without a GPU: it page-locks tensors of the host."""
    import torch

    class WithoutPinnedMemory:
        def __getattr__(self, name):
            value = getattr(torch, name)
            if name not in ("zeros", "empty", "tensor"):
                return value
            return lambda *args, pin_memory=False, **kwargs: value(*args, **kwargs)

    module.torch = WithoutPinnedMemory()


def another_sglang(module) -> None:
    """Pretend that SGLang is another version, with other parameters of `add_cli_args`."""
    from dataclasses import replace

    ours = module.patches_at
    module.patches_at = lambda time: [
        replace(patch, signature="(parser, more)", feature=None) if patch.name == "add_cli_args" else patch
        for patch in ours(time)
    ]


def failing_activation(module) -> None:
    """Let our part of SGLang's registries fail, after our patches at load."""

    def fail():
        raise KeyError("a registry that another plugin has closed")

    module.register = fail


def setting(name: str, value):
    """Return a patch that sets a name of a module."""
    return lambda module: setattr(module, name, value)


# name -> module -> what to do to it: a function of the module, or where in `support` it is
PATCHES = {
    "known_costs": {"sglang_dflash.srt.speculative.width.measure": known_costs},
    "cheap_rows": {"sglang_dflash.srt.speculative.width.measure": cheap_rows},  # instead of known costs
    "scheduled_lengths": {
        "sglang_dflash.srt.speculative.width.settings": "server_patches.scheduled_lengths:read_schedule",
        "sglang_dflash.srt.speculative.width.policy": "server_patches.scheduled_lengths:follow_schedule",
    },
    "strict_sync": {"sglang_dflash.srt.speculative.dflash_worker": strict_sync},
    "broken_logits": {"sglang_dflash.srt.speculative.dflash_worker": broken_logits},
    "eager_copies": {"sglang_dflash.kernels.ops.speculative.copy_ahead": eager_copies},
    # The wait under the draft takes a CPU's backends, whose draft reads lengths on the device.
    "late_lengths": {
        "sglang_dflash.srt.speculative.dflash_worker": setting("check_backends", lambda *_: None)
    },
    "leaked_slot": {"sglang_dflash.srt.speculative.dflash_worker": leaked_slot},
    "dropped_accept": {"sglang_dflash.srt.speculative.acceptance.acceptor": dropped_accept},
    "swapped_request": {"sglang_dflash.srt.speculative.acceptance.acceptor": swapped_request},
    "misdeclared_draft": {"sglang_dflash.srt.speculative.drafters.sampling": misdeclared_draft},
    # Sampling masks of sampled requests: SGLang wants a CUDA kernel for them, and no `min_p`.
    "masks_of_draws": {
        "sglang.srt.managers.scheduler": setting("validate_spec_sampling_mask_request", lambda *_: None)
    },
    # The scheduler admits more requests than the pool can hold to their end: it is told that answers are
    # short (SGLang's SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, read at import).
    "overcommit": {"sglang.srt.managers.schedule_policy": setting("CLIP_MAX_NEW_TOKENS", 8)},
    # A host pool may take the last 10 GiB of memory, which SGLang leaves free.
    "no_memory_reserve": {
        "sglang.srt.mem_cache.pool_host.base": setting("HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    },
    "another_sglang": {
        "sglang_dflash.srt.plugins.patches": another_sglang,
        "sglang_dflash.srt.plugins.refusals": setting("installed_version", lambda: "0.5.99"),
    },
    "failing_activation": {"sglang_dflash.srt.plugins.algorithm": failing_activation},
    "lora_on_cpu": {
        "sglang.srt.lora.backend.torch_backend": lora_on_cpu,
        "sglang.srt.lora.layers": lora_on_cpu,
    },
    "rehearsal": {
        "sglang_dflash.srt.plugins.algorithm": "rehearsal.stage:set_the_stage",
        "sglang.srt.arg_groups.speculative_hook": "rehearsal.stage:pretend_support",
    },
    # What no user deploys on a CPU.
    "kv_transfer": {"sglang_dflash.srt.plugins.patches": "cpu_room:serve_transfer"},
    "more_recurrent_targets": {"sglang_dflash.srt.plugins.patches": "cpu_room:serve_recurrent_targets"},
    # SGLang refuses --enable-deterministic-inference with CPU attention, as a row's rounding may depend on
    # its batch. In float32 that hardly ever decides a draw. A CPU has no batch-invariant kernels.
    "deterministic_on_cpu": {
        "sglang.srt.arg_groups.choices": lambda module: module.add_deterministic_attention_backend_choices(
            ["torch_native"]
        ),
        "sglang.srt.model_executor.model_runner": lambda module: setattr(
            module.ModelRunner, "maybe_enable_batch_invariant_mode", lambda self: None
        ),
    },
}


def make(name: str, patch, module) -> None:
    """Apply a part of the patch of this name."""
    if isinstance(patch, str):
        file, _, function = patch.partition(":")
        patch = getattr(importlib.import_module(f"support.{file}"), function)
    patch(module)
    print(f"server patch: {name}", flush=True)


if "SERVER_PATCH" in os.environ:
    asked = os.environ["SERVER_PATCH"].split()
    sys.path.append(str(Path(__file__).parents[2]))
    if "rehearsal" in asked:
        from support.rehearsal import cuda_branches

        cuda_branches.install()
    patches = {
        module: functools.partial(make, name, patch)
        for name in asked
        for module, patch in PATCHES[name].items()
    }
    for module in patches.keys() & sys.modules.keys():  # in a fork of a process that has it (warm_start.py)
        patches.pop(module)(sys.modules[module])
    sys.path.append(str(Path(__file__).parents[4] / "benchmark"))
    from after_import import after_import

    after_import(patches)
