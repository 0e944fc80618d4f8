"""Checks of requests, in two processes. What fails is answered with HTTP 400, by name.

`request_problem` stands in the scheduler and keeps it alive, whoever sends the request. `check_and_normalize`
stands in SGLang's front end in Python, which checks few types: the scheduler could not decode what it sends.
"""

import functools
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.srt.configs.json_values import short_repr
from sglang_dflash.srt.observability.traffic import check_record_choice
from sglang_dflash.srt.patching import FRONT_END, WORKER, patches
from sglang_dflash.srt.speculative.acceptance.processors import guard
from sglang_dflash.srt.speculative.caps import check_cap
from sglang_dflash.srt.speculative.kv_pool import end_with_pool

# Answers to one prompt. Each becomes a separate request, and all of them are made at once.
MAX_ANSWERS = 4096
INT64 = 2**63
# The sampler keeps `top_k` in 32 bits. Above the vocabulary it keeps every token anyway.
MAX_TOP_K = 2**31 - 1
_LARGEST = 1e30  # with which a logit, divided by any temperature, is a float32 still
_GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
# SGLang fills these in itself.
_INTERNAL: tuple[str, ...] = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")
_INTERNAL += ("is_normalized", "ebnf_full_assistant")
# Fields of which each prompt has one. For several prompts they may be lists.
_ONE_PER_PROMPT = (
    "rid sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob lora_path "
    "lora_id return_sampling_mask sampling_logprobs_mode return_hidden_states custom_logit_processor "
    "bootstrap_host bootstrap_port bootstrap_room"
).split()


@patches(
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    at=FRONT_END,
    signature="(self)",
    feature="checks of sampling parameters",
    upstream="https://github.com/sgl-project/sglang/pull/28960",
)
def check_and_normalize(original: Callable[[Any], None], request: Any) -> None:
    """Check types and ranges of fields, as some would end the scheduler.

    Raises ValueError naming the first bad field; SGLang answers it with HTTP 400.
    """
    overrides = [value for value in _each(request.positional_embed_overrides) if value]
    if any(type(value).__name__ != "PositionalEmbeds" for value in overrides):
        raise ValueError("positional_embed_overrides: a request cannot contain tensors.")
    for sampling in _each(request.sampling_params):
        if not isinstance(sampling, dict):
            raise ValueError(f"sampling_params: {short_repr(sampling)} is not an object.")
        _check_sampling(sampling)
    for start in _each(request.logprob_start_len):
        if not -INT64 <= start < INT64:
            raise ValueError(f"logprob_start_len: {start} is beyond 64 bits.")
    original(request)
    for name in _ONE_PER_PROMPT if request.is_single else ():
        value = getattr(request, name, None)
        if isinstance(value[0] if name == "token_ids_logprob" and value else value, list):
            raise ValueError(f"{name}: a list goes with a list of prompts.")


def _check_sampling(sampling: dict[str, Any]) -> None:
    if sampling.get("n", 1) is None:
        del sampling["n"]  # the default, as everywhere
    for name, value in sampling.items():
        if name not in _parameter_types():
            raise ValueError(f"sampling_params: there is no {name!r}.")
        if value is None:  # the default
            continue
        try:
            msgspec.convert(value, _parameter_types()[name])
            msgspec.msgpack.encode(value)  # a number deep inside may be beyond 64 bits
            for pattern in _each(value) if name == "stop_regex" else ():
                re.compile(pattern)
        except (ValueError, OverflowError, re.error) as error:
            raise ValueError(f"sampling_params: {name} cannot be {short_repr(value)}: {error}.") from error


@functools.cache
def _parameter_types() -> dict[str, Any]:
    """Return the types of a request's sampling parameters by name."""
    types = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    types["n"] = Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWERS)]
    types["stop_token_ids"] = list[int | str | None]  # SGLang itself makes numbers of them
    return {name: kind for name, kind in types.items() if name not in _INTERNAL}


def _each(values: Any) -> Sequence[Any]:
    """List the values of a field that may be one value for all prompts, or one for each."""
    return values if isinstance(values, list) else () if values is None else (values,)


class RefusedParams(SamplingParams):
    """Parameters of a refused request, which SGLang still runs through one forward."""

    problem: str = ""  # message of the HTTP 400


@patches(
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    at=WORKER,
    signature="(self, recv_req, mm_input_error)",
    upstream="https://github.com/sgl-project/sglang/pull/28960",
)
def check_and_handle(original: Callable[..., None], scheduler: Any, recv_req: Any, **options: Any) -> None:
    """Check a request whose values would end the scheduler, whatever front end sent it.

    A front end of another language sends requests without SGLang's checks in Python. SGLang also refuses some
    requests by itself, such as those of an unknown session, and then runs them with what they asked for.
    """
    if problem := request_problem(recv_req, scheduler.model_config):
        recv_req.sampling_params = RefusedParams(problem=problem, max_new_tokens=1, top_k=1)
        recv_req.sampling_params.normalize(None)
        recv_req.custom_logit_processor = recv_req.token_ids_logprob = None
        recv_req.return_logprob = recv_req.return_hidden_states = recv_req.return_sampling_mask = False
        recv_req.top_logprobs_num, recv_req.logprob_start_len = 0, -1
        if recv_req.input_embeds is not None:
            recv_req.input_embeds, recv_req.input_ids = None, array("q", [0])
    original(scheduler, recv_req, **options)


@patches(
    "sglang.srt.managers.scheduler.validate_dflash_request",
    at=WORKER,
    signature="(req, enable_overlap)",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def validate_dflash_request(req: Any, enable_overlap: bool) -> str | None:
    """Answer a request that DFLASH cannot serve exactly with HTTP 400.

    Returns the message, or None. SGLang calls this for every request.
    """
    params = req.sampling_params
    problem = params.problem if isinstance(params, RefusedParams) else _problem(req)
    if problem is not None:
        # SGLang runs one step of a refused request, and has it wait for room until then.
        req.sampling_params.max_new_tokens = 1
    return problem


def _problem(req: Any) -> str | None:
    """Return why a request is refused whose fields are right, or None."""
    if req.custom_logit_processor is not None:
        try:
            guard(req)
        except Exception as error:  # whatever the sender's bytes raise; SGLang would end the server
            req.custom_logit_processor = None
            return f"custom_logit_processor: cannot be used: {type(error).__name__}: {error!s:.200}."
    ids = req.origin_input_ids
    if not len(ids):
        return "input_ids: the prompt has no tokens."
    if req.multimodal_inputs is None:  # ids of an image's tokens are outside on purpose
        for token in (min(ids), max(ids)):
            if not 0 <= token < req.vocab_size:  # an index error would end the server
                return f"input_ids: {token} is outside the vocabulary, 0 to {req.vocab_size - 1}."
    return end_with_pool(req)


def request_problem(request: Any, model: Any) -> str | None:
    """Check SGLang's TokenizedGenerateReqInput against its ModelConfig.

    Returns why the request is refused: it would end the scheduler, or DFLASH cannot serve it exactly as the
    target alone would. None: it is served.
    """
    params = request.sampling_params
    if unsupported := _unsupported(request):
        return f"DFLASH speculative decoding does not support {', '.join(unsupported)} yet."
    try:
        params.verify(model.vocab_size)
        check_cap(params.custom_params)
        check_record_choice(params.custom_params)
    except (TypeError, ValueError) as error:
        return str(error)
    for name, values, least, most in (
        ("stop_token_ids", params.stop_token_ids or (), 0, model.vocab_size - 1),
        ("token_ids_logprob", request.token_ids_logprob or (), 0, model.vocab_size - 1),
        ("min_new_tokens", [params.min_new_tokens], 0, INT64 - 1),
        ("top_k", [params.top_k], 1, MAX_TOP_K),
        ("top_logprobs_num", [request.top_logprobs_num], 0, model.vocab_size),
        ("temperature", [params.temperature], 0, _LARGEST),
        ("logit_bias", (params.logit_bias or {}).values(), -_LARGEST, _LARGEST),
        ("repetition_penalty", [params.repetition_penalty], 1e-20, 2),
    ):
        if outside := [value for value in values if not least <= value <= most]:
            return f"{name}: {outside[0]} is not in {least} to {most}."
    if request.logprob_start_len < -1:
        return f"logprob_start_len: {request.logprob_start_len} is neither -1 nor a position."
    return None


def _unsupported(request: Any) -> list[str]:
    params, found = request.sampling_params, []
    if request.return_hidden_states:
        found.append("return_hidden_states")
    if request.input_embeds is not None:  # SGLang makes bfloat16 of them, and one batch of them and of ids
        found.append("input_embeds")
    if params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        found.append("min_p with --enable-deterministic-inference")  # SGLang's sampler would end the server
    if get_exec().kernel.grammar_backend == "outlines":  # it cannot roll back over rejected tokens
        grammars = [name for name in _GRAMMAR_FIELDS if getattr(params, name) is not None]
        found += [f"{name} with --grammar-backend outlines" for name in grammars]
    return found
