"""DFlash speculative decoding for SGLang 0.5.23, installed beside it as a plugin.

The tree mirrors SGLang's own: a file lies where it would lie upstream. Nothing here is imported until
SGLang loads its plugins; `srt/plugins/entry_points.py` is the door.
"""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
