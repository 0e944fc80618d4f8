"""Faults around a running server: the target's own answers, or a named error."""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
import urllib.error
from pathlib import Path

import pytest
import torch
from serving import DRAFT, WHOLE_BLOCKS, Server, dflash_arguments, heldout_prompts
from support.drafts import make_draft
from support.parity import assert_same
from support.servers import FLOAT32, wait_for_end

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    """A copy of the bundled draft, which tests change."""
    return Path(shutil.copytree(DRAFT, tmp_path_factory.mktemp("faults") / "draft"))


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    texts = [prompt["text"] for prompt in heldout_prompts() if 10 <= prompt["num_tokens"] <= 300][::16][:10]
    return [
        {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
        for text in texts
    ]


@pytest.fixture
def server(servers, draft) -> Server:
    return servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(draft))


def assert_answers(server: Server, requests: list[dict], reference) -> None:
    assert_same(requests, server.generate_many(requests, 4), reference.answers(requests))


def test_a_flush_during_decode_is_refused_or_harmless(server, requests, reference):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.generate_many, requests, 4)
        refused = 0
        while not answers.done():
            try:
                server.post("/flush_cache", {})
            except urllib.error.HTTPError as error:
                refused += error.code == 400
    assert_same(requests, answers.result(), reference.answers(requests))
    assert refused, "no flush met a running request"


def test_a_stalled_client_holds_up_nobody(server, requests, reference):
    """It requests a long stream, reads none of it, and disconnects."""
    host, port = server.url.removeprefix("http://").split(":")
    body = {**requests[0], "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    payload = json.dumps(body).encode()
    headers = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    head = f"POST /generate HTTP/1.1\r\n{headers}"
    with socket.create_connection((host, int(port))) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(head.encode() + payload)
        assert_answers(server, requests, reference)
    assert_idle(server)


def assert_idle(server: Server) -> None:
    """Check that nothing runs and no KV slot is taken once all requests have ended."""
    deadline = time.monotonic() + 120
    while (load := server.get("/v1/loads")["loads"][0])["num_running_reqs"] and time.monotonic() < deadline:
        time.sleep(0.2)
    server.flush_cache()
    load = server.get("/v1/loads")["loads"][0]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0, load


def test_a_draft_deleted_after_the_start(server, draft, requests, reference):
    shutil.rmtree(draft)
    try:
        assert assert_answers(server, requests, reference) > 1.5
    finally:
        shutil.copytree(DRAFT, draft)


@pytest.mark.parametrize("who", ["scheduler", "detokenizer"])
def test_a_killed_process_ends_the_server(who, servers, draft, requests):
    """Waiting clients get an error, and the server ends, for its supervisor to restart."""
    # Cold: a fork keeps the process title of its fork server.
    server = servers.get(*FLOAT32, *dflash_arguments(draft), is_cold=True)
    long = {**requests[0], "sampling_params": {**requests[0]["sampling_params"], "max_new_tokens": 3000}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, **long)
        time.sleep(1)
        os.kill(process_named(server, who), signal.SIGKILL)
        with pytest.raises((urllib.error.URLError, OSError)):
            waiting.result(timeout=60)
    assert wait_for_end(server) not in (None, 0)


def process_named(server: Server, who: str) -> int:
    """Return the process with this title, which SGLang sets."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and os.getsid(int(entry.name)) == server.process.pid:
                if re.match(rf"sglang::{who}", (entry / "cmdline").read_text()):
                    return int(entry.name)
    raise LookupError(who)


def test_a_draft_that_says_nan(servers, requests, reference, tmp_path):
    """Only acceptance suffers."""

    def spoil(tensors):
        return tensors | {"norm.weight": torch.full_like(tensors["norm.weight"], torch.nan)}

    server = servers.get(*FLOAT32, *dflash_arguments(make_draft(tmp_path / "nan", spoil)))
    assert assert_answers(server, requests, reference) < 1.2
