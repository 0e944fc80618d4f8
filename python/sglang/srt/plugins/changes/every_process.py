"""Changes in every process, and in the process that receives requests."""

from sglang_dflash.srt.plugins import hooks
from sglang_dflash.srt.plugins.change import CPU, SPECULATORS, Change, CpuChange, made_by, our_object
from sglang_dflash.srt.plugins.changes.cpu import AT_CPU_LOAD

_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"

AT_LOAD = (
    Change(
        target="sglang.srt.arg_groups.parallel_hook.handle_deprecated_dp_attention",
        remove_when="SGLang reads speculators checkpoints and has P-EAGLE",
        upstream="https://github.com/sgl-project/sglang/issues/23171",
        feature=SPECULATORS,
        kind="resolution",
        signature="(server_args)",
        why="--model-path may name a speculators checkpoint, and PEAGLE is DFLASH to SGLang; this step comes "
        "before any reader",
        build=hooks.detect_speculators_model,
    ),
    Change(
        target="sglang.srt.configs.model_config_parser_registry._MODEL_CONFIG_PARSER_REGISTRY",
        remove_when="SGLang reads speculators checkpoints",
        upstream="https://github.com/sgl-project/sglang/pull/40630",
        feature=SPECULATORS,
        replaces="sglang.srt.utils.hf_transformers.config.HfModelConfigParser",
        kind="entry",
        key="hf",
        why="read speculators drafts, whose config transformers rejects, wherever SGLang reads one",
        build=our_object("srt.configs.draft_config_parser.DraftConfigParser"),
    ),
    CpuChange(
        target="sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
        remove_when="SGLang serves on any CPU without kernels of its own",
        upstream="https://github.com/sgl-project/sglang/issues/8281",
        feature=CPU,
        kind="resolution",
        signature="(server_args)",
        why="SGLang's CPU defaults are intel_amx, whose kernels the stand-in lacks, and all memory for KV",
        build=our_object("srt.arg_groups.dflash_args.default_cpu_args"),
    ),
    CpuChange(
        target="sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        remove_when="SGLang's torch_native has sinks and windows",
        feature=CPU,
        kind="resolution",
        signature="(server_args)",
        why="SGLang refuses gpt-oss and Gemma 4 on torch_native; our attention of that name serves them",
        build=our_object("srt.arg_groups.dflash_args.pass_backend_lists_on_cpu"),
    ),
    CpuChange(
        target="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        remove_when="SGLang's torch_native has these",
        upstream="https://github.com/sgl-project/sglang/issues/36352",
        feature=CPU,
        replaces="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        kind="entry",
        key="torch_native",
        why="torch_native lacks TARGET_VERIFY, non-causal blocks, sinks, soft caps, MLA and padded batches, "
        "and reads windowed layers at the wrong slots. Ours is built if needed, else SGLang's. The engine "
        "keys on the name, so it stays",
        build=hooks.cpu_attention,
    ),
    Change(
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        remove_when="SGLang names a missing draft, and DFLASH's adaptive width is upstream",
        upstream="https://github.com/sgl-project/sglang/issues/36127",
        kind="resolution",
        signature="(server_args)",
        why="report a missing draft by name before SGLang tries to read its config",
        build=hooks.check_draft_path,
    ),
    Change(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        remove_when="SGLang lets plugins declare flags",
        feature="the flags of sglang-dflash on the command line (their environment variables work)",
        kind="around",
        signature="(parser)",
        why="offer DFLASH's own flags on SGLang's command line",
        build=hooks.add_cli_args,
    ),
    Change(
        target=f"{_ALGORITHM}.handle_server_args",
        remove_when="SGLang lets a plugin replace a built-in algorithm",
        upstream="https://github.com/sgl-project/sglang/pull/23991",
        kind="around",
        signature="(self, server_args)",
        why="resolve and validate DFLASH's arguments with our rules",
        build=hooks.handle_server_args,
    ),
    Change(
        target=f"{_ALGORITHM}.create_worker",
        remove_when="SGLang lets a plugin replace a built-in algorithm",
        upstream="https://github.com/sgl-project/sglang/pull/23991",
        kind="around",
        signature="(self, server_args)",
        why="run our worker, and apply AT_WORKER just before it is built",
        build=hooks.create_worker,
    ),
    *AT_CPU_LOAD,
)

AT_FRONT_END = (
    Change(
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        remove_when="SGLang checks their types and ranges",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        feature="checks of sampling parameters",
        signature="(self)",
        why="SGLang does not check types and ranges of sampling parameters; some end the scheduler",
        build=made_by("srt.speculative.request_fields.checking_requests"),
    ),
)
