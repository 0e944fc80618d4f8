"""Routing of weight updates to the target or the draft, in process."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules

from sglang_dflash.srt.speculative.targets.weight_updates import route_weight_updates


@pytest.mark.parametrize(
    "config, wanted",
    [
        (None, "target"),  # a trainer's folder: weights alone
        ({"architectures": ["Qwen3ForCausalLM"]}, "target"),
        ({"architectures": ["DFlashDraftModel"]}, "draft"),
        ({"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}, "draft"),
    ],
)
def test_an_update_reaches_the_model_it_was_made_for(config, wanted, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    updaters = {name: MagicMock() for name in ("target", "draft")}
    runners = []
    for updater in updaters.values():
        updater.update_weights_from_disk.return_value = (True, "done")
        model_config = SimpleNamespace(model_path="before")
        model = MagicMock(no_update_reason=None)
        runners.append(SimpleNamespace(weight_updater=updater, model_config=model_config, model=model))
    route_weight_updates(*runners)
    for runner in runners:
        assert runner.weight_updater.update_weights_from_disk(str(tmp_path))[0]
    reached = [name for name, updater in updaters.items() if updater.update_weights_from_disk.called]
    assert reached == [wanted]


def test_a_draft_that_takes_no_update_says_why(tmp_path):
    """SGLang would load the old weights again, which such a draft cannot either."""
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    runners = [
        SimpleNamespace(weight_updater=MagicMock(), model_config=None, model=MagicMock()) for _ in "td"
    ]
    runners[1].model.no_update_reason = "it is packed"
    inner = runners[1].weight_updater
    route_weight_updates(*runners)
    assert runners[0].weight_updater.update_weights_from_disk(str(tmp_path))[0]
    is_loaded, message = runners[1].weight_updater.update_weights_from_disk(str(tmp_path))
    assert not is_loaded and message.endswith("is not loaded: it is packed")
    assert not inner.update_weights_from_disk.called
