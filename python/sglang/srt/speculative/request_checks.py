"""Checks of requests, in two processes. What fails is answered with HTTP 400, by name.

`find_problem` stands in the scheduler and keeps it alive, whoever sends the request. `check_request` stands
in SGLang's front end in Python, which checks few types: the scheduler could not decode what it sends.
"""

import functools
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.srt.configs.fields import short_repr
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
_GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
# SGLang fills these in itself.
_INTERNAL = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
)


@patches(
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    at=FRONT_END,
    signature="(self)",
    feature="checks of sampling parameters",
    upstream="https://github.com/sgl-project/sglang/pull/28960",
)
def check_and_normalize(original: Callable[[Any], None], request: Any) -> None:
    """Check types and ranges of sampling parameters, as some would end the scheduler."""
    check_request(request)
    original(request)


def check_request(request: Any) -> None:
    """Check SGLang's GenerateReqInput.

    Raises ValueError naming the first bad field; SGLang answers it with HTTP 400.
    """
    if isinstance(request.sampling_params, list) and _is_one_prompt(request):
        raise ValueError("sampling_params: a list goes with a list of prompts.")
    overrides = [value for value in _each(request.positional_embed_overrides) if value]
    if any(type(value).__name__ != "PositionalEmbeds" for value in overrides):
        raise ValueError("positional_embed_overrides: a request cannot contain tensors.")
    for sampling in _each(request.sampling_params):
        if not isinstance(sampling, dict):
            raise ValueError(f"sampling_params: {short_repr(sampling)} is not an object.")
        _check_sampling(sampling)
    if isinstance(request.rid, list) and _is_one_prompt(request):
        # One prompt with several answers is a list of one to SGLang.
        sampling = request.sampling_params or {}
        if len(request.rid) != 1 or sampling.get("n", 1) == 1:
            raise ValueError(f"rid: {short_repr(request.rid)} is a list, which goes with a list of prompts.")
    for start in _each(request.logprob_start_len):
        if not -INT64 <= start < INT64:
            raise ValueError(f"logprob_start_len: {start} is beyond 64 bits.")


def _check_sampling(sampling: dict[str, Any]) -> None:
    if sampling.get("n", 1) is None:
        del sampling["n"]  # the default, as everywhere
    for name, value in sampling.items():
        if name in _INTERNAL or name not in _parameter_types():
            raise ValueError(f"sampling_params: there is no {name!r}.")
        if value is None:  # the default
            continue
        try:
            msgspec.convert(value, _parameter_types()[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {name} cannot be {short_repr(value)}: {error}.") from error
        if any(not -INT64 <= number < INT64 for number in _integers(value)):
            raise ValueError(f"sampling_params: {name} has a number beyond 64 bits.")
    for pattern in _each(sampling.get("stop_regex")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"sampling_params: stop_regex {short_repr(pattern)} is no regular expression: {error}."
            ) from error
    n = sampling.get("n", 1)
    if not 1 <= n <= MAX_ANSWERS:
        raise ValueError(f"sampling_params: n is {n}, and has to be 1 to {MAX_ANSWERS}.")


def _is_one_prompt(request: Any) -> bool:
    ids, embeds = request.input_ids, request.input_embeds
    if request.text is not None:
        return isinstance(request.text, str)
    if ids is not None:
        return bool(ids) and isinstance(ids[0], int)
    return bool(embeds) and bool(embeds[0]) and isinstance(embeds[0][0], float)


@functools.cache
def _parameter_types() -> dict[str, Any]:
    """Return the types of SGLang's sampling parameters by name."""
    types = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    return types | {"stop_token_ids": list[int | str | None]}  # SGLang itself makes numbers of them


def _each(values: Any) -> Sequence[Any]:
    """List the values of a field that may be one value for all prompts, or one for each."""
    if values is None:
        return ()
    return values if isinstance(values, list) else (values,)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        for key, nested in value.items():
            yield from _integers(key)
            yield from _integers(nested)
    elif isinstance(value, list):
        for nested in value:
            yield from _integers(nested)


class RefusedParams(SamplingParams):
    """Sampling parameters of a refused request, which SGLang still runs through one forward.

    `problem` is the message of the request's HTTP 400.
    """

    problem: str = ""


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
    if problem := find_problem(recv_req, scheduler.model_config):
        _make_harmless(recv_req, problem)
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
    problem = _problem(req)
    if problem is not None:
        # SGLang runs one step of a refused request, and has it wait for room until then.
        req.sampling_params.max_new_tokens = 1
    return problem


def _problem(req: Any) -> str | None:
    if isinstance(req.sampling_params, RefusedParams):
        return req.sampling_params.problem
    if req.custom_logit_processor is not None:
        try:
            guard(req)
        except Exception as error:  # whatever the sender's bytes raise; SGLang would end the server
            req.custom_logit_processor = None
            return f"custom_logit_processor: cannot be used: {type(error).__name__}: {error!s:.200}."
    return _outside_vocabulary(req) or end_with_pool(req)


def find_problem(request: Any, model: Any) -> str | None:
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
        ("top_k", [params.top_k], 1, MAX_TOP_K),
        ("top_logprobs_num", [request.top_logprobs_num], 0, model.vocab_size),
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


def _make_harmless(request: Any, problem: str) -> None:
    """Let nothing of a refused request reach a forward."""
    request.sampling_params = RefusedParams(
        problem=problem, max_new_tokens=1, top_k=1, stop_strs=[], stop_regex_strs=[], is_normalized=True
    )
    request.custom_logit_processor = request.token_ids_logprob = None
    request.return_logprob = request.return_hidden_states = request.return_sampling_mask = False
    request.top_logprobs_num, request.logprob_start_len = 0, -1
    if request.input_embeds is not None:
        request.input_embeds, request.input_ids = None, array("q", [0])


def _outside_vocabulary(req: Any) -> str | None:
    """Describe a prompt that would end the server with an index error, or return None.

    Such a prompt is empty, or names a token id outside the embedding. SGLang accepts both.
    """
    ids = req.origin_input_ids
    if not len(ids):
        return "input_ids: the prompt has no tokens."
    if req.multimodal_inputs is not None:
        return None  # ids of an image's tokens are outside on purpose
    for token in (min(ids), max(ids)):
        if not 0 <= token < req.vocab_size:
            return f"input_ids: {token} is outside the vocabulary, 0 to {req.vocab_size - 1}."
    return None
