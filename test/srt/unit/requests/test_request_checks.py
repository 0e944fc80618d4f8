"""Validation of requests, in the front end and in the scheduler."""

from array import array
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import TARGET, dflash_arguments
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from support import scheduled
from support.scheduled import Job

from sglang_dflash.srt.speculative import request_checks
from sglang_dflash.srt.speculative.request_checks import (
    INT64,
    MAX_ANSWERS,
    check_and_normalize,
    request_problem,
    validate_dflash_request,
)

PROMPTS = ("text", "input_ids", "input_embeds")


def check(sampling=None, **fields) -> None:
    """Check a request as SGLang's front end does."""
    prompt = {} if fields.keys() & PROMPTS else {"text": "one prompt"}
    made = GenerateReqInput(sampling_params=sampling, **prompt | fields)
    check_and_normalize(GenerateReqInput.normalize_batch_and_arguments, made)


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        {},
        {"n": None, "temperature": 1, "top_p": 0.5, "stop": "a", "stop_token_ids": ["5", 7, None]},
        {"n": MAX_ANSWERS, "stop": ["a", "b"], "logit_bias": {"5": 1, "7": -100.0}, "ignore_eos": True},
        {"json_schema": "{}", "custom_params": {"a": [1, None], "b": {"c": "d"}, "thinking_budget": 5}},
        {"custom_params": {"speculative_max_tokens": 0}},
        {"custom_params": {"speculative_max_tokens": 10**6}},
        {"sampling_seed": INT64 - 1, "max_new_tokens": 10**9, "stream_interval": 4, "min_p": 0},
    ],
)
def test_valid_parameters_are_accepted(sampling):
    check(sampling)
    check([sampling or {}] * 2, text=["two", "prompts"])


@pytest.mark.parametrize(
    "fields",
    [
        *({"logprob_start_len": start} for start in (-1, 0, 7)),
        {"logprob_start_len": [0, -1], "text": ["two", "prompts"]},
        {"token_ids_logprob": [5, 7]},
        {"token_ids_logprob": [[5], [7]], "text": ["two", "prompts"]},
        {"rid": "a", "text": "one prompt"},
        {"rid": "a", "text": ["two", "prompts"]},
        {"rid": ["a", "b"], "text": ["two", "prompts"]},
        {"rid": ["a", "b"], "input_ids": [[1], [2]]},
        {"rid": ["a"], "text": "one prompt", "sampling": {"n": 2}},
        {"rid": ["a"], "input_embeds": [[[0.5]]]},
    ],
    ids=str,
)
def test_other_valid_fields_are_accepted(fields):
    check(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sampling": {"n": 0}}, "n cannot be 0: Expected `int` >= 1"),
        ({"sampling": {"n": MAX_ANSWERS + 1}}, f"n cannot be {MAX_ANSWERS + 1}: Expected `int` <= 4096"),
        ({"sampling": {"max_new_tokens": 2.5}}, "max_new_tokens"),
        ({"sampling": {"sampling_seed": 2**70}}, "sampling_seed"),
        ({"sampling": {"custom_params": {"a": {"b": 2**70}}}}, "custom_params"),
        ({"sampling": {"stop": "\ud800"}}, "stop"),
        ({"sampling": {"stop_regex": ["a", "["]}}, "stop_regex cannot be .*unterminated"),
        ({"sampling": {"nonsense": 1}}, "nonsense"),
        ({"sampling": ["x"]}, "sampling_params"),
        ({"sampling": [{}], "text": "one prompt"}, "a list of prompts"),
        ({"sampling": [{}], "input_ids": [1, 2]}, "a list of prompts"),
        ({"rid": ["a"], "text": "one prompt"}, "rid"),
        ({"rid": ["a"], "input_ids": [1, 2], "sampling": {"n": 1}}, "rid"),
        ({"rid": ["a", "b"], "text": "one prompt", "sampling": {"n": 2}}, "rid"),
        ({"rid": [], "input_embeds": [[0.5]]}, "rid"),
        ({"logprob_start_len": [0, 2**70], "text": ["two", "prompts"]}, "logprob_start_len"),
        ({"token_ids_logprob": [[5]], "return_logprob": True}, "token_ids_logprob"),
        ({"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides"),
        ({"positional_embed_overrides": [[1, 2]]}, "positional_embed_overrides"),
    ],
)
def test_invalid_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        check(**fields)


def test_no_list_that_one_prompt_sends_ends_the_scheduler():
    """It decodes a message by types. These are the fields that may be lists for several prompts."""
    sent_as = {field.name: field.type for field in msgspec.structs.fields(TokenizedGenerateReqInput)}
    listed = [
        name
        for name, kind in GenerateReqInput.__annotations__.items()
        if "List" in str(kind) and name in sent_as and "ist" not in str(sent_as[name])
    ]
    assert {"rid", "top_logprobs_num", "custom_logit_processor", "return_hidden_states"} < set(listed)
    unsent = {"input_ids", "bootstrap_pair_key", "decode_tp_size"}
    for name in {*listed, "lora_path"} - unsent:
        with pytest.raises(ValueError, match=name):
            check(**{"sampling" if name == "sampling_params" else name: [1]})


def test_every_parameter_that_sglang_has_is_known():
    defaults, refused = SamplingParams(), []
    for name in SamplingParams.__struct_fields__:
        try:
            check({name: getattr(defaults, name)})
        except ValueError as error:
            assert name in str(error)
            refused.append(name)
    stops = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
    assert set(refused) == {*stops, "is_normalized", "ebnf_full_assistant"}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_accepted_fields_can_be_sent_to_the_scheduler(data):
    """Every accepted field must decode, because the scheduler exits if one does not."""
    name = data.draw(st.sampled_from(SamplingParams.__struct_fields__))
    sampling = {name: data.draw(ANYTHING)}
    try:
        check(sampling)
        made = SamplingParams(**sampling)
        made.verify(2048)
    except (ValueError, TypeError):  # refused with HTTP 400
        return
    msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams)


def sent(sampling=None, **fields) -> TokenizedGenerateReqInput:
    """Return a request as the scheduler gets it."""
    return TokenizedGenerateReqInput(
        **dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
        | {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}
        | {"input_ids": array("q", [5, 99]), "sampling_params": SamplingParams(**sampling or {}), **fields}
    )


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """Publish no server: requests are checked for one without outlines and determinism."""
    published = SimpleNamespace(
        kernel=SimpleNamespace(grammar_backend="xgrammar"),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    monkeypatch.setattr(request_checks, "get_exec", lambda: published)
    return published


GOOD = (
    ({"stop_token_ids": {0, 99}, "top_k": 1 << 30, "min_p": 0.5, "regex": "a+"}, {}),
    ({"top_k": 2**31 - 1, "custom_params": {"speculative_max_tokens": 0, "speculative_record": False}}, {}),
    ({"logit_bias": {"0": 1.0, "99": -1.0}}, {"top_logprobs_num": 100, "token_ids_logprob": [0, 99]}),
    ({}, {"logprob_start_len": 0}),
)
# The field that is named, sampling parameters, other fields.
BAD = (
    ("stop_token_ids", {"stop_token_ids": {5, 10**6}, "min_new_tokens": 3}, {}),
    ("stop_token_ids", {"stop_token_ids": {-1}}, {}),
    ("top_k", {"top_k": 2**31}, {}),
    ("top_k", {"top_k": -5}, {}),
    ("min_p", {"min_p": 5.0}, {}),
    ("temperature", {"temperature": float("nan")}, {}),
    ("frequency_penalty", {"frequency_penalty": float("nan")}, {}),
    ("temperature", {"temperature": 1e300, "top_p": 0.9, "min_new_tokens": 1}, {}),
    ("repetition_penalty", {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1e-300}, {}),
    *(("logit_bias", {"temperature": 1.0, "top_p": 0.9, "logit_bias": {"5": b}}, {}) for b in (1e39, -1e39)),
    ("logit_bias", {"logit_bias": {"1000000": 1.0}}, {}),
    ("invalid literal", {"logit_bias": {"x": 1.0}}, {}),
    *(
        ("speculative_max_tokens is a", {"custom_params": {"speculative_max_tokens": cap}}, {})
        for cap in (-1, 2.5, True, "3", None, [1])
    ),
    ("speculative_record is true or false", {"custom_params": {"speculative_record": 1}}, {}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": 10**6}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": -1}),
    ("token_ids_logprob", {}, {"return_logprob": True, "token_ids_logprob": [5, 10**6]}),
    ("token_ids_logprob", {}, {"return_logprob": True, "token_ids_logprob": [-1]}),
    ("logprob_start_len", {}, {"return_logprob": True, "logprob_start_len": -5}),
    *(("input_embeds", {}, {"input_embeds": [[0.5] * width] * 20}) for width in (1, 256)),
    ("return_hidden_states", {}, {"return_hidden_states": True}),
)
MODEL = SimpleNamespace(vocab_size=100)


def test_good_fields_are_served():
    for sampling, fields in GOOD:
        assert request_problem(sent(sampling, **fields), MODEL) is None, (sampling, fields)


@pytest.mark.parametrize("name, sampling, fields", BAD)
def test_bad_fields_are_named_in_the_scheduler(name, sampling, fields):
    assert name in request_problem(sent(sampling, **fields), MODEL)


def test_a_minimum_beyond_64_bits_is_named():
    assert "min_new_tokens" in request_problem(sent({"min_new_tokens": 2**63, "max_new_tokens": None}), MODEL)


def test_a_grammar_that_cannot_roll_back_is_refused_per_request(backends):
    backends.kernel.grammar_backend = "outlines"
    assert "regex with --grammar-backend outlines" in request_problem(sent({"regex": "a+"}), MODEL)
    assert request_problem(sent(), MODEL) is None


def test_images_are_served_on_any_target():
    """SGLang gives an image's tokens ids outside the vocabulary."""
    request = SimpleNamespace(
        sampling_params=SamplingParams(),
        custom_logit_processor=None,
        multimodal_inputs=object(),
        origin_input_ids=[5, 10**9],
        vocab_size=100,
    )
    assert validate_dflash_request(request, True) is None
    request.multimodal_inputs = None
    assert "1000000000" in validate_dflash_request(request, True)
    assert request.sampling_params.max_new_tokens == 1, "SGLang would have it wait for the room of an answer"


def test_the_scheduler_outlives_every_bad_field():
    """Send each past the front end, also in a request that SGLang refuses itself; others are served."""
    unknown = {"session_params": SessionParams(id="unknown")}
    tokens = tuple(range(300, 320))
    jobs = [Job(tokens, 4, sampling=sampling, fields=fields) for _, sampling, fields in BAD]
    jobs += [Job(tokens, 4, sampling=sampling, fields=fields | unknown) for _, sampling, fields in BAD]
    jobs += [Job((), 4), Job((-1, 5), 4), Job((5, 10**6), 4)]
    jobs += [Job(tokens, 4, processor=processor) for processor in ("nonsense", '{"callable": "00"}')]
    arguments = ["--model-path", TARGET, *dflash_arguments(), "--max-total-tokens", "2000"]
    arguments += ["--mem-fraction-static", "0.3", "--enable-custom-logit-processor"]
    answers = scheduled.run(arguments, [[Job(tokens, 4), *jobs, Job(tokens, 4)]])[0]
    reasons = [answer.finish_reason for answer in answers]
    assert reasons == ["FINISH_LENGTH", *["FINISH_ABORT"] * len(jobs), "FINISH_LENGTH"]
    assert len(answers[0].output_ids) == 4 and answers[0].output_ids == answers[-1].output_ids
