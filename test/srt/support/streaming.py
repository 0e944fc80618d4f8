"""Server-sent events, one decoded chunk at a time."""

import json
import urllib.request
from collections.abc import Iterator

from serving import Server


def stream(server: Server, request: dict, path: str = "/generate") -> Iterator[dict]:
    """POST with streaming on; closing the iterator closes the connection."""
    body = json.dumps({**request, "stream": True}).encode()
    call = urllib.request.Request(server.url + path, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=300) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
