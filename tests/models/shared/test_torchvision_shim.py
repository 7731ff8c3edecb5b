"""transformers' image processors import in a fresh process, whatever torchvision's extension does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from segue.kernels.torchvision_shim import ensure_torchvision


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_processors_import_after_the_shim() -> None:
    code = (
        "from segue.kernels.torchvision_shim import ensure_torchvision; ensure_torchvision()\n"
        "import torchvision.transforms.v2.functional as F, torch\n"
        "from transformers import Qwen2VLVideoProcessor, Qwen2VLImageProcessor\n"
        "print(tuple(F.resize(torch.zeros(3, 8, 8), [4, 4]).shape))"
    )
    assert in_fresh_process(code) == "(3, 4, 4)"


@pytest.mark.nightly
def test_calling_again_changes_nothing() -> None:
    """Nor is a name defined twice, which torch refuses; before torchvision is imported and after."""
    code = (
        "from segue.kernels.torchvision_shim import ensure_torchvision\n"
        "names = ensure_torchvision(); again = ensure_torchvision()\n"
        "import torch, torchvision\n"
        "there = all(hasattr(torch.ops.torchvision, name) for name in (*names, 'nms'))\n"
        "print(names == again == ensure_torchvision(), len(set(names)) == len(names), there)"
    )
    assert in_fresh_process(code) == "True True True"


@pytest.mark.nightly
def test_names_defined_elsewhere_are_left_alone() -> None:
    if not ensure_torchvision():
        pytest.skip("torchvision is whole here, and ends a process that defines its operators")
    code = (
        "import torch\n"
        "library = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "try: library.define('nms(Tensor dets, Tensor scores, float iou) -> Tensor')\n"
        "except RuntimeError: pass\n"
        "from segue.kernels.torchvision_shim import ensure_torchvision\n"
        "names = ensure_torchvision(); import torchvision\n"
        "print('nms' in names)"
    )
    assert in_fresh_process(code) == "False"


def test_whole_torchvision_is_left_alone() -> None:
    """Where the compiled extension loads, or was loaded, no name is defined."""
    code = (
        "from segue.kernels.torchvision_shim import ensure_torchvision\n"
        "names = ensure_torchvision(); import torchvision\n"
        "print(bool(names) != torchvision.extension._has_ops())"
    )
    assert in_fresh_process(code) == "True"


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so"])
def test_an_extension_of_either_name_is_found(tmp_path: Path, name: str) -> None:
    """A second definition of its operators would end the process."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_meta_registrations.py").write_text('@register_meta("nms")\n')
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, pathlib\n"
        f"pathlib.Path({str(package / name)!r}).symlink_to(pathlib.Path(torch.__file__).parent / 'lib/libc10.so')\n"
        "from segue.kernels.torchvision_shim import ensure_torchvision\n"
        "print(ensure_torchvision())"
    )
    assert in_fresh_process(code) == "()"
