"""Hooks that adapt one of SGLang's functions to ours. Each function here returns a hook; imports wait until it is called.

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


def request_check():
    from sglang_dflash.srt.speculative.request_fields import checking_requests

    return checking_requests()


def cpu_transfer_of_the_target():
    from sglang_dflash.srt.hardware_backend.cpu.transfer import preparing_targets_layers

    return preparing_targets_layers()


def metrics_set_up():
    from sglang_dflash.srt.observability.metrics_files import reserving_at_set_up

    return reserving_at_set_up()


def metrics_files():
    from sglang_dflash.srt.observability.metrics_files import reserving_init

    return reserving_init()


def metrics_values():
    from sglang_dflash.srt.observability.metrics_files import reserving_values

    return reserving_values()


def shared_graph_output():
    from sglang_dflash.srt.speculative.dflash_utils import graph_output_for_runner

    return graph_output_for_runner()


def server_info():
    from sglang_dflash.srt.observability.server_info import reporting_width

    return reporting_width()


def cpu_linear():
    from sglang_dflash.srt.hardware_backend.cpu.linear import linear_on_onednn

    return linear_on_onednn()
