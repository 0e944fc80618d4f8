"""Build the long description: README.md with links that also work on a package index.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/sglang-dflash/sglang-dflash"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# Relative links lead into the repository: images to the file itself, all others to its page.
readme = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{REPOSITORY}/raw/main/", readme)
readme = re.sub(r"(\]\()(?!\w+:|#)", rf"\g<1>{REPOSITORY}/blob/main/", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
