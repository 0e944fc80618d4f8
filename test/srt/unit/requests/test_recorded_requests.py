"""Which requests are recorded, and what a line has."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_STR

from sglang_dflash.srt.observability.traffic import TrafficRecorder, check_record_choice, record_output


class Request:
    """SGLang's, as far as a recorder reads it."""

    def __init__(self, custom_params=None, **fields):
        self.origin_input_ids, self.output_ids_through_stop = [1, 2, 3], [4, 5, 6]
        self.sampling_params = SimpleNamespace(
            custom_params=custom_params, top_k=-1, temperature=0.5, logit_bias=None
        )
        self.finished_reason, self.is_retracted = None, False
        self.multimodal_inputs = self.input_embeds = self.positional_embed_overrides = None
        self.lora_id = self.grammar = self.custom_logit_processor = None
        vars(self).update(fields)

    def finished(self) -> bool:
        return self.finished_reason is not None


def record_one(req: Request, share=1.0, is_opt_in=False, ends=None, cycles=((2, 7),)) -> list[dict]:
    """Return the rows of a request that takes part in some cycles, and ends."""
    rows: list[dict] = []
    adapters = SimpleNamespace(lora_refs={"x": SimpleNamespace(lora_name="sql")})
    recorder = TrafficRecorder(SimpleNamespace(add=rows.append), share, is_opt_in, adapters)
    for accepted, drafted in cycles:
        recorder.on_cycle([req], [accepted], [drafted])
        recorder.on_output([req])
    req.finished_reason = ends or FINISH_LENGTH(3)
    recorder.on_cycle([req], [7], [7])  # in flight when the request ended
    for _ in range(2):
        recorder.on_output([req])
    return rows


@pytest.mark.parametrize(
    "fields, options, is_recorded",
    [
        ({}, {}, True),
        ({"custom_params": {"speculative_record": False}}, {}, False),
        ({"custom_params": {"speculative_record": True}}, {}, True),
        ({"custom_params": {"other": 1}}, {"is_opt_in": True}, False),
        ({"custom_params": {"speculative_record": True}}, {"is_opt_in": True}, True),
        ({"custom_params": {"speculative_record": False}}, {"is_opt_in": True}, False),
        ({"custom_params": {"speculative_record": True}}, {"share": 0.0}, False),
        ({}, {"ends": FINISH_ABORT("gone")}, False),
        ({}, {"ends": FINISH_MATCHED_STR(matched="NaN happened")}, False),
        ({}, {"ends": FINISH_MATCHED_STR(matched="the end")}, True),
        ({}, {"cycles": ()}, False),  # an answer of one token
        ({"multimodal_inputs": object()}, {}, False),
        ({"input_embeds": [[0.5]]}, {}, False),
        ({"positional_embed_overrides": object()}, {}, False),
    ],
)
def test_who_is_recorded(fields, options, is_recorded):
    assert len(record_one(Request(**fields), **options)) == is_recorded


@pytest.mark.parametrize(
    "fields, found",
    [
        ({}, {}),
        ({"grammar": object()}, {"constrained": True}),
        ({"custom_logit_processor": "x"}, {"constrained": True}),
        ({"lora_id": "x"}, {"lora": "sql"}),
        ({"lora_id": "unloaded meanwhile"}, {"lora": ""}),
    ],
)
def test_what_a_line_has(fields, found):
    [row] = record_one(Request(**fields), cycles=((2, 7), (0, 3)))
    assert row == {
        "input_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 0, 0, 1, 1, 1],
        "accept_lens": [3, 1],
        "drafted": [7, 3],
        "temperature": 0.5,
        "constrained": False,
        "lora": "",
        **found,
    }


def test_retracted_cycles_do_not_count():
    assert record_one(Request(is_retracted=True)) == []


def test_a_share_of_requests_is_recorded():
    rows: list[dict] = []
    recorder = TrafficRecorder(SimpleNamespace(add=rows.append), 0.25, False)
    recorder._dice.seed(1)
    for _ in range(2000):
        req = Request()
        recorder.on_cycle([req], [1], [7])
        req.finished_reason = FINISH_LENGTH(3)
        recorder.on_output([req])
    assert 440 < len(rows) < 560
    assert not recorder._cycles, "requests that ended are forgotten"


def test_without_a_record_answers_are_sent_all_the_same():
    sent: list = []
    record_output(lambda *args, **kwargs: sent.append((args, kwargs)), "streamer", [1], True, skip_req=None)
    assert sent == [(("streamer", [1], True), {"skip_req": None})]


@pytest.mark.parametrize("choice", [None, 0, "false", [True], {}])
def test_a_choice_is_true_or_false(choice):
    check_record_choice({"speculative_record": True})
    check_record_choice(None)
    with pytest.raises(ValueError, match="custom_params: speculative_record is true or false, not"):
        check_record_choice({"speculative_record": choice})
