"""Hooks that adapt one of SGLang's functions to ours.

Each function here returns a hook, and imports only when it is called. If a function of ours replaces SGLang's
unchanged, the ledger names it directly.
"""


def detect_speculators_model():
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dflash.srt.arg_groups import checkpoint_detection
    from sglang_dflash.srt.plugins import compatibility

    def detect(server_args, previous):
        given = resolving_view(server_args).speculative_algorithm

        def go_on(server_args):
            is_ours_alone = resolving_view(server_args).speculative_algorithm != given
            if is_ours_alone and (reason := compatibility.why_off()):
                raise ValueError(
                    "SGLang's built-in DFLASH reads no speculators checkpoint and no P-EAGLE draft, and "
                    f"sglang-dflash does not fit this SGLang ({reason}). {compatibility.HELP}"
                )
            previous(server_args)

        checkpoint_detection.detect_speculators_model(server_args, go_on)

    return detect


def check_draft_path():
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dflash.srt.arg_groups import dflash_args
    from sglang_dflash.srt.plugins import compatibility

    def check(server_args, previous):
        algorithm = resolving_view(server_args).speculative_algorithm or ""
        if algorithm.upper() == "DFLASH" and compatibility.leave_to_sglang(server_args):
            return previous(server_args)
        return dflash_args.check_draft_path(server_args, previous)

    return check


def handle_server_args():
    from sglang_dflash.srt.arg_groups.dflash_args import resolve_dflash_args
    from sglang_dflash.srt.plugins import install, ledger
    from sglang_dflash.srt.speculative.implementation import Implementation

    def handle(original, self, server_args):
        if not self.is_dflash() or Implementation.of(server_args).is_builtin:
            return original(self, server_args)
        install.install(ledger.AT_FRONT_END)
        return resolve_dflash_args(server_args)

    return handle


def add_cli_args():
    from sglang_dflash.srt.arg_groups.dflash_flags import add_flags

    def add(original, parser):
        original(parser)
        add_flags(parser)

    return add


def create_worker():
    from sglang_dflash.srt.plugins import compatibility, install, ledger
    from sglang_dflash.srt.speculative.implementation import Implementation, check_ranks_agree

    def create(original, self, server_args):
        if not self.is_dflash():
            return original(self, server_args)
        implementation = Implementation.of(server_args)
        check_ranks_agree(implementation)
        if implementation.is_builtin:
            install.install(ledger.AT_HAND_OVER)
            return original(self, server_args)
        is_disaggregated = server_args.disaggregation_mode != "null"
        try:
            install.install(ledger.AT_WORKER + (ledger.AT_DISAGGREGATION if is_disaggregated else ()))
        except install.Mismatch as mismatch:
            # The arguments are resolved by our rules, so SGLang's own worker cannot take over here.
            raise SystemExit(f"sglang-dflash: {mismatch} {compatibility.HELP}") from mismatch
        from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

        return DFlashWorker

    return create


def cpu_attention():
    from sglang_dflash.srt.plugins import install, ledger

    def create(runner):
        from sglang_dflash.srt.layers.attention import torch_native_spec

        if runner.server_args.disaggregation_mode != "null":
            install.install(ledger.AT_CPU_DISAGGREGATION)
        elif runner.server_args.enable_hierarchical_cache:
            install.install(ledger.AT_CPU_HOST_CACHE)
        if not torch_native_spec.is_needed(runner):
            return torch_native_spec.TorchNativeAttnBackend(runner)
        install.install(ledger.AT_CPU_ATTENTION)
        return torch_native_spec.TorchNativeSpecAttnBackend(runner)

    return create


def absorbed_mla():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def cpu_device_module():
    import torch

    named = torch.get_device_module
    return lambda device=None: torch.cpu if device is None else named(device)


def cpu_pin_memory():
    return lambda tensor, device=None: tensor


def cpu_snapshot_support():
    return lambda: True
