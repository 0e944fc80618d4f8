"""DFlash speculative decoding for SGLang, as a plugin.

The tree mirrors SGLang's: each file has the path that it would have upstream. Nothing here is imported until
SGLang loads its plugins, through `srt/plugins/entry_points.py`.
"""

__version__ = "0.1.0"
