"""Servers of several processes: tensor and data parallelism over loopback.

They run on the CPU runtime's defaults. Two ranks add in another order than one. So tokens after a near tie of
the target are not compared, as in all tests, and the number of cycles may differ slightly.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from serving import DRAFT, PEAGLE_DRAFT, WHOLE_BLOCKS, Server, dflash_arguments
from support.drafts import make_draft, read_config
from support.parity import assert_same
from support.rank_checks import (
    NEARLY_SAME,
    assert_samples,
    cycles,
    mixed_requests,
    output_ids,
    penalized_requests,
    said,
    some_prompts,
)
from support.servers import FLOAT32

from sglang_dflash.srt.hardware_backend.cpu import arguments


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return some_prompts()


def serve_both(server: Server, requests: list[dict], penalized: list[dict]) -> tuple[list[dict], list[dict]]:
    server.flush_cache()
    return server.generate_many(requests, 8), server.generate_many(penalized, 8)


def wider_draft(folder: Path) -> Path:
    """Widen the MLPs of the bundled draft by 32 zero rows; SGLang pads for two arguments."""
    inner = read_config(DRAFT)["intermediate_size"]

    def widen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if ".mlp." in name:
                tensors[name] = F.pad(tensor, (0, 32) if "down_proj" in name else (0, 0, 0, 32)).contiguous()
        return tensors

    assert (inner + 32) % 64
    return make_draft(folder, widen, intermediate_size=inner + 32)


# In the normal lane unit/models/test_tensor_parallel.py has drafts and targets on two ranks.
@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("kind", ["DFlash", "P-EAGLE"])
def test_two_ranks_answer_as_one(kind, servers, reference, prompts, tmp_path):
    requests = mixed_requests(prompts)
    penalized = penalized_requests(prompts)
    arguments = dflash_arguments(PEAGLE_DRAFT if kind == "P-EAGLE" else DRAFT)
    sampled = [WHOLE_BLOCKS, "--speculative-draft-sample-method", "probabilistic"]
    [alone, alone_penalized] = serve_both(servers.get(*FLOAT32, *arguments, *sampled), requests, penalized)
    assert_same(requests, alone, reference.answers(requests))

    if kind == "DFlash":
        arguments = dflash_arguments(wider_draft(tmp_path / "wider"))
    server = servers.get(*FLOAT32, *arguments, *sampled, "--tp-size", "2")
    both, both_penalized = serve_both(server, requests, penalized)
    assert_same(requests, both, reference.answers(requests))
    assert abs(cycles(both) - cycles(alone)) <= NEARLY_SAME * cycles(alone)
    assert output_ids(both_penalized) == output_ids(alone_penalized)
    assert_samples(server, prompts)


@pytest.mark.server
@pytest.mark.long
def test_two_replicas(servers, reference, prompts):
    """With `--dp-size 2` one server has two schedulers with a draft each."""
    server = servers.get(*FLOAT32, *dflash_arguments(), "--dp-size", "2")
    requests = mixed_requests(prompts)
    answers = server.generate_many(requests, 8)
    assert_same(requests, answers, reference.answers(requests))
    assert cycles(answers) < said(answers), "no draft was kept"
    assert set(re.findall(r"DP(\d)[^\n]*Decode batch", server.log())) == {"0", "1"}, "only one replica worked"


# -- settings that the CPU runtime makes itself


def args_of(**changes) -> SimpleNamespace:
    return SimpleNamespace(
        **{"tp_size": 1, "pp_size": 1, "dp_size": 1, "base_gpu_id": 0, "gpu_id_step": 1, **changes}
    )


@pytest.fixture
def environment(monkeypatch):
    """Replacement for `os.environ`, into which pytest writes."""
    found: dict[str, str] = {}
    monkeypatch.setattr(
        arguments, "os", SimpleNamespace(environ=found, sched_getaffinity=lambda pid: {0, 1, 2, 3, 4, 5})
    )
    return found


def test_one_rank_is_left_as_it_was(environment):
    arguments.prepare_ranks(args_of())
    assert environment == {}


def test_ranks_get_their_share(environment):
    arguments.prepare_ranks(args_of(tp_size=2, dp_size=2, base_gpu_id=1, gpu_id_step=2))
    assert environment[arguments.NUM_THREADS] == "1"
    assert len(environment[arguments.THREADS_BIND].split("|")) == 1 + 2 * 4  # the last device is number 7


def test_user_settings_are_not_changed(environment):
    environment |= {arguments.THREADS_BIND: "4|5", arguments.NUM_THREADS: "3"}
    arguments.prepare_ranks(args_of(tp_size=2))
    assert environment == {arguments.THREADS_BIND: "4|5", arguments.NUM_THREADS: "3"}
