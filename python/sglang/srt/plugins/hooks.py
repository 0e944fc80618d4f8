"""Hooks that adapt one of SGLang's functions to ours. Each function here returns a hook; imports wait until
it is called.

Where a function of ours takes SGLang's place as it is, the ledger names it and nothing stands here.
"""


def handle_server_args():
    from sglang_dflash.srt.arg_groups.dflash_args import resolve_dflash_args

    def handle(original, self, server_args):
        if not self.is_dflash():
            return original(self, server_args)
        from sglang_dflash.srt.plugins.install import install_at_front_end

        install_at_front_end(has_metrics=server_args.enable_metrics)
        return resolve_dflash_args(server_args)

    return handle


def add_cli_args():
    from sglang_dflash.srt.arg_groups.dflash_flags import add_flags

    def add(original, parser):
        original(parser)
        add_flags(parser)

    return add


def create_worker():
    def create(original, self, server_args):
        if not self.is_dflash():
            return original(self, server_args)
        from sglang_dflash.srt.plugins.install import install_at_worker

        install_at_worker(is_disaggregated=server_args.disaggregation_mode != "null")
        from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

        return DFlashWorker

    return create


def cpu_attention():
    def create(runner):
        from sglang_dflash.srt.layers.attention.torch_native_spec import create_cpu_attention
        from sglang_dflash.srt.plugins.install import install_at_cpu_disaggregation

        if runner.server_args.disaggregation_mode != "null":
            install_at_cpu_disaggregation()
        return create_cpu_attention(runner)

    return create


def absorbed_mla():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def cpu_pin_memory():
    def pin_memory(self, device=None):
        return self

    return pin_memory


def cpu_snapshot_support():
    return lambda: True
