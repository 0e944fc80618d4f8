"""A request with NaN or infinite target logits ends with that reason; all others go on."""

import pytest
from serving import PEAGLE_DRAFT, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.servers import FLOAT32, patched

pytestmark = pytest.mark.server

SERVERS = {
    "one-hot": dflash_arguments(),
    "probabilistic": [*dflash_arguments(), "--speculative-draft-sample-method", "probabilistic"],
    "P-EAGLE": dflash_arguments(PEAGLE_DRAFT),
}


@pytest.mark.parametrize("flags", SERVERS)
def test_broken_logits_end_their_request_alone(flags, servers, reference):
    server = servers.get(*FLOAT32, *SERVERS[flags], environment=patched("broken_logits"))
    texts = [prompt["text"] for prompt in heldout_prompts() if 10 <= prompt["num_tokens"] <= 100][:12]
    length = {"max_new_tokens": 32, "ignore_eos": True}
    fine = [{"text": text, "sampling_params": {"temperature": 0, **length}} for text in texts]
    broken = [
        {
            "text": text,
            "sampling_params": {"temperature": i % 2, **length, "custom_params": {"logit": logit}},
            "return_logprob": i % 3 == 0,
        }
        for i, (text, logit) in enumerate(zip(texts, ["nan", "inf"] * 6))
    ]
    answers = server.generate_many([one for pair in zip(fine, broken) for one in pair], 8)
    for answer in answers[1::2]:
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}
        # The prefill's token, and the one at whose position the request ended.
        assert answer["meta_info"]["completion_tokens"] == 2
    assert_same(fine, answers[::2], reference.answers(fine))
    assert_same(fine, server.generate_many(fine, 8), reference.answers(fine))
