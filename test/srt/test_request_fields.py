"""Validation of request fields, without a server."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.srt.speculative.request_fields import (
    INT64,
    MAX_ANSWERS,
    check_request,
    remove_out_of_range,
)


def request(sampling=None, **fields) -> SimpleNamespace:
    absent = dict.fromkeys(
        ("logprob_start_len", "positional_embed_overrides", "text", "input_ids", "input_embeds", "rid")
    )
    return SimpleNamespace(**absent | {"sampling_params": sampling, **fields})


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        {},
        [{}, {"n": 2}],
        {"n": None, "temperature": 1, "top_p": 0.5, "stop": "a", "stop_token_ids": ["5", 7, None]},
        {"n": MAX_ANSWERS, "stop": ["a", "b"], "logit_bias": {"5": 1, "7": -100.0}, "ignore_eos": True},
        {"json_schema": "{}", "custom_params": {"a": [1, None], "b": {"c": "d"}, "thinking_budget": 5}},
        {"custom_params": {"speculative_max_tokens": 0}},
        {"custom_params": {"speculative_max_tokens": 10**6}},
        {"sampling_seed": INT64 - 1, "max_new_tokens": 10**9, "stream_interval": 4, "min_p": 0},
    ],
)
def test_valid_fields_are_accepted(sampling):
    check_request(request(sampling))
    for start in (-1, 0, 7, [0, -1]):
        check_request(request(sampling, logprob_start_len=start))


@pytest.mark.parametrize(
    "fields",
    [
        {"rid": "a", "text": "one prompt"},
        {"rid": "a", "text": ["two", "prompts"]},
        {"rid": ["a", "b"], "text": ["two", "prompts"]},
        {"rid": ["a", "b"], "input_ids": [[1], [2]]},
        {"rid": ["a"], "text": "one prompt", "sampling": {"n": 2}},
        {"rid": ["a"], "input_embeds": [[[0.5]]]},
    ],
    ids=str,
)
def test_names_of_requests_as_sglang_takes_them(fields):
    check_request(request(**fields))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sampling": {"n": 0}}, "n is 0"),
        ({"sampling": {"n": MAX_ANSWERS + 1}}, f"n is {MAX_ANSWERS + 1}"),
        ({"sampling": {"max_new_tokens": 2.5}}, "max_new_tokens"),
        ({"sampling": {"sampling_seed": 2**70}}, "sampling_seed"),
        ({"sampling": {"stop_regex": ["a", "["]}}, "stop_regex"),
        ({"sampling": {"nonsense": 1}}, "nonsense"),
        *(
            ({"sampling": {"custom_params": {"speculative_max_tokens": cap}}}, "speculative_max_tokens is a")
            for cap in (-1, 2.5, True, "3", None, [1])
        ),
        ({"sampling": ["x"]}, "sampling_params"),
        ({"sampling": [{}], "text": "one prompt"}, "a list of prompts"),
        ({"sampling": [{}], "input_ids": [1, 2]}, "a list of prompts"),
        ({"rid": ["a"], "text": "one prompt"}, "rid"),
        ({"rid": ["a"], "input_ids": [1, 2], "sampling": {"n": 1}}, "rid"),
        ({"rid": ["a", "b"], "text": "one prompt", "sampling": {"n": 2}}, "rid"),
        ({"rid": [], "input_embeds": [[0.5]]}, "rid"),
        ({"logprob_start_len": -5}, "logprob_start_len"),
        ({"logprob_start_len": [0, 2**70]}, "logprob_start_len"),
        ({"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
        ({"positional_embed_overrides": [[1, 2]]}, "positional_embed_overrides"),
    ],
)
def test_invalid_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        check_request(request(**fields))


def test_every_parameter_that_sglang_has_is_known():
    """SGLang's default of every public sampling parameter is accepted."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    defaults = SamplingParams()
    internal = (
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "is_normalized",
        "ebnf_full_assistant",
    )
    given = {
        name: getattr(defaults, name) for name in SamplingParams.__struct_fields__ if name not in internal
    }
    assert len(given) > 20
    check_request(request(given))
    for name in internal:
        with pytest.raises(ValueError, match=name):
            check_request(request({name: getattr(defaults, name)}))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_accepted_fields_can_be_sent_to_the_scheduler(data):
    """Every accepted field must decode, because the scheduler exits if one does not."""
    import msgspec
    from sglang.srt.sampling.sampling_params import SamplingParams

    name = data.draw(st.sampled_from(SamplingParams.__struct_fields__))
    sampling = {name: data.draw(ANYTHING)}
    try:
        check_request(request(sampling))
        made = SamplingParams(**sampling)
        made.verify(2048)
    except (ValueError, TypeError):  # refused with HTTP 400
        return
    msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams)


def scheduled(**fields) -> SimpleNamespace:
    logprob = SimpleNamespace(
        top_logprobs_num=fields.pop("top_logprobs_num", 0),
        token_ids_logprob=fields.pop("token_ids_logprob", None),
    )
    processor = fields.pop("custom_logit_processor", None)
    params = SimpleNamespace(**{"stop_token_ids": None, "top_k": 1, **fields})
    return SimpleNamespace(
        vocab_size=100, logprob=logprob, sampling_params=params, custom_logit_processor=processor
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": {0, 99}},
        {"top_k": 1 << 30},
        {"top_k": 2**31 - 1},
        {"top_logprobs_num": 100},
        {"token_ids_logprob": [0, 99]},
    ],
)
def test_fields_within_the_vocabulary(fields):
    assert remove_out_of_range(scheduled(**fields)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": {5, 100}},
        {"stop_token_ids": {-1}},
        {"top_k": 2**31},
        {"top_logprobs_num": 101},
        {"top_logprobs_num": -1},
        {"token_ids_logprob": [5, 100]},
        {"token_ids_logprob": [-1]},
        {"custom_logit_processor": "nonsense"},
        {"custom_logit_processor": '{"callable": "00"}'},
    ],
)
def test_fields_outside_the_vocabulary_are_named_and_removed(fields):
    req = scheduled(**fields)
    [message] = remove_out_of_range(req)
    assert message.startswith(next(iter(fields)))
    assert remove_out_of_range(req) == []
