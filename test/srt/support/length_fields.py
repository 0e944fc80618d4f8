"""SGLang's fields for lengths chosen per request, compared with an observer's count.

A server with OBSERVED prints for each cycle how many slots every request may keep, the anchor included.
"""

import concurrent.futures
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving import Server
from support.streaming import ENDPOINTS, Endpoint, stream

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

OBSERVED = {"SGLANG_DFLASH_OBSERVERS": "support.length_fields:SlotPrinter"}
_MARK = "slots of a cycle: "


class SlotPrinter(CycleObserver):
    def on_accepted(self, batch, cycle, accepted):
        """Print a line with the slots by request id."""
        slots = {}
        for req, drafted in zip(batch.reqs, cycle.layout.num_draft_tokens.tolist(), strict=True):
            cap = (req.sampling_params.custom_params or {}).get("speculative_max_tokens", drafted)
            slots[req.rid] = 1 + min(drafted, cap)
        print(f"{_MARK}{json.dumps(slots)}", flush=True)


def observed_cycles(log: str) -> list[dict[str, int]]:
    """Return the slots by request id of each cycle in a log."""
    return [json.loads(line.partition(_MARK)[2]) for line in log.splitlines() if _MARK in line]


@dataclass(frozen=True)
class Row:
    """An endpoint, and where an answer or event of it has an id and the fields."""

    endpoint: Endpoint
    is_stream: bool
    find: Callable[[dict], tuple[str, dict]]
    asked: dict

    def ask(self, server: Server, prompt: str, limit: int, sampling: dict) -> tuple[str, list[dict]]:
        """Return the request's id, and the fields of its answer or of each event that has them."""
        body = self.endpoint.body(prompt, limit, {**sampling, **self.asked}, is_stream=self.is_stream)
        path = self.endpoint.path
        answers = stream(server, body, path) if self.is_stream else [server.post(path, body)]
        found = [self.find(answer) for answer in answers]
        return found[-1][0], [fields for _, fields in found if fields]


def _of_meta_info(answer: dict) -> tuple[str, dict]:
    [one] = answer.get("predictions", [answer])
    meta = one["meta_info"]
    return meta["id"], meta if "spec_verify_ct" in meta else {}


def _of_sglext(answer: dict) -> tuple[str, dict]:
    return answer["id"], (answer.get("sglext") or {}).get("spec_tokens_details") or {}


_ASKED = {"return_spec_tokens_details": True}
FINDS = {
    "/generate": (_of_meta_info, {}),
    "/vertex_generate": (_of_meta_info, {}),
    "/v1/completions": (_of_sglext, _ASKED),
    "/v1/chat/completions": (_of_sglext, _ASKED),
    "/invocations": (_of_sglext, _ASKED),
}
ROWS = [
    Row(endpoint, is_stream, *FINDS[endpoint.path])
    for endpoint in ENDPOINTS
    if endpoint.path in FINDS
    for is_stream in (False, True)
]


def assert_fields_are_observed(
    server: Server, prompts: list[str], read_counts: Callable[[], Any]
) -> dict[str, list[int]]:
    """Ask every row with and without a cap, all beside each other, of an idle server.

    `read_counts` reads the counters of `/metrics` (`plot_acceptance.Counts`).

    Returns:
        Slots of each cycle of each request, also of one in flight when it ended.
    """
    caps = ({}, *({"custom_params": {"speculative_max_tokens": cap}} for cap in (2, 0)))
    asked = [(row, cap) for row in ROWS for cap in caps]
    server.flush_cache()
    before, counted_before = len(server.log()), read_counts()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [
            pool.submit(row.ask, server, prompts[i % len(prompts)], 30 + i % 7, {**cap, "ignore_eos": True})
            for i, (row, cap) in enumerate(asked)
        ]
        answers = [each.result() for each in found]
    server.flush_cache()  # waits until no cycle runs
    cycles = observed_cycles(server.log()[before:])
    slots: dict[str, list[int]] = {}
    for cycle in cycles:
        for rid, count in cycle.items():
            slots.setdefault(rid, []).append(count)
    for (row, cap), (rid, reports) in zip(asked, answers, strict=True):
        where = row.endpoint.path, row.is_stream, cap
        assert reports, f"no fields: {where}"
        assert len(slots[rid]) - reports[-1]["spec_verify_ct"] in (0, 1), where
        for fields in reports:
            counted = slots[rid][: fields["spec_verify_ct"]]
            histogram = fields["spec_cap_lens_histogram"]
            assert {n: blocks for n, blocks in enumerate(histogram) if blocks} == Counter(counted), where
            assert fields["spec_cap_length"] == sum(counted) / len(counted), where
            assert fields["spec_num_correct_drafts"] <= sum(counted) - len(counted), where
        if cap:
            assert max(slots[rid]) <= 1 + cap["custom_params"]["speculative_max_tokens"], where
    counted, total = read_counts(), sum(map(sum, slots.values()))
    blocks = counted.drafts - counted_before.drafts
    assert blocks == sum(map(len, slots.values()))
    assert blocks + counted.drafted - counted_before.drafted == total
    assert last_gauge(server) == sum(cycles[-1].values()) / len(cycles[-1])
    return slots


def last_gauge(server: Server) -> float:
    """Return the mean slots that `/metrics` has of the last interval, here a cycle."""
    page = server.get("/metrics").splitlines()
    [line] = [line for line in page if line.startswith("sglang:spec_cap_length{")]
    return float(line.split()[-1])
