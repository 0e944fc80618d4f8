"""DFlash speculative decoding for SGLang 0.5.23, as a plugin.

The tree mirrors SGLang's: each file has the path that it would have upstream. Nothing here is imported until
SGLang loads its plugins, through `srt/plugins/entry_points.py`.
"""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
