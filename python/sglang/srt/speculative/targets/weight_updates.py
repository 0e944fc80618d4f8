"""Weight updates at run time (`/update_weights_from_disk`), for target or draft.

SGLang loads the one checkpoint into the target and then into the draft. A checkpoint that fits one does not
fit the other. If a checkpoint does not load, SGLang loads "the old one" from the new path, which ends the
server."""

from typing import Any

from sglang_dflash.srt.configs.config_file import read_config
from sglang_dflash.srt.configs.speculators_format import is_speculators_config


def is_draft(config: dict[str, Any]) -> bool:
    """Tell whether a config.json is a draft's."""
    architectures = config.get("architectures") or [""]
    return is_speculators_config(config) or "dflash_config" in config or "DraftModel" in architectures[0]


def route_weight_updates(target_runner: Any, draft_runner: Any) -> None:
    """Route a weight update to the model it was made for.

    If a checkpoint fails to load, the old weights are restored and the update reports why.
    """
    for runner, of_draft in ((target_runner, False), (draft_runner, True)):
        runner.weight_updater = RoutedUpdater(runner.weight_updater, runner.model_config, of_draft)


class RoutedUpdater:
    """SGLang's WeightUpdater of one runner, for checkpoints of its own kind."""

    def __init__(self, updater: Any, model_config: Any, of_draft: bool):
        self._updater, self._model_config, self._of_draft = updater, model_config, of_draft

    def __getattr__(self, name: str) -> Any:
        if name == "_updater":  # a lookup before __init__ would recurse
            raise AttributeError(name)
        return getattr(self._updater, name)

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load a checkpoint of this runner's kind, and report success and a message."""
        config = read_config(model_path, None)
        if config is None:
            return False, f"{model_path!r}: no config.json there."
        if is_draft(config) != self._of_draft:
            return True, "Succeeded to update model weights."  # it is the other model's
        before = self._model_config.model_path
        try:
            return self._updater.update_weights_from_disk(model_path, *args, **kwargs)
        except Exception as error:  # a broken checkpoint can raise anything
            self._model_config.model_path = before
            loaded, message = self._updater.update_weights_from_disk(before, *args, **kwargs)
            restored = (
                "the old weights are back" if loaded else f"the old ones did not load either: {message}"
            )
            return False, f"{model_path!r} does not load, {restored}: {error}"
