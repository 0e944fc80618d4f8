"""The two functions SGLang calls. Both entry points are named `dflash`, so SGLANG_PLUGINS switches both."""

import importlib.metadata

from sglang_dflash import SGLANG_VERSION
from sglang_dflash.srt.hardware_backend.cpu import runtime


def prepare_platform() -> None:
    """Group `sglang.srt.platforms`: runs while `import sglang` is under way, before any kernel is imported.

    Returns None, which leaves the choice of platform to SGLang.
    """
    if runtime.needs_stand_in():
        runtime.activate()


def install() -> None:
    """Group `sglang.srt.plugins`: runs in the main process and again in every child.

    Raises SystemExit when this is not the SGLang we were written for. SGLang logs any other exception of a
    plugin and goes on, which would serve with half of our changes in place.
    """
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise SystemExit(
            f"sglang-dflash supports SGLang {SGLANG_VERSION} and nothing else, but {installed} is installed. "
            f"Run `pip install sglang=={SGLANG_VERSION}`, or `pip uninstall sglang-dflash`."
        )
    try:
        from sglang_dflash.srt.plugins.install import install_at_load

        install_at_load()
    except Exception as error:
        raise SystemExit(f"sglang-dflash could not be installed into SGLang: {error!r}") from error
