"""Every field whose form we check, sent once with a good value: alone, and all of them beside plain requests.

In each dtype that a CPU serves. A field is answered or refused by name, its neighbours are answered, and the
server lives.
"""

import concurrent.futures
import json
import re
import urllib.error

import pytest
from serving import TARGET, Server, dflash_arguments
from sglang.srt.sampling.sampling_params import SamplingParams
from support.servers import FLOAT32

from sglang_dflash.srt.speculative.request_checks import _INTERNAL

pytestmark = pytest.mark.server

HIDDEN = json.loads((TARGET / "config.json").read_text())["hidden_size"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
PROMPT = "def read(path):\n    "

# A good value of each sampling parameter.
SAMPLING = {
    "max_new_tokens": 5,
    "stop": ["\n\n", "return"],
    "stop_token_ids": [5, 7],
    "stop_regex": "[xyz]+",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.2,
    "min_new_tokens": 3,
    "n": 2,
    "json_schema": json.dumps(SCHEMA),
    "regex": "[a-z ]{3,9}",
    "ebnf": 'root ::= "yes" | "no"',
    "structural_tag": json.dumps({"type": "structural_tag", "structures": [TAG], "triggers": ["<a>"]}),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "custom_params": {"speculative_max_tokens": 2, "mine": [1, None]},
    "stream_interval": 2,
    "logit_bias": {"5": 1.5, "99": -100.0},
    "sampling_seed": 7,
}
# Other fields of a request. False: refused by name.
OTHERS = {
    "rid": ({"rid": "mine"}, True),
    "text": ({"text": [PROMPT, "class A"]}, True),
    "input_ids": ({"text": None, "input_ids": [5, 99, 7]}, True),
    "input_embeds": ({"text": None, "input_embeds": [[0.5] * HIDDEN] * 20}, False),
    "sampling_params": (
        {"text": [PROMPT] * 2, "sampling_params": [{"max_new_tokens": n} for n in (2, 9)]},
        True,
    ),
    "logprob_start_len": ({"return_logprob": True, "logprob_start_len": 0}, True),
    "top_logprobs_num": ({"return_logprob": True, "top_logprobs_num": 3}, True),
    "token_ids_logprob": ({"return_logprob": True, "token_ids_logprob": [5, 99]}, True),
    "return_sampling_mask": ({"return_sampling_mask": True}, True),
    "sampling_logprobs_mode": ({"return_sampling_mask": True, "sampling_logprobs_mode": "support"}, True),
    "return_text_in_logprobs": ({"return_logprob": True, "return_text_in_logprobs": True}, True),
    "return_flat_raw_output_top_logprobs": (
        {"return_logprob": True, "top_logprobs_num": 3, "return_flat_raw_output_top_logprobs": True},
        True,
    ),
    "watermark": ({"sampling_params": {"watermark": {"enabled": True}}}, False),
    "custom_logit_processor": ({"custom_logit_processor": "{}"}, False),
    "return_hidden_states": ({"return_hidden_states": True}, False),
    "positional_embed_overrides": (
        {"positional_embed_overrides": {"positions": [1], "embeds": [[0.5]]}},
        False,
    ),
}


def bodies() -> dict[str, tuple[dict, bool]]:
    """Return a request for each field, and whether it is answered."""
    plain = {"temperature": 0, "max_new_tokens": 12}
    found = {
        name: ({"text": PROMPT, "sampling_params": plain | {name: value}}, True)
        for name, value in SAMPLING.items()
    }
    found |= {
        name: ({"text": PROMPT, "sampling_params": plain} | fields, is_served)
        for name, (fields, is_served) in OTHERS.items()
    }
    return found


def test_every_sampling_parameter_has_a_value_here():
    """SGLang's own check refuses `beam_width` above 1 (docs/limits.md)."""
    assert {*SAMPLING, *OTHERS, *_INTERNAL, "beam_width"} >= set(SamplingParams.__struct_fields__)


def send(server: Server, body: dict) -> tuple[int, str]:
    """Return status and answer."""
    try:
        return 200, json.dumps(server.post("/generate", body, timeout=120))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    "flags",
    [
        FLOAT32,
        *(
            pytest.param((*FLOAT32, "--dtype", dtype, "--disable-radix-cache"), marks=pytest.mark.long)
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
    ids=["float32", "float32 without prefix cache", "bfloat16", "float16"],
)
def test_a_good_value_leaves_the_server_alive(flags, servers):
    server = servers.get(*flags, *dflash_arguments())
    neighbour = {"text": "import os\n", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    good, wrong = bodies(), []
    alone = {}
    for name, (body, _) in good.items():
        print(name, end=" ", flush=True)  # the last one before a server's end
        alone[name] = send(server, body)
    with concurrent.futures.ThreadPoolExecutor(2 * len(good)) as pool:
        pairs = [pool.submit(send, server, body) for own, _ in good.values() for body in (own, neighbour)]
        crowd = [answer.result() for answer in pairs]
    for (name, (_, is_served)), beside, other in zip(good.items(), crowd[::2], crowd[1::2], strict=True):
        print(f"{name:32} alone {alone[name][0]}, in a crowd {beside[0]}, its neighbour {other[0]}")
        for status, said in (alone[name], beside):
            named = name in re.sub("[- ]", "_", said)  # SGLang's own words name a flag
            if status != (200 if is_served else 400) or (not is_served and not named):
                wrong.append(f"{name}: {status} {said[:300]}")
        if other[0] != 200:
            wrong.append(f"beside {name}: {other}")
    assert server.process.poll() is None
    assert not wrong, "\n".join(wrong)
