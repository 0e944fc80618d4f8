"""New weights at run time (`/update_weights_from_disk`): which of the two models a checkpoint is for.

SGLang loads the one checkpoint into the target and then into the draft. What fits the one does not fit the
other, and what SGLang does when a checkpoint does not load, which is to load "the old one" from the new path,
ends the server."""

from typing import Any

from sglang_dflash.srt.configs.config_file import read_config
from sglang_dflash.srt.configs.speculators_format import is_speculators_config


def is_draft(config: dict[str, Any]) -> bool:
    """Whether a config.json is a draft's."""
    architectures = config.get("architectures") or [""]
    return is_speculators_config(config) or "dflash_config" in config or "DraftModel" in architectures[0]


def route_weight_updates(target_runner: Any, draft_runner: Any) -> None:
    """Make each runner's update leave alone a checkpoint that is the other one's, and one that does not load:
    the update then fails, with the reason, and the weights are what they were."""
    for runner, of_draft in ((target_runner, False), (draft_runner, True)):
        runner.weight_updater = RoutedUpdater(runner.weight_updater, runner.model_config, of_draft)


class RoutedUpdater:
    """SGLang's WeightUpdater of one runner, for checkpoints of its own kind."""

    def __init__(self, updater: Any, model_config: Any, of_draft: bool):
        self._updater, self._model_config, self._of_draft = updater, model_config, of_draft

    def __getattr__(self, name: str) -> Any:
        if name == "_updater":  # or a lookup before __init__ recurses
            raise AttributeError(name)
        return getattr(self._updater, name)

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        config = read_config(model_path, None)
        if config is None:
            return False, f"{model_path!r}: no config.json there."
        if is_draft(config) != self._of_draft:
            return True, "Succeeded to update model weights."  # the other one's
        before = self._model_config.model_path
        try:
            return self._updater.update_weights_from_disk(model_path, *args, **kwargs)
        except Exception as error:  # whatever a checkpoint can be broken by
            self._model_config.model_path = before
            loaded, message = self._updater.update_weights_from_disk(before, *args, **kwargs)
            restored = (
                "the old weights are back" if loaded else f"the old ones did not load either: {message}"
            )
            return False, f"{model_path!r} does not load, {restored}: {error}"
