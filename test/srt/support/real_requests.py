"""Chat requests of test_real_model.py: grammars, tool calls, ends, edits, choices, a conversation."""

from support.real_model import TARGET, chat
from tokenizers import Tokenizer

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
# Of a kind that has another one in every run.
LONG = {
    *("Japanese", "named", "a limit", "in mid-block"),
    *(f"stop string {stop!r}, cut" for stop in ("T", "umps o", "dog. Pack my")),
    f"stop string {' box with five dozen liquor'!r}, kept",
}
# One of each kind; characters and stops that lie across tokens are where chunks may go wrong.
STREAMED = {name: CHATS[name] for name in ("emojis, cut in the middle of one", "emojis and accents")}
STREAMED |= {"a JSON schema": GRAMMARS["a JSON schema"], "required": TOOL_CALLS["required"]}
STREAMED |= {"log probabilities": WITH_LOGPROBS}
STREAMED |= {name: request for name, request in ENDS.items() if "emojis" in name or "dozen" in name}


def requests_for_stop_tokens() -> dict[str, dict]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = {text: tokenizer.encode(text).ids for text in STOP_TOKENS}
    assert all(len(tokens) == 1 for tokens in ids.values()), ids
    return {f"stop token {text!r}": chat(ECHO, 50, stop_token_ids=ids[text]) for text in STOP_TOKENS}
