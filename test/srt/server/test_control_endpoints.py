"""Every endpoint of SGLang's router, called on a CPU server: it answers, and the server goes on.

Most calls are made while other requests run, whose answers must stay the same. The router names the
endpoints, so a release of SGLang with another one fails here until it has a row. The server has every flag
of our pages that a CPU serves and that goes with the others.
"""

import itertools
import json
import os
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from serving import TARGET, Server, dflash_arguments
from support.releases import IS_0_5_22
from support.servers import FLOAT32
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="what a CPU refuses"),
]

KEY = "key-of-this-test"
MAX_THINK_TOKENS = 12
FLAGS = (
    *("--reasoning-parser", "qwen3", "--enable-strict-thinking", "--enable-metrics"),
    *("--api-key", KEY, "--admin-api-key", KEY, "--trust-remote-code"),
    "--enable-custom-logit-processor",
    *("--revision", "main", "--speculative-draft-model-revision", "main"),
    *("--disable-cuda-graph", "--cuda-graph-max-bs-decode", "8", "--speculative-dflash-strict"),
)
GENERATE = {"text": "def parse(", "sampling_params": {"temperature": 0, "max_new_tokens": 48}}
MESSAGES = [{"role": "user", "content": "Why?"}]
CHAT = {"model": str(TARGET), "messages": MESSAGES, "max_tokens": 4}
GROUP = {"master_address": "127.0.0.1", "master_port": 0, "world_size": 1, "group_name": "g"}
GPU = "needs a GPU"


@dataclass(frozen=True)
class Call:
    """One call and its answer.

    says: part of the answer. alone: no other request runs, as the call waits for that or ends them.
    """

    operation: str
    body: Any = None
    status: int = 200
    says: str = ""
    alone: bool = False


CALLS = (
    # what a CPU cannot do
    Call("POST /release_memory_occupation", {}, 400, GPU),
    Call("POST /release_memory_occupation", {"tags": ["kv_cache"]}, 400, GPU),
    Call("POST /resume_memory_occupation", {}, 400, GPU),
    Call("POST /resume_memory_occupation", {"tags": ["weights"]}, 400, GPU),
    Call("POST /weights_checker", {"action": "checksum"}),
    Call("GET /get_remote_instance_transfer_engine_info?rank=0", status=400),
    Call("GET /remote_instance_transfer_engine_info?rank=0", status=400),
    Call("POST /init_weights_update_group", {**GROUP, "rank_offset": 0, "backend": "gloo"}),
    Call("POST /destroy_weights_update_group", {"group_name": "g"}),
    # SGLang's answers: HTTP 500, and the server goes on
    Call("POST /stop_profile", status=500),
    Call("POST /start_profile", {"activities": ["CPU"], "with_stack": False, "record_shapes": False}),
    Call("POST /start_profile", {"activities": ["CPU"]}, says="Start profiling"),
    Call("POST /stop_profile"),
    Call("POST /configure_logging", {"log_requests": False}),
    Call("POST /configure_logging", {"log_requests": True, "log_requests_level": 99}, 500, alone=True),
    Call("POST /generate", GENERATE, 500, alone=True),
    Call("POST /configure_logging", {"log_requests": False, "log_requests_level": 0}, alone=True),
    # what needs another server
    Call("POST /pd_role_switch", {"new_role": "prefill"}, 400, "--enable-pd-role-switch"),
    Call("POST /scale_elastic_ep", {"new_ep_size": 2}, 404, "--elastic-ep-backend"),
    Call("GET /is_scaling_elastic_ep", status=404, says="--elastic-ep-backend"),
    Call("POST /load_lora_adapter", {"lora_name": "a", "lora_path": "a"}, 400, "--enable-lora"),
    Call(
        "POST /load_lora_adapter_from_tensors",
        {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": []},
        *(400, "--enable-lora"),
    ),
    Call("POST /unload_lora_adapter", {"lora_name": "a"}, 400, "--enable-lora"),
    Call("POST /add_external_corpus", {"documents": ["a"]}, 400, "Ngram"),
    Call("POST /remove_external_corpus", {"corpus_id": "a"}, 400, "Ngram"),
    Call("GET /list_external_corpora", status=400, says="Ngram"),
    Call("POST /hicache/storage-backend/clear", status=400),
    Call("GET /hicache/storage-backend"),
    Call("PUT /hicache/storage-backend", {"hicache_storage_backend": "file"}, 400, alone=True),
    Call("DELETE /hicache/storage-backend", status=400, alone=True),
    Call("GET /get_hicache_l3_cache_layout"),
    Call("POST /encode", {"text": "a"}, 400, "embedding"),
    Call("POST /classify", {"text": "a"}, 400, "embedding"),
    Call("POST /v1/embeddings", {"model": "m", "input": "a"}, 400, "embedding"),
    Call("POST /v1/classify", {"model": "m", "input": "a"}, 400, "embedding"),
    Call("POST /v1/rerank", {"query": "a", "documents": ["b"]}, 400, "embedding"),
    Call("POST /v1/audio/transcriptions", status=400, says="file"),
    Call("POST /v1/decisions", {"model": "m"}, 400, "Field required"),
    Call("POST /v1/systemone", {}, 422, "Field required"),
    # states of a server
    *(
        Call(f"GET {path}")
        for path in (
            *("/ready", "/health", "/health_generate", "/ping", "/", "/model_info", "/get_model_info"),
            *("/server_info", "/get_server_info", "/v1/loads?include=all", "/v1/models", "/api/tags"),
        )
    ),
    Call("GET /v1/models/none", status=404),
    Call("POST /api/show", {"model": "m"}),
    Call("POST /set_trace_level?level=1"),
    Call("POST /freeze_gc"),
    Call("POST /slow_down", {"forward_sleep_time": 0.001}),
    Call("POST /slow_down", {"forward_sleep_time": None}),
    Call("POST /set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}}, alone=True),
    Call("POST /flush_cache", alone=True),
    Call("POST /open_session", {"capacity_of_str_len": 100, "session_id": "s"}, says="s"),
    Call("POST /close_session", {"session_id": "s"}),
    Call("POST /abort_request", {"rid": "none"}),
    Call("POST /abort_request", {"abort_all": True}, alone=True),
    Call("POST /pause_generation", {"mode": "retract"}, alone=True),
    Call("POST /release_memory_occupation", {}, 400, GPU, alone=True),
    Call("POST /continue_generation", {}, alone=True),
    # weights
    Call("POST /end_weight_update", {}, 400, "begin_weight_update"),
    Call("POST /update_weights_from_tensor", {"serialized_named_tensors": []}, 400, "begin_weight_update"),
    Call(
        "POST /update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        *(400, "begin_weight_update"),
    ),
    Call("POST /begin_weight_update", {}),
    Call("POST /update_weights_from_tensor", {"serialized_named_tensors": []}, 400, "old weights stay"),
    Call("POST /end_weight_update", {}),
    Call("POST /update_weights_from_ipc", {"zmq_handles": {}}, 400, "old weights stay"),
    Call("POST /update_weights_from_disk", {"model_path": "/none"}, 400, "old weights stay"),
    Call("POST /update_weights_from_disk", {"model_path": str(TARGET)}, alone=True),
    Call("POST /update_weight_version", {"new_version": "v2", "abort_all_requests": False}),
    Call("POST /update_weight_version", {"new_version": "v3"}, alone=True),  # aborts all requests
    Call("POST /get_weights_by_name", {"name": "none"}, 400),
    # texts
    Call("POST /generate", GENERATE),
    Call("POST /v1/completions", {"model": "m", "prompt": "a", "max_tokens": 4}),
    Call("POST /v1/chat/completions", CHAT),
    Call("POST /invocations", CHAT),
    Call("POST /v1/messages", CHAT),
    Call("POST /v1/messages/count_tokens", CHAT),
    Call("POST /v1/responses", {"model": str(TARGET), "input": "a", "max_output_tokens": 4}),
    Call("GET /v1/responses/none", status=400, says="--enable-response-store"),
    Call("POST /v1/responses/none/cancel", status=400, says="--enable-response-store"),
    Call("POST /api/chat", {**CHAT, "stream": False, "options": {"num_predict": 4}}),
    Call("POST /api/generate", {"model": "m", "prompt": "a", "stream": False, "options": {"num_predict": 4}}),
    Call("POST /vertex_generate", {"instances": [{"text": "a"}]}),
    Call("POST /v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [1, 2]}),
    Call("POST /v1/tokenize", {"model": "m", "prompt": "a"}),
    Call("POST /v1/detokenize", {"model": "m", "tokens": [1, 2]}),
    Call("POST /parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "hermes"}),
    Call("POST /separate_reasoning", {"text": "a</think>b", "reasoning_parser": "qwen3"}),
)


# Here these end SGLang's scheduler, with a draft or without (docs/dev/upstream/control-requests.md).
END_SGLANG = {
    "POST /start_expert_distribution_record",
    "POST /stop_expert_distribution_record",
    "POST /dump_expert_distribution_record",
    "POST /init_weights_send_group_for_remote_instance",
    "POST /send_weights_to_remote_instance",
}


@pytest.fixture(scope="module")
def server(servers) -> Server:
    environment = {"SGLANG_MAX_THINK_TOKENS": str(MAX_THINK_TOKENS)}
    return servers.get(*FLOAT32, *dflash_arguments(), *FLAGS, environment=environment)


def answer(server: Server, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """Return the status and the text of an answer, or 0 and the error if there is none."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, repr(error)


def text_of(server: Server) -> str:
    """Return the answer to a greedy request."""
    status, answered = answer(server, "POST", "/generate", GENERATE)
    return json.loads(answered)["text"] if status == 200 else f"{status} {answered}"


class Traffic:
    """Requests that follow each other in two threads, and the answers that differ from the first."""

    def __init__(self, server: Server):
        self._server, self._is_over = server, threading.Event()
        self.wanted, self.count, self.others = text_of(server), itertools.count(), []
        self._threads = [threading.Thread(target=self._send) for _ in range(2)]

    def _send(self):
        while not self._is_over.is_set():
            text = text_of(self._server)
            next(self.count)
            if text != self.wanted:
                self.others.append(text)

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def problems(server: Server, calls: list[Call], folder: Any) -> list[str]:
    """Make calls, and return what is another answer than listed."""
    found = []
    for call in calls:
        method, path = call.operation.split(" ")
        body = call.body
        if path == "/start_profile":
            body = {"output_dir": str(folder), **(body or {})}
        status, text = answer(server, method, path, body)
        if status != call.status or call.says not in text:
            found.append(f"{call.operation} {call.body}: {status} {text[:200]}")
        if server.process.poll() is not None:
            return [*found, f"{call.operation} {call.body}: the server ended"]
    return found


def operations_of(paths: dict[str, dict]) -> set[str]:
    """Return the operations of an OpenAPI description.

    GET and PUT of a path with POST are other names for it, except for resources with DELETE.
    """
    found = set()
    for path, methods in paths.items():
        names = {name.upper() for name in methods} - {"HEAD"}
        if "POST" in names and "DELETE" not in names:
            names = {"POST"}
        found |= {f"{name} {path}" for name in names}
    return found


def covers(operation: str) -> str:
    """Return a call's operation with parameters in place of values, without the query."""
    path = operation.partition("?")[0]
    for named, given in (("/v1/models/{model}", "/v1/models/none"), ("/{response_id}", "/none")):
        path = path.replace(given, named) if given in path else path
    return path


def test_every_endpoint_has_a_row(server):
    status, described = answer(server, "GET", "/openapi.json")
    assert status == 200
    operations = operations_of(json.loads(described)["paths"])
    assert len(operations) > 80, "the router names fewer: is it still read?"
    without = operations - {covers(call.operation) for call in CALLS} - END_SGLANG
    assert not without, f"no row for {sorted(without)}"


# SGLang 0.5.22 lacks the first, its checksums need a GPU, and its Ollama chat gives 500 with transformers 5.
NEWER = ("GET /get_hicache_l3_cache_layout", "POST /weights_checker", "POST /api/chat")


def test_calls_during_requests(server, tmp_path):
    calls = [call for call in CALLS if not call.alone]
    if IS_0_5_22:
        calls = [call for call in calls if call.operation not in NEWER or call.status != 200]
    with Traffic(server) as traffic:
        found = problems(server, calls, tmp_path)
    assert not found, "\n".join(found)
    assert not traffic.others, traffic.others[:3]
    assert next(traffic.count) > 20 and text_of(server) == traffic.wanted
    assert any(name.endswith(".trace.json.gz") for name in os.listdir(tmp_path)), "nothing was profiled"


def test_calls_that_wait_for_requests_or_end_them(server, tmp_path):
    wanted = text_of(server)
    found = problems(server, [call for call in CALLS if call.alone], tmp_path)
    assert not found, "\n".join(found)
    assert text_of(server) == wanted


@pytest.mark.parametrize("budget", [None, 3, 7])
def test_strict_thinking_ends_thoughts_at_their_budget(server, budget):
    """The tiny target ends no thoughts itself: without a budget of its own it thinks to the server's."""
    limit = MAX_THINK_TOKENS if budget is None else budget
    custom = {} if budget is None else {"custom_params": {"thinking_budget": budget}}
    body = {
        **CHAT,
        **custom,
        "max_tokens": 40,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    status, text = answer(server, "POST", "/v1/chat/completions", body)
    assert status == 200, text
    end = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("</think>").ids
    answered = json.loads(text)
    assert answered["choices"][0]["message"]["content"], "the answer never began"
    assert answered["usage"]["reasoning_tokens"] == limit + len(end)
    own = {} if budget is None else {"max_thinking_tokens": budget}
    status, text = answer(server, "POST", "/generate", {**GENERATE, **own, "require_reasoning": True})
    assert status == 200, text
    assert json.loads(text)["output_ids"][limit : limit + len(end)] == end
