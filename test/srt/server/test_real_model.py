"""A real model with its draft, as users run it: every answer is that of the model alone.

Overlap scheduling, adaptive width, copies and the prefix cache are on. All requests share a few batches, so
grammars, streams, edits and a conversation meet. In float32 the two servers round differently, so the
answers of the model alone must nowhere rest on a near tie.
"""

import json
import math
import re
from collections.abc import Iterator

import pytest
from support.parity import near_tie
from support.real_model import (
    CONTEXT_LENGTH,
    TARGET,
    TIE,
    Answers,
    chat,
    converse,
    post,
    post_with_margins,
    served_alone,
    served_with_draft,
    stream_chat,
)
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

PANGRAMS = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "
    "How vexingly quick daft zebras jump."
)
ECHO = f"Repeat this text exactly, word for word:\n\n{PANGRAMS}"
ECHOED = PANGRAMS.replace("the lazy", "lazy")  # by this model
EMOJIS = "Write a short greeting that uses many emojis: 🎉🚀😀"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
DATE, SYMBOLS = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]", r"(🎉|🚀|é|日本|👩‍🚀|Ω){12}"

CHATS = {
    "an end": chat("What is the capital of France?"),
    "a limit": chat("Write a very long story about a ship.", 48),
    "emojis, cut in the middle of one": chat(EMOJIS),
    "emojis and accents": chat("Repeat exactly: 🎉🚀 naïve café 日本語 👩‍🚀🇫🇷 Ωμέγα"),
    "Japanese": chat("Translate to Japanese: good morning, how are you?", 24),
}
GRAMMARS = {
    "a JSON schema": chat("Give me a person as JSON with name, age and city.", 60, response_format=PERSON),
    "a pattern": chat("Answer with a date.", 30, regex=DATE),
    "a pattern of emojis": chat("Celebrate!", 60, regex=SYMBOLS),
}

CITY = {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}


def tool(name: str, properties: dict, **fields) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def ask_for_a_call(question: str) -> list[dict]:
    """Show the model two calls of tools, as its template describes none."""
    return [
        {"role": "system", "content": "You answer by calling tools."},
        {"role": "user", "content": "What is 3 plus 4?"},
        {
            "role": "assistant",
            "content": '<tool_call>{"name":"add", "arguments":{"a": 3, "b": 4}}</tool_call>',
        },
        {"role": "user", "content": "What is the weather in Rome?"},
        {
            "role": "assistant",
            "content": '<tool_call>{"name":"get_weather", "arguments":{"city": "Rome", "unit": "celsius"}}'
            "</tool_call>",
        },
        {"role": "user", "content": question},
    ]


TOOLS = [tool("get_weather", CITY), tool("add", NUMBERS)]
STRICT = [tool("get_weather", CITY, strict=True), tool("add", NUMBERS, strict=True)]
PARIS, SUM = (
    ask_for_a_call(question) for question in ("What is the weather in Paris?", "What is 21 plus 17?")
)
TOOL_CALLS = {
    "of the model's own accord": chat(PARIS, 60, tools=TOOLS),
    "required": chat(SUM, 60, tools=STRICT, tool_choice="required"),
    "named": chat(SUM, 60, tools=STRICT[1:], tool_choice={"type": "function", "function": {"name": "add"}}),
}

# Of the echoed text: inside and across tokens and blocks, at the start and at the end.
STOPS = {
    "T": [False],
    "umps o": [False, True],
    "dog. Pack my": [False],
    " box with five dozen liquor": [False, True],
    "daft zebras jump.": [True],
}
ENDS = {
    f"stop string {stop!r}, {'kept' if is_kept else 'cut'}": chat(
        ECHO, 50, stop=["never written", stop], no_stop_trim=is_kept
    )
    for stop, ways in STOPS.items()
    for is_kept in ways
} | {
    "a stop string of half emojis": chat(EMOJIS, stop=["😀🎉"]),
    "a stop pattern": chat(ECHO, 50, stop_regex="d[a-z]+n"),
    "end of turn": chat(ECHO, 50),
    "past the end of turn": chat(ECHO, 40, ignore_eos=True, skip_special_tokens=False),
    "one token": chat(ECHO, 1),
    "in mid-block": chat(ECHO, 13),
}
STOP_TOKENS = (" fox", "ugs", " ze")

BASKET = """class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
"""
CURIE = (
    "Marie Curie was born in Warsaw in 1867. She studyed physics in Paris and won two Nobel Prizes, one in "
    "physics and one in chemistry. She died in France in 1934."
)
RENAME = f"Rename the class Basket to Cart. Print the whole code again.\n\n```python\n{BASKET}```"
EDITS = {
    "a class is renamed": chat(RENAME, 110),
    "spelling": chat(f"Fix the spelling and print the text again:\n\n{CURIE}", 60),
}

COLOURS, THINGS = "red blue green white black".split(), "box lamp chair table clock spoon plate".split()
STOCK = "\n".join(f"{i}. {COLOURS[i % 5]} {THINGS[i % 7]}, {37 * i % 91 + 5} dollars" for i in range(1, 41))
TO_THE_LIMIT = chat(f"Print this list again:\n\n{STOCK}", None, ignore_eos=True)

WITH_LOGPROBS = {**chat(RENAME, 24), "logprobs": True, "top_logprobs": 3}
GREEDY_CHOICES = chat("List three colors.", 16, n=3)
DRAWN_CHOICES = {**chat("List three colors.", 24, n=4), "temperature": 1.0, "top_k": 5, "logprobs": True}

COUNTRIES = (
    "France Germany Italy Spain Japan China Egypt Canada Brazil India Greece Norway Sweden Poland Peru Kenya "
    "Chile Cuba Iran Iraq Ireland Austria Hungary Portugal Turkey Finland Denmark Mexico Russia Australia"
).split()
TURNS = [f"What is the capital of {country}?" for country in COUNTRIES]

POSTED = {
    "to the limit": TO_THE_LIMIT,  # the longest first
    **CHATS,
    **GRAMMARS,
    **TOOL_CALLS,
    **ENDS,
    **EDITS,
    "log probabilities": WITH_LOGPROBS,
    "choices": GREEDY_CHOICES,
}
STREAMED = {**CHATS, **GRAMMARS, **TOOL_CALLS, "log probabilities": WITH_LOGPROBS}
STREAMED |= {name: request for name, request in ENDS.items() if "emojis" in name or "dozen" in name}


def requests_for_stop_tokens() -> dict[str, dict]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = {text: tokenizer.encode(text).ids for text in STOP_TOKENS}
    assert all(len(tokens) == 1 for tokens in ids.values()), ids
    return {f"stop token {text!r}": chat(ECHO, 50, stop_token_ids=ids[text]) for text in STOP_TOKENS}


@pytest.fixture(scope="module")
def plain() -> Iterator[Answers]:
    with served_alone() as server:
        jobs = {name: post_with_margins(r) for name, r in (POSTED | requests_for_stop_tokens()).items()}
        jobs = {"conversation": converse("You answer in a few words.", TURNS, post_with_margins), **jobs}
        yield Answers(server, jobs)


@pytest.fixture(scope="module")
def ours(plain) -> Iterator[Answers]:
    with served_with_draft() as server:
        jobs = {name: post(r) for name, r in (POSTED | requests_for_stop_tokens()).items()}
        jobs |= {f"streamed: {name}": stream_chat(request) for name, request in STREAMED.items()}
        jobs = {"conversation": converse("You answer in a few words.", TURNS, post), **jobs}
        yield Answers(server, jobs | {"drawn": post(DRAWN_CHOICES)})


def calls(message: dict) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]


def facts(answer: dict) -> list[tuple]:
    """Return what two answers must agree in, without token ids."""
    return [
        (c["message"]["content"], calls(c["message"]), c["finish_reason"], c["matched_stop"])
        for c in answer["choices"]
    ]


def assert_same(got: dict, want: dict) -> None:
    assert facts(got) == facts(want)
    tokens = [[choice["response_token_ids"] for choice in answer["choices"]] for answer in (got, want)]
    assert tokens[0] == tokens[1]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got["usage"][count] == want["usage"][count]


def histogram(choice: dict) -> list[int]:
    """Return the number of cycles by drafted or copied tokens kept; empty for an answer of one token."""
    return choice["meta_info"].get("spec_correct_drafts_histogram", [])


def num_kept(answer: dict) -> int:
    """Return how many tokens cycles committed beyond one each."""
    histograms = [histogram(choice) for choice in answer["choices"]]
    return sum(kept * cycles for counts in histograms for kept, cycles in enumerate(counts))


def ends_inside_a_block(choice: dict) -> bool:
    """Tell whether the last cycle kept tokens behind the answer's end. The prefill emits the first token."""
    committed = 1 + sum((kept + 1) * cycles for kept, cycles in enumerate(histogram(choice)))
    return committed > len(choice["response_token_ids"])


def test_no_answer_rests_on_a_near_tie(plain):
    """The requests were chosen so; otherwise no test of this file means anything."""
    gaps = {
        f"{name} {number}": min(near_tie(choice, i) for i in range(len(choice["response_token_ids"])))
        for name, answers in plain.items()
        for number, answer in enumerate(answers if isinstance(answers, list) else [answers])
        for choice in answer["choices"]
    }
    assert len(gaps) > 60
    assert not {name: gap for name, gap in gaps.items() if gap < TIE}


@pytest.mark.parametrize("name", POSTED)
def test_an_answer_is_the_targets(name, plain, ours):
    assert_same(ours[name], plain[name])


@pytest.mark.parametrize("name", STREAMED)
def test_chunks_join_to_the_answer(name, plain, ours):
    want, [[content, tool_calls, finish_reason, matched_stop]] = plain[name], facts(plain[name])
    *chunks, last = ours[f"streamed: {name}"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(texts) == content
    # Half a character is shown only if the answer ends in it.
    assert not any("\ufffd" in text for text in list(filter(None, texts))[:-1]), texts
    joined: dict[int, list[str]] = {}
    for call in (call for choice in choices for call in choice["delta"].get("tool_calls") or []):
        name_and_arguments = joined.setdefault(call["index"], ["", ""])
        for place, key in enumerate(("name", "arguments")):
            name_and_arguments[place] += call["function"].get(key) or ""
    assert [tuple(joined[index]) for index in sorted(joined)] == tool_calls
    ends = [(c["finish_reason"], c["matched_stop"]) for c in choices if c["finish_reason"]]
    if tool_calls:  # SGLang names the token that ended a tool call in streams only
        ends = [(reason, None) for reason, _ in ends]
    assert ends == [(finish_reason, matched_stop)]


def test_grammars_are_kept(ours):
    person = json.loads(ours["a JSON schema"]["choices"][0]["message"]["content"])
    assert person.keys() == SCHEMA["properties"].keys() and 0 <= person["age"] <= 120
    for name, pattern in (("a pattern", DATE), ("a pattern of emojis", SYMBOLS)):
        text = ours[name]["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern!r}"


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_tool_calls_are_valid(name, ours):
    [choice] = ours[name]["choices"]
    [(called, arguments)] = calls(choice["message"])
    [properties] = [
        t["function"]["parameters"]["properties"] for t in TOOLS if t["function"]["name"] == called
    ]
    assert json.loads(arguments).keys() == properties.keys()
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]


def test_answers_end_where_they_must(plain, ours):
    for name, request in ENDS.items():
        [choice] = ours[name]["choices"]
        text, stop = choice["message"]["content"], choice["matched_stop"]
        if "stop" in request:
            assert stop == request["stop"][-1] and choice["finish_reason"] == "stop", name
            before, _, _ = (ECHOED if "😀" not in stop else "🎉🚀😀🎉🚀").partition(stop)
            assert text == before + stop * request.get("no_stop_trim", False), name
    for text in STOP_TOKENS:
        name = f"stop token {text!r}"
        assert_same(ours[name], plain[name])
        [choice] = ours[name]["choices"]
        assert choice["finish_reason"] == "stop", text
        assert choice["message"]["content"] == ECHOED[: ECHOED.index(text)], text
    [past] = ours["past the end of turn"]["choices"]
    assert past["message"]["content"].startswith(ECHOED + "<|im_end|>") and past["finish_reason"] == "length"
    ended = [*ENDS, *(f"stop token {text!r}" for text in STOP_TOKENS)]
    inside = [name for name in ended if ends_inside_a_block(ours[name]["choices"][0])]
    assert len(inside) > 1, f"hardly an answer ended in the middle of a block: {inside}"


def test_thirty_turns_of_a_conversation(plain, ours):
    answers = list(zip(ours["conversation"], plain["conversation"], strict=True))
    assert len(answers) == 30
    known = 0
    for turn, (got, want) in enumerate(answers):
        assert_same(got, want)
        usage = got["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"] if usage["prompt_tokens_details"] else 0
        assert cached >= known, f"turn {turn}: {cached} cached, but {known} tokens have been computed"
        # The last token was never an input.
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert known > 700
    # Each answer begins like the last, whose text came from the cache.
    later = [answer for answer, _ in answers[10:]]
    kept, written = sum(map(num_kept, later)), sum(answer["usage"]["completion_tokens"] for answer in later)
    assert kept > written / 8, f"{kept} of {written} tokens came from blocks"


def test_edits_are_copied(ours):
    [state] = ours.server.get("/server_info")["internal_states"]
    copied = state["speculative_copy_ahead"]["accepted_tokens"]["copy"]
    assert copied > 50, f"only {copied} copied tokens were accepted"
    kept = sum(num_kept(ours[name]) for name in EDITS)
    written = sum(ours[name]["usage"]["completion_tokens"] for name in EDITS)
    assert kept > written / 4, f"{kept} of {written} tokens came from blocks"


def test_the_longest_answer_ends_at_the_context_limit(ours):
    usage = ours["to the limit"]["usage"]
    assert usage["completion_tokens"] > 200
    assert usage["total_tokens"] == CONTEXT_LENGTH - 2  # SGLang reserves two positions


def rows(logprobs: dict) -> list[tuple[str, float, dict[str, float]]]:
    return [
        (entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
        for entry in logprobs["content"]
    ]


def test_log_probabilities(plain, ours):
    chunks = ours["streamed: log probabilities"]
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
    want = rows(plain["log probabilities"]["choices"][0]["logprobs"])
    assert len(want) == 24
    for got in (
        rows(ours["log probabilities"]["choices"][0]["logprobs"]),
        [row for logprobs in streamed for row in rows(logprobs)],
    ):
        assert [token for token, *_ in got] == [token for token, *_ in want]
        for (_, value, tops), (_, expected, expected_tops) in zip(got, want):
            # Relative as well: of -2.03 once 1.01e-4 was seen.
            assert math.isclose(value, expected, rel_tol=TIE, abs_tol=TIE)
            assert tops == pytest.approx(expected_tops, rel=TIE, abs=TIE)


def test_several_choices(ours):
    choices = facts(ours["choices"])
    assert len(choices) == 3 and len(set(map(str, choices))) == 1


def test_drawn_choices_are_among_the_likeliest_tokens(plain, ours):
    """The target alone scores four samples with a top-k of five."""
    choices = ours["drawn"]["choices"]
    assert len(choices) == 4 and len({choice["message"]["content"] for choice in choices}) > 1
    for choice in choices:
        prompt, output = choice["prompt_token_ids"], choice["response_token_ids"]
        scored = plain.server.generate(
            input_ids=prompt + output,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            top_logprobs_num=5,
            logprob_start_len=len(prompt) - 1,
        )["meta_info"]
        values = [value for value, *_ in scored["input_token_logprobs"][-len(output) :]]
        for place, (value, tops, reported) in enumerate(
            zip(
                values,
                scored["input_top_logprobs"][-len(output) :],
                choice["logprobs"]["content"],
                strict=True,
            )
        ):
            assert value > tops[-1][0] - TIE, f"{reported} at {place} is none of the target's {tops}"
            assert math.isclose(reported["logprob"], value, rel_tol=0, abs_tol=TIE), place
