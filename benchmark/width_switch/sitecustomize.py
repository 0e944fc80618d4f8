"""Has an adaptive server verify a given width, or choose for itself again, while it runs. Python imports this at start-up wherever its
folder is on PYTHONPATH; used by benchmark/adaptive.py. The file that WIDTH_SWITCH names holds the number of slots to verify, or nothing.
What is verified because of it teaches the policy nothing."""

import os
import sys
from pathlib import Path


def put_in(module) -> None:
    path = Path(os.environ["WIDTH_SWITCH"])
    chooser = module.WidthChooser
    ask, kept, took = chooser.ask, chooser.kept, chooser.took

    def told() -> int:
        return int(path.read_text() or 0)

    def asked(self, slots, modes):
        width = told()
        if not width:
            return ask(self, slots, modes)
        nothing = 0.0 * self.costs.widths
        return module.Choice(width, self.costs.widths.tolist().index(width), False, nothing, nothing)

    def is_kept(self, *cycle):
        if not told():
            kept(self, *cycle)

    def has_taken(self, *cycle):
        return 0.0 if told() else took(self, *cycle)

    chooser.ask, chooser.kept, chooser.took = asked, is_kept, has_taken


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import({"sglang_dflash.srt.speculative.width.chooser": put_in})
