"""Checks of request fields that could end the server.

Such a field reaches an index, a number of fixed width or an allocation, and SGLang does not check it. The
request is refused by name, in two places: the front end sees it as it was sent, and the scheduler knows the
vocabulary.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from sglang_dflash.srt.configs.validation import shown
from sglang_dflash.srt.speculative.acceptance.caps import check_cap
from sglang_dflash.srt.speculative.acceptance.processors import guard

# Answers to one prompt. Each is a request of its own, and all of them are made at once.
MAX_ANSWERS = 4096
INT64 = 2**63
# The sampler keeps `top_k` in 32 bits. Above the vocabulary it keeps every token anyway.
MAX_TOP_K = 2**31 - 1
# SGLang fills these in itself.
_INTERNAL = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
)


def checking_requests() -> Callable[[Any], None]:
    """Wrap `GenerateReqInput.normalize_batch_and_arguments` in a check of the request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    original = GenerateReqInput.normalize_batch_and_arguments

    @functools.wraps(original)
    def normalize_batch_and_arguments(self):
        check_request(self)
        original(self)

    return normalize_batch_and_arguments


def check_request(request: Any) -> None:
    """Check SGLang's GenerateReqInput.

    Raises ValueError naming the first bad field; SGLang answers it with HTTP 400.
    """
    if isinstance(request.sampling_params, list) and _is_one_prompt(request):
        raise ValueError("sampling_params: a list goes with a list of prompts.")
    if not all(
        type(value).__name__ == "PositionalEmbeds"
        for value in _each(request.positional_embed_overrides)
        if value
    ):
        raise ValueError("positional_embed_overrides: a request cannot contain tensors.")
    for sampling in _each(request.sampling_params):
        if not isinstance(sampling, dict):
            raise ValueError(f"sampling_params: {shown(sampling)} is not an object.")
        _check_sampling(sampling)
    if isinstance(request.rid, list) and _is_one_prompt(request):
        # One prompt with several answers is a list of one to SGLang.
        sampling = request.sampling_params or {}
        if len(request.rid) != 1 or sampling.get("n", 1) == 1:
            raise ValueError(f"rid: {shown(request.rid)} is a list, which goes with a list of prompts.")
    for start in _each(request.logprob_start_len):
        if not -1 <= start < INT64:
            raise ValueError(f"logprob_start_len: {start} is neither -1 nor a position.")


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
            raise ValueError(f"sampling_params: {name} cannot be {shown(value)}: {error}.") from error
        if any(not -INT64 <= number < INT64 for number in _integers(value)):
            raise ValueError(f"sampling_params: {name} has a number beyond 64 bits.")
    check_cap(sampling.get("custom_params"))
    for pattern in _each(sampling.get("stop_regex")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"sampling_params: stop_regex {shown(pattern)} is no regular expression: {error}."
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
    from sglang.srt.sampling.sampling_params import SamplingParams

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


def remove_out_of_range(req: Any) -> list[str]:
    """Remove values outside the vocabulary, or their integer type, from a scheduler's request.

    Returns a message for each. SGLang runs even a refused request through one forward, so they must go.
    """
    found, params, last = [], req.sampling_params, req.vocab_size - 1
    if req.custom_logit_processor is not None:
        try:
            guard(req)
        except Exception as error:  # whatever the sender's bytes raise; SGLang would end the server
            found.append(f"custom_logit_processor: cannot be used: {type(error).__name__}: {error!s:.200}")
            req.custom_logit_processor = None
    if outside := [token for token in params.stop_token_ids or () if not 0 <= token <= last]:
        found.append(f"stop_token_ids: {outside[0]} is outside the vocabulary, 0 to {last}")
        params.stop_token_ids = None
    if params.top_k > MAX_TOP_K:
        found.append(f"top_k: {params.top_k} is more than {MAX_TOP_K}")
        params.top_k = 1
    if not 0 <= req.logprob.top_logprobs_num <= req.vocab_size:
        found.append(f"top_logprobs_num: {req.logprob.top_logprobs_num} is not in 0 to {req.vocab_size}")
        req.logprob.top_logprobs_num = 0
    if outside := [token for token in req.logprob.token_ids_logprob or () if not 0 <= token <= last]:
        found.append(f"token_ids_logprob: {outside[0]} is outside the vocabulary, 0 to {last}")
        req.logprob.token_ids_logprob = None
    return found
