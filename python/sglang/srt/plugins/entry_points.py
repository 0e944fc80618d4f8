"""The two functions that SGLang calls.

Both entry points are named `dflash`, so SGLANG_PLUGINS switches both.
"""

import logging

from sglang_dflash.srt.hardware_backend.cpu import runtime

logger = logging.getLogger(__name__)


def prepare_platform() -> None:
    """Activate the CPU runtime if needed: runs inside `import sglang`, before any kernel.

    Called as group `sglang.srt.platforms`. None leaves the choice of platform to SGLang.
    """
    if runtime.needs_stand_in():
        runtime.activate()


def install() -> None:
    """Install the plugin: runs in the main process and again in every child.

    Called as group `sglang.srt.plugins`. If DFLASH cannot be served with this SGLang, SGLang serves as if the
    plugin were not installed, and one line says so. A server that never asked for DFLASH goes on.
    """
    try:
        from sglang_dflash.srt.plugins import doors, install

        install.install_at_load()
        doors.open_at_load()
    except Exception as error:
        from sglang_dflash.srt.plugins.compatibility import switch_off

        switch_off(error)
