"""All comparisons of Triton kernels with their twins, in one interpreter process."""

import pytest
from serving import ROOT
from support.core_files import CORE
from support.triton_interpreter import INTERPRETED, run_comparisons

FOLDER = ROOT / "test" / "srt" / "unit"
FILES = [path for path in sorted(FOLDER.rglob("test_*.py")) if "@against_twin" in path.read_text()]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.parametrize("profile", ["some", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_in_the_interpreter(profile, request):
    assert len(FILES) >= 6
    files, options = FILES, [f"--hypothesis-profile={profile}"]
    if request.config.option.core:
        files, options = [path for path in FILES if path.name in CORE], [*options, "--core"]
    run_comparisons(files, *options)
