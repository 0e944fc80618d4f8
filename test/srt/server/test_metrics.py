"""Counters on /metrics, compared with the requests' acceptance histograms."""

import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import plot_acceptance
import pytest
from plot_acceptance import Counts, read_counts
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving import DRAFT, ROOT, WHOLE_BLOCKS, Server, dflash_arguments, heldout_prompts
from support.length_fields import OBSERVED, assert_fields_are_observed
from support.servers import FLOAT32

from sglang_dflash.srt.observability import dflash_metrics
from sglang_dflash.srt.observability.dflash_metrics import FALLBACKS, DFlashMetrics

BLOCK_SIZE = json.loads((DRAFT / "config.json").read_text())["block_size"]
LABELS = {"model_name": "tiny", "tp_rank": "0"}
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"


@pytest.fixture
def registry(monkeypatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    return registry


@pytest.fixture
def metrics(registry) -> DFlashMetrics:
    return DFlashMetrics(BLOCK_SIZE - 1, LABELS)


def test_counts_are_sums_over_blocks(metrics, registry):
    dice = random.Random(5)
    batches = [[dice.randrange(BLOCK_SIZE) for _ in range(dice.randrange(9))] for _ in range(50)]
    for batch in batches:
        metrics.count_verified(batch, [BLOCK_SIZE - 1] * len(batch))
    blocks = [accept_len for batch in batches for accept_len in batch]
    assert read_counts(generate_latest(registry).decode()) == Counts(
        drafts=len(blocks),
        drafted=len(blocks) * (BLOCK_SIZE - 1),
        accepted=sum(blocks),
        accepted_at=[sum(accept_len >= k for accept_len in blocks) for k in range(1, BLOCK_SIZE)],
    )


def test_labels_of_a_user_leave_ours_alone(registry, monkeypatch, caplog):
    """They would have ended the scheduler at its first block."""
    none = SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0, moe_ep_rank=0, dp_rank=None)
    given = {"zone": "a", "weight_version": "b", "source": "c"}
    settings = SimpleNamespace(
        enable_metrics=True, enable_metrics_for_all_schedulers=False, extra_metric_labels=given
    )
    monkeypatch.setattr(dflash_metrics, "get_parallel", lambda: none)
    monkeypatch.setattr(dflash_metrics, "get_observability", lambda: settings)
    monkeypatch.setattr(dflash_metrics, "get_serving", lambda: SimpleNamespace(served_model_name="tiny"))
    monkeypatch.setattr(dflash_metrics, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(
        dflash_metrics, "get_schedule", lambda: SimpleNamespace(enable_priority_scheduling=False)
    )
    metrics = DFlashMetrics.from_server(BLOCK_SIZE - 1)
    metrics.count_verified([1], [2], "later")
    metrics.count_source("copy", blocks=1, proposed=2, accepted=1)
    page = generate_latest(registry).decode()
    assert 'weight_version="later"' in page and 'source="copy"' in page and 'zone="a"' in page
    assert "['source', 'weight_version']: these labels are theirs" in caplog.text


def test_narrow_cycles_count_what_they_verified(metrics, registry):
    for width in (1, 4, 4):
        metrics.count_width(width)
        metrics.count_verified([0, 0], [width - 1] * 2)
    page = generate_latest(registry).decode()
    assert read_counts(page).drafted == 12
    assert registry.get_sample_value("sglang:spec_verify_width_bucket", {**LABELS, "le": "1.0"}) == 1
    assert registry.get_sample_value("sglang:spec_verify_width_bucket", {**LABELS, "le": "4.0"}) == 3


def test_blocks_are_counted_by_weight_version(metrics, registry):
    for version, batch in (("default", [1, 2]), ("own-1", [3]), ("own-1", [4, 0]), ("default", [])):
        metrics.count_verified(batch, [BLOCK_SIZE - 1] * len(batch), version)
    found = {
        (name, version): registry.get_sample_value(
            f"sglang:spec_version_{name}_total", {**LABELS, "weight_version": version}
        )
        for name in ("drafts", "accepted_tokens")
        for version in ("default", "own-1")
    }
    assert list(found.values()) == [2, 3, 3, 7]


@pytest.mark.parametrize("accepted, warnings", [(14, 1), (16, 0)])
def test_a_low_accept_length_is_told_once(accepted, warnings, caplog):
    """1,000 drafted blocks are judged, without metrics too. Blocks of the anchor alone do not count."""
    silent = DFlashMetrics(BLOCK_SIZE - 1, None)
    for _ in range(9):
        silent.count_verified([1] * accepted + [0] * (100 - accepted) + [0] * 50, [7] * 100 + [0] * 50)
    assert "accept length" not in caplog.text
    for _ in range(5):
        silent.count_verified([1] * accepted + [0] * (100 - accepted), [7] * 100)
    found = [record.message for record in caplog.records if "accept length" in record.message]
    assert len(found) == warnings and all("1.14" in text and "doctor" in text for text in found)


def test_proposals_are_counted_by_source(metrics, registry):
    for given in (("copy", 2, 14, 9), ("draft", 1, 7, 3), ("copy", 1, 7, 7)):
        metrics.count_source(*given)
    metrics.count_undrafted(1)
    found = {
        (name, source): registry.get_sample_value(
            f"sglang:spec_source_{name}_total", {**LABELS, "source": source}
        )
        for name in ("blocks", "proposed_tokens", "accepted_tokens")
        for source in ("copy", "draft")
    }
    assert list(found.values()) == [3, 1, 21, 7, 16, 3]
    assert registry.get_sample_value("sglang:spec_cycles_without_draft_total", LABELS) == 1


def test_fallbacks_are_counted_by_reason_and_logged_once(metrics, registry, caplog):
    assert FALLBACKS
    for reason in FALLBACKS:
        metrics.count_fallback(reason, blocks=1)
        metrics.count_fallback(reason, blocks=6)
        assert registry.get_sample_value("sglang:spec_fallbacks_total", {**LABELS, "reason": reason}) == 7
    assert [reason for record in caplog.records for reason in FALLBACKS if reason in record.message] == list(
        FALLBACKS
    )


def test_an_unknown_fallback_is_an_error(metrics):
    with pytest.raises(KeyError):
        metrics.count_fallback("felt like it", blocks=1)


def test_a_server_without_metrics_still_logs_fallbacks(caplog):
    silent = DFlashMetrics(BLOCK_SIZE - 1, None)
    silent.count_verified([1, 2], [7, 7])
    silent.count_source("copy", 1, 7, 3)
    silent.count_undrafted(1)
    silent.count_fallback(next(iter(FALLBACKS)), blocks=1)
    assert len(caplog.records) == 1


def test_a_page_without_drafts_is_an_error(metrics, registry):
    with pytest.raises(ValueError, match="--enable-metrics"):
        read_counts(generate_latest(registry).decode())


def page(server: Server) -> str:
    return server.get("/metrics")


def counts_of_idle(server: Server) -> Counts:
    """Read the counters after a flush, which waits until no step runs."""
    server.flush_cache()
    return read_counts(page(server))


def answer_all_kinds(server: Server) -> list[dict]:
    """Return the `meta_info` of requests that end by length or by a stop token."""
    texts = [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 300][::20][:12]
    requests = []
    for number, text in enumerate(texts):
        params = {
            "temperature": number % 2,
            "max_new_tokens": (1, 2, 30, 47)[number % 4],
            "ignore_eos": number % 3 > 0,
        }
        requests.append({"text": text, "sampling_params": {**params, "stop_token_ids": [300 + number]}})
    return [answer["meta_info"] for answer in server.generate_many(requests, 5)]


def summed(answers: list[dict]) -> Counts:
    blocks = [
        k for a in answers for k, n in enumerate(a.get("spec_correct_drafts_histogram", ())) for _ in range(n)
    ]
    assert len(blocks) == sum(a.get("spec_verify_ct", 0) for a in answers) > 50
    accepted_at = [sum(accept_len >= k for accept_len in blocks) for k in range(1, BLOCK_SIZE)]
    return Counts(len(blocks), len(blocks) * (BLOCK_SIZE - 1), sum(blocks), accepted_at)


def difference(after: Counts, before: Counts) -> Counts:
    return Counts(
        after.drafts - before.drafts,
        after.drafted - before.drafted,
        after.accepted - before.accepted,
        [a - b for a, b in zip(after.accepted_at, before.accepted_at, strict=True)],
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def overlap_server(servers, record) -> Server:
    flags = ["--enable-metrics", "--speculative-record", record]
    return servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(), *flags)


@pytest.fixture(scope="module")
def server(servers) -> Server:
    """Server that verifies no block for an ended request: it has no overlap."""
    flags = ["--enable-metrics", "--disable-overlap-schedule", "--extra-metric-labels", '{"zone": "a"}']
    return servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(), *flags, environment=OBSERVED)


@pytest.mark.server
def test_overlap_counts_at_most_one_block_more_per_request(overlap_server):
    before = counts_of_idle(overlap_server)
    answers = answer_all_kinds(overlap_server)
    counted, requested = difference(counts_of_idle(overlap_server), before), summed(answers)
    beyond = difference(counted, requested)
    assert 0 <= beyond.drafts <= len(answers)
    assert beyond.drafted == beyond.drafts * (BLOCK_SIZE - 1)
    assert beyond.accepted == sum(beyond.accepted_at)
    assert all(0 <= at <= beyond.drafts for at in beyond.accepted_at)


@pytest.mark.server
def test_requests_are_recorded_as_they_were_answered(overlap_server, record):
    """Ends by length, stop token and stop string, a refusal to be recorded, and a choice that is none.

    `min_p` of 1 samples the likeliest token: answers of one token are not recorded."""
    prompt = [*range(40, 60)]
    sent = [
        {"max_new_tokens": 30, "ignore_eos": True},
        {"max_new_tokens": 30, "custom_params": {"speculative_record": False}},
        {"max_new_tokens": 1},
        {"max_new_tokens": 200, "temperature": 1.0, "min_p": 1.0, "stop": [" ", "e"]},
        {"max_new_tokens": 30, "regex": "[a-z]+"},
    ]
    before = overlap_server.get("/server_info")["internal_states"][0]["speculative_record"]
    answers = [
        overlap_server.generate(input_ids=[number, *prompt], sampling_params={"temperature": 0, **params})
        for number, params in enumerate(sent)
    ]
    for _ in range(1000):  # the answer comes before the line
        found = overlap_server.get("/server_info")["internal_states"][0]["speculative_record"]
        if found["requests"] == before["requests"] + 3:
            break
        time.sleep(0.05)
    rows = [json.loads(line) for file in record.iterdir() for line in file.open()]
    assert found["requests"] == len(rows) and found["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert found["dropped"] == 0 and found["folder"] == str(record)
    assert found["bytes"] == sum(file.stat().st_size for file in record.iterdir())
    by_first = {row["input_ids"][0]: row for row in rows if row["input_ids"][1:21] == prompt}
    assert by_first.keys() == {0, 3, 4}
    for number, row in by_first.items():
        answer, meta = answers[number], answers[number]["meta_info"]
        assert row["input_ids"] == [number, *prompt, *answer["output_ids"]]
        assert row["loss_mask"] == [0] * 21 + [1] * meta["completion_tokens"]
        assert len(row["accept_lens"]) == len(row["drafted"]) == meta["spec_verify_ct"]
        histogram = Counter(length - 1 for length in row["accept_lens"])
        assert [histogram[k] for k in range(max(histogram) + 1)] == meta["spec_correct_drafts_histogram"]
        assert set(row["drafted"]) == {BLOCK_SIZE - 1}
        assert row["constrained"] == ("regex" in sent[number])
        assert row["temperature"] == sent[number].get("temperature", 0.0)
    samples = {
        s.name: s.value for f in text_string_to_metric_families(page(overlap_server)) for s in f.samples
    }
    names = "recorded_requests", "recorded_tokens", "record_dropped"
    assert [samples[f"sglang:spec_{name}_total"] for name in names] == [
        found[name] for name in ("requests", "tokens", "dropped")
    ]
    with pytest.raises(HTTPError, match="400"):
        overlap_server.generate(
            input_ids=prompt, sampling_params={"custom_params": {"speculative_record": "no"}}
        )


@pytest.mark.server
def test_counters_are_the_sums_of_the_requests_histograms(server):
    before = counts_of_idle(server)
    requested = summed(answer_all_kinds(server))
    accept_length = server.get("/server_info")["internal_states"][0]["avg_spec_accept_length"]
    counted = difference(counts_of_idle(server), before)
    assert counted == requested
    assert 0 < counted.accepted < counted.drafted
    assert accept_length == pytest.approx(counted.accept_length), "/server_info reports another accept length"


@pytest.mark.server
def test_length_fields_are_the_slots_that_an_observer_saw(server):
    """Whole blocks, with and without caps."""
    prompts = [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 200][::40]
    slots = assert_fields_are_observed(server, prompts, lambda: counts_of_idle(server))
    assert {n for each in slots.values() for n in each} == {1, 3, BLOCK_SIZE}


@pytest.mark.server
def test_labels_are_those_of_the_schedulers_own_metrics(server):
    answer_all_kinds(server)
    samples = {s.name: s for family in text_string_to_metric_families(page(server)) for s in family.samples}
    expected = samples["sglang:spec_accept_length"].labels
    assert expected["zone"] == "a"
    assert samples["sglang:spec_drafts_total"].labels == expected
    assert samples["sglang:spec_version_drafts_total"].labels == {**expected, "weight_version": "default"}
    assert samples["sglang:spec_fallbacks_total"].labels.keys() == {*expected, "reason"}
    assert samples["sglang:spec_accepted_tokens_per_position_total"].labels.keys() == {*expected, "position"}


@pytest.mark.server
def test_every_metric_and_label_of_the_dashboard_is_on_the_page(server):
    samples = [s for family in text_string_to_metric_families(page(server)) for s in family.samples]
    labels = {sample.name: set(sample.labels) for sample in samples}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    queried = {name for query in queries for name in re.findall(r"sglang:\w+", query)}
    assert queried and queried <= set(labels), f"not on the page: {queried - set(labels)}"
    for query in queries:
        [grouped] = re.findall(r"by \((\w+)\)", query) or [None]
        names = re.findall(r"sglang:\w+", query)
        assert "model_name" in labels[names[0]]
        assert grouped is None or grouped in labels[names[0]], f"{names[0]} has no label {grouped}"


@pytest.mark.server
def test_the_plot_command_draws_the_page(server, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "acceptance.png"
    monkeypatch.setattr(sys, "argv", ["plot_acceptance.py", "--url", server.url, "--output", str(path)])
    assert plot_acceptance.main() == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"accept length {read_counts(page(server)).accept_length:.3f}" in capsys.readouterr().out
