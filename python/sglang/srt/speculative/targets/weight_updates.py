"""Weight updates at run time (`/update_weights_from_disk`), for target or draft.

SGLang loads the one checkpoint into the target and then into the draft. A checkpoint that fits one does not
fit the other. If a checkpoint does not load, SGLang loads "the old one" from the new path, which ends the
server."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.configs.config_file import read_config
from sglang_dflash.srt.configs.flat_peagle import ARCHITECTURES
from sglang_dflash.srt.configs.speculators_format import is_speculators_config

# SGLang's other ways to change weights. Each ends with one of these calls.
_OTHER_UPDATES = (
    "end_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


def is_draft(config: dict[str, Any]) -> bool:
    """Tell whether a config.json is a draft's."""
    architectures = config.get("architectures") or [""]
    is_named = "DraftModel" in architectures[0] or architectures[0] in ARCHITECTURES
    return is_speculators_config(config) or "dflash_config" in config or is_named


def route_weight_updates(target_runner: Any, draft_runner: Any) -> None:
    """Route a weight update to the model it was made for.

    If a checkpoint fails to load, the old weights are restored and the update reports why. After an update of
    either model the draft renews its FP8 copies.
    """
    draft = draft_runner.model
    for runner, of_draft in ((target_runner, False), (draft_runner, True)):
        refusal = draft.no_update_reason if of_draft else None
        runner.weight_updater = RoutedUpdater(
            runner.weight_updater, runner.model_config, of_draft, draft.refresh_fp8_head, refusal
        )


class RoutedUpdater:
    """SGLang's WeightUpdater of one runner, for checkpoints of its own kind.

    on_updated: called after each change of the weights. refusal: why the model takes no checkpoint.
    """

    def __init__(
        self,
        updater: Any,
        model_config: Any,
        of_draft: bool,
        on_updated: Callable[[], None],
        refusal: str | None = None,
    ):
        self._updater, self._model_config, self._of_draft = updater, model_config, of_draft
        self._on_updated, self._refusal = on_updated, refusal

    def __getattr__(self, name: str) -> Any:
        if name == "_updater":  # a lookup before __init__ would recurse
            raise AttributeError(name)
        attribute = getattr(self._updater, name)
        return self._reporting(attribute) if name in _OTHER_UPDATES else attribute

    def _reporting(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._on_updated()
            return result

        return run

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load a checkpoint of this runner's kind, and report success and a message."""
        # Trainers write the target's weights into bare folders, without a config.json.
        config = read_config(model_path, None)
        if (config is not None and is_draft(config)) != self._of_draft:
            return True, "Succeeded to update model weights."  # it is the other model's
        if self._refusal is not None:
            return False, f"{model_path!r} is not loaded: {self._refusal}"
        before, load = self._model_config.model_path, self._reporting(self._updater.update_weights_from_disk)
        try:
            return load(model_path, *args, **kwargs)
        except Exception as error:  # a broken checkpoint can raise anything
            self._model_config.model_path = before
            loaded, message = load(before, *args, **kwargs)
            restored = (
                "the old weights are back" if loaded else f"the old ones did not load either: {message}"
            )
            return False, f"{model_path!r} does not load, {restored}: {error}"
