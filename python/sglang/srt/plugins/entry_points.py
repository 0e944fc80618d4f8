"""The two functions that SGLang calls.

Both entry points are named `dflash`, so SGLANG_PLUGINS switches both.
"""

import importlib.metadata

from sglang_dflash import SGLANG_VERSION
from sglang_dflash.srt.hardware_backend.cpu import runtime


def prepare_platform() -> None:
    """Activate the CPU runtime if needed: runs inside `import sglang`, before any kernel.

    Called as group `sglang.srt.platforms`. None leaves the choice of platform to SGLang.
    """
    if runtime.needs_stand_in():
        runtime.activate()


def install() -> None:
    """Install the plugin: runs in the main process and again in every child.

    Called as group `sglang.srt.plugins`. SGLang logs other exceptions of a plugin and goes on, which would
    serve with half of our changes in place.

    Raises:
        SystemExit: The installed SGLang is not the supported release, or a change cannot be made.
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
