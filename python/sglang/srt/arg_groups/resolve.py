"""DFLASH's server arguments: refused, defaulted, or read from the draft checkpoint.

The main process resolves them once, inside SGLang's resolution pipeline, and its children receive the result.
The record is sealed there. Values are read through `resolving_view` and set through `declare_resolution`.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_dflash.srt.arg_groups.fallback import fall_back
from sglang_dflash.srt.arg_groups.options import (
    check_record_options,
    check_simulated_lens,
    resolve_adaptive,
    resolve_basic_mode,
    simulates_one_length,
)
from sglang_dflash.srt.arg_groups.support import (
    check_kept_rows,
    choose_draft_attention,
    draft_attention_problems,
    flag_of,
    server_problems,
)
from sglang_dflash.srt.configs.checkpoint import (
    find_file,
    read_config,
    read_file,
    read_mask_embedding,
    tensors_of,
)
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import config_remarks
from sglang_dflash.srt.configs.draft_kinds import (
    check_draft_fits_target,
    differences,
    find_mask_token,
    read_draft_config,
)
from sglang_dflash.srt.configs.draft_tensors import examine_tensors, vocabulary_problems
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.quantization import quantization_of
from sglang_dflash.srt.environ import CPU_ATTENTION_BACKEND, SOURCE, DFlashOptions, check_values
from sglang_dflash.srt.speculative.targets.kinds import check_embedding, find_capture_method
from sglang_dflash.srt.speculative.targets.recurrent import check_states_are_committed

logger = logging.getLogger(__name__)

# Verify logits are [requests * block_size, vocab] in float32: an unbounded batch would not fit. SGLang caps
# its other speculative algorithms at the same number.
DEFAULT_MAX_RUNNING_REQUESTS = 48

# Flags of other drafts, which SGLang's own DFLASH takes and does not follow: the field, the values that are
# followed, and why others are not.
_IGNORED_FLAGS = (
    ("speculative_num_steps", (None, 1), "a DFlash draft has one step"),
    ("speculative_eagle_topk", (None, 1), "a DFlash block is a chain, not a tree"),
    ("speculative_draft_sink_size", (None, 0), "a draft keeps no sinks"),
    ("speculative_token_map", (None,), "a DFlash draft shares the target's vocabulary"),
    ("speculative_accept_threshold_single", (1.0,), "acceptance is always exact"),
    ("speculative_accept_threshold_acc", (1.0,), "acceptance is always exact"),
)


class Configs(NamedTuple):
    """The target's text config, and the draft's config, which fits it."""

    target: Any
    draft: DFlashDraftConfig


def prepare(server_args: Any) -> Configs | None:
    """Check the draft's path and decide who serves, before SGLang reads the draft's config.

    Returns:
        The configs of the pair. None: SGLang's built-in DFLASH serves.

    Raises:
        ValueError: A fault that no implementation could serve.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    check_values()
    args = resolving_view(server_args)
    checkpoint = args.speculative_draft_model_path
    _check_draft_is_there(checkpoint)
    if target := read_config(args.model_path, args.revision):
        find_capture_method(target.get("architectures"))
    config = read_file(checkpoint, args.speculative_draft_model_revision)
    if fall_back(server_args, server_problems(server_args, config)):
        return None
    # Without a config.json SGLang has other formats, or reports it.
    configs = load_and_check_configs(args, config_remarks(config, checkpoint) if config else ())
    if fall_back(server_args, draft_attention_problems(args, configs.draft, configs.target)):
        return None
    return configs


def _check_draft_is_there(path: str | None) -> None:
    if path is None:
        raise ValueError("DFLASH needs a draft: give --speculative-draft-model-path.")
    # `dir/name` may be a hub id; it is a path if there is such a directory here.
    may_be_hub_id = path.count("/") == 1 and not path.startswith((".", "~", "/"))
    looks_local = not may_be_hub_id or os.path.isdir(path.split("/")[0])
    is_there = os.path.isfile(os.path.join(os.path.expanduser(path), "config.json"))
    if looks_local and not is_there and not (may_be_hub_id and find_file(path)):
        raise ValueError(f"--speculative-draft-model-path {path!r}: no config.json there.")


def resolve_arguments(server_args: Any, configs: Configs, is_adaptive: bool) -> None:
    """Validate and complete DFLASH's arguments.

    Args:
        server_args: SGLang's record.
        configs: those of the pair.
        is_adaptive: whether `--speculative-adaptive` was given.

    Raises:
        ValueError: The arguments have faults, which it names.
    """
    from sglang.srt.arg_groups.model_override_base import (
        attention_backends_of,
        model_config_of,
        resolved_view,
        resolving_view,
    )
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    args = resolving_view(server_args)
    _warn_of_ignored_flags(args)
    target_config, draft = configs
    target_model = model_config_of(server_args)
    differing = differences(draft, target_config, target_model.context_len)
    for text in (*draft.remarks, *differing.values()):
        logger.warning("DFLASH: the draft's %s.", text)
    _check_mask_token(args, draft, target_config.vocab_size)
    block_size = choose_block_size(args, draft)
    check_simulated_lens(block_size)
    check_copy_ahead(block_size)
    check_record_options(args.dp_size * args.attn_dp_size)
    max_running_requests = args.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS
    check_kept_rows(args, max_running_requests, block_size)
    is_recurrent = mambaish_config(target_model) is not None
    if is_recurrent:
        check_states_are_committed(target_model)
    resolve_adaptive(args, is_adaptive, block_size, is_recurrent)
    prefill_backend, _ = attention_backends_of(resolved_view(server_args))
    draft_backend = CPU_ATTENTION_BACKEND
    if args.device != "cpu":
        draft_backend = choose_draft_attention(args, prefill_backend, draft, target_config)
    if draft.shifts_request_table and args.speculative_draft_window_size is not None:
        raise ValueError(f"{draft.kind} does not support --speculative-draft-window-size.")
    adjusted = _adjust_to_recurrent_target(args, target_config, block_size) if is_recurrent else {}
    if args.enable_mixed_chunk and args.disable_radix_cache and (args.page_size or 1) > 1:
        # docs/dev/upstream/prefill-chunks.md
        logger.warning(
            "DFLASH turns --enable-mixed-chunk off: with --page-size %d and --disable-radix-cache SGLang "
            "loses the rest of a prompt, even without a draft.",
            args.page_size,
        )
        adjusted["enable_mixed_chunk"] = False
    inherited = args.speculative_draft_model_quantization
    if inherited is not None and not args._speculative_draft_quantization_explicitly_set:
        logger.info("DFLASH: --quantization %s is the target's; the draft stays as it is saved.", inherited)
    adjusted |= resolve_basic_mode(args)
    dtype = args.dtype  # the draft has to have it too
    if dtype == "auto":
        dtype = str(_get_and_verify_dtype(target_config, dtype)).removeprefix("torch.")
    declare_resolution(
        server_args,
        source=SOURCE,
        # SGLang sizes KV reservations from steps and topk for every algorithm; a chain is 1 and 1.
        dtype=dtype,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=block_size,
        speculative_draft_attention_backend=draft_backend,
        speculative_draft_model_quantization=None,  # our model reads the file's own scheme
        max_running_requests=max_running_requests,
        # For DFLASH alone SGLang lets requests wait until 2 to 4 slots are free, as a draft's prefill costs a
        # forward. Ours costs none (benchmark/results/free-slots.md).
        min_free_slots_delay=args.min_free_slots_delay or 1,
        **adjusted,
    )
    # Two counts that confuse people: SGLang's includes the anchor, the training library's does not.
    logger.info(
        "DFLASH: num_draft_tokens=%d counts the anchor; speculative_tokens=%d are drafted per step "
        "(trained: %d). At most %d running requests, admitted from %d free slots on "
        "(--min-free-slots-delay).",
        block_size,
        block_size - 1,
        draft.num_drafting_rows,
        max_running_requests,
        args.min_free_slots_delay,
    )


def load_and_check_configs(args: Any, remarks: Sequence[str] = ()) -> Configs:
    """Read the configs of the target and of the draft, which fit each other.

    `remarks` on the draft's config.json become those of the draft.

    Raises:
        DraftConfigError: The draft's config or files are not valid, or do not fit the target.
        ValueError: The target cannot be served with a draft.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    options = {
        "trust_remote_code": args.trust_remote_code,
        "model_override_args": json.loads(args.json_model_override_args),
    }
    checkpoint = args.speculative_draft_model_path
    target = get_config(args.model_path, revision=args.revision, **options)
    draft = get_config(checkpoint, revision=args.speculative_draft_model_revision, **options)
    find_capture_method(target.architectures)  # refuse what no draft could read before faults in this one
    check_embedding(target)
    config = read_draft_config(draft, checkpoint).with_remarks(remarks)
    target_text = get_hf_text_config(target)
    check_draft_fits_target(config, target_text, checkpoint, target.architectures or ())
    quantization_of(draft, checkpoint)  # refuse what cannot be read
    if (args.speculative_draft_load_format or args.load_format) in ("auto", "safetensors", "pt"):
        check_draft_tensors(checkpoint, draft, config, target_text.vocab_size)
    return Configs(target_text, config)


def check_draft_tensors(
    checkpoint: str, hf_config: Any, draft: DFlashDraftConfig, target_tokens: int | None = None
) -> None:
    """Raise DraftConfigError naming each tensor of a local checkpoint that does not fit.

    The loader checks a hub id, whose files need not be here yet. `target_tokens` is the size of the target's
    vocabulary, or None if it is the draft's.
    """
    if not os.path.isdir(os.path.expanduser(checkpoint)):
        return
    found = examine_tensors(hf_config, draft, tensors_of(checkpoint), checkpoint)
    tokens = draft.vocab_size if target_tokens is None else target_tokens
    if problems := [*found.problems, *vocabulary_problems(draft, tokens, found.shapes, **found.maps)]:
        raise DraftConfigError(checkpoint, [*draft.remarks, *problems])


def _check_mask_token(args: Any, draft: DFlashDraftConfig, target_tokens: int) -> None:
    """Refuse an unusable mask token or mask embedding before weights are loaded."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    read_mask_embedding(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if draft.mask_token_id is not None:
        return
    tokenizer = None
    if not args.skip_tokenizer_init:
        tokenizer = get_tokenizer(
            args.tokenizer_path or args.model_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            tokenizer_backend=args.tokenizer_backend,
        )
    find_mask_token(draft, tokenizer, args.speculative_draft_model_path, target_tokens)


def _warn_of_ignored_flags(args: Any) -> None:
    ignored = [
        f"{flag_of(field)}: {reason}"
        for field, followed, reason in _IGNORED_FLAGS
        if getattr(args, field) not in followed
    ]
    if args.speculative_use_block_verification and not args.speculative_use_rejection_sampling:
        ignored.append(
            "--speculative-use-block-verification without --speculative-draft-sample-method probabilistic: "
            "greedy drafts gain nothing from it"
        )
    for text in ignored:
        logger.warning("DFLASH ignores %s.", text)


def check_copy_ahead(block_size: int) -> None:
    """Raise ValueError if copies are requested and cannot work."""
    if not DFlashOptions.COPY_AHEAD.get():
        return
    problem = None
    if block_size == 1:
        problem = "has no place to copy to: a block of 1 is the anchor alone"
    elif simulates_one_length() or DFlashOptions.SIMULATE_ACC_LENS.get():
        problem = "would learn from made-up tokens: accept lengths are simulated"
    if problem is not None:
        raise ValueError(f"--speculative-copy-ahead {problem}.")


def choose_block_size(args: Any, draft: DFlashDraftConfig) -> int:
    """Read the block size, which two flags name. The default is the trained block."""
    named = {
        "--speculative-num-draft-tokens": args.speculative_num_draft_tokens,
        "--speculative-dflash-block-size": args.speculative_dflash_block_size,
    }
    given = {flag: int(value) for flag, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"DFLASH's block size was given twice, with different values: {given}.")
    block_size = next(iter(given.values()), draft.speculative_tokens + 1)
    if block_size < 1:
        raise ValueError(f"DFLASH's block size must be positive, got {block_size}.")
    trained = draft.block_size + draft.sample_from_anchor  # the anchor's row may draft too
    if block_size > trained:
        logger.warning(
            "DFLASH drafts blocks of %d, and the draft was trained with %d: it may accept less. `python -m "
            "sglang_dflash.doctor --model-path TARGET --draft DRAFT --num-draft-tokens %d` measures both.",
            block_size,
            trained,
            block_size,
        )
    return block_size


def _adjust_to_recurrent_target(args: Any, target_config: Any, block_size: int) -> dict[str, Any]:
    """Return the fields without which a state would be wrong, or could not be verified."""
    from sglang_dflash.srt.compat import mixed_batches_cache_states

    adjusted: dict[str, Any] = {}
    can_replay = args.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    if args.enable_linear_replayssm_spec and not can_replay:
        logger.warning("DFLASH turns --enable-linear-replayssm-spec off: its kernels need a GPU.")
        adjusted["enable_linear_replayssm_spec"] = False
    keeps_backup = args.disaggregation_decode_retraction_backup != "none"
    if args.disaggregation_mode == "decode" and keeps_backup and not args.disable_overlap_schedule:
        # SGLang retracts before it has read the last cycle's result. It saves the state after that cycle with
        # the tokens before it.
        logger.warning(
            "DFLASH ends requests that a full decode server retracts with HTTP 503 instead of resuming them: "
            "SGLang would save a recurrent state one cycle ahead of its tokens. With "
            "--disable-overlap-schedule they resume."
        )
        adjusted["disaggregation_decode_retraction_backup"] = "none"
    if args.disable_radix_cache:
        return adjusted
    where = ""
    if (args.page_size or 1) > 1:
        # SGLang then cuts prompts inside a page, and files the state there under the page's beginning.
        where = f"with --page-size {args.page_size}"
    elif not mixed_batches_cache_states():
        where = "on this SGLang"
    elif args.disable_overlap_schedule and "extra_buffer" not in args.mamba_radix_cache_strategy:
        # docs/dev/upstream/prefill-chunks.md: a request that ends in a mixed batch is filed one token short.
        where = "with --disable-overlap-schedule"
    if args.enable_mixed_chunk and where:
        logger.warning(
            "DFLASH turns --enable-mixed-chunk off: %s it spoils the prefix cache of a target with recurrent "
            "states (--disable-radix-cache keeps it).",
            where,
        )
        adjusted["enable_mixed_chunk"] = False
    # States are kept at multiples of this, and two blocks in flight must not pass two of them.
    interval = args.mamba_track_interval
    grid = math.lcm(interval, getattr(target_config, "mamba_chunk_size", 64))
    if 2 * block_size > grid:
        adjusted["mamba_track_interval"] = interval * math.ceil(2 * block_size / interval)
        logger.warning(
            "DFLASH keeps states every %d tokens instead of every %d: two blocks of %d tokens must fit.",
            adjusted["mamba_track_interval"],
            interval,
            block_size,
        )
    return adjusted
