"""Makes `import torchvision` work if its compiled operators do not load, so that transformers' processors work.

torchvision registers fake (meta) kernels for operators of its compiled extension while it is being imported. With a
torch that its extension was not built for (0.28.0 with torch 2.13.0+cpu) the operators do not exist and the import
fails with `operator torchvision::nms does not exist` — and with it `import transformers`. The processors need none of
these operators: it is enough that their names exist.

Call `ensure_torchvision()` before anything that imports transformers.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import torch

_REGISTRATION = re.compile(r"""register_(?:meta|fake)\(\s*["'](?:torchvision::)?(\w+)["']""")


def ensure_torchvision() -> tuple[str, ...]:
    """Define the operator names that torchvision's import needs and its extension does not provide.

    Does nothing if torchvision is intact or absent, or on further calls. Returns the names defined by the first call.
    """
    return tuple(name for name, _ in _definitions())


@cache
def _definitions() -> tuple[tuple[str, torch.library.Library | None], ...]:
    """(name, the library handle that keeps it registered); cached, because a definition dies with its handle."""
    spec = find_spec("torchvision")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return ()
    package = Path(spec.origin).parent
    if _extension_loads(package):
        return ()
    names = sorted(set(_REGISTRATION.findall((package / "_meta_registrations.py").read_text())))
    missing = [name for name in names if not _exists(name)]
    if not missing:
        return ()
    library = torch.library.Library("torchvision", "FRAGMENT")  # FRAGMENT: others may define names here too
    for name in missing:
        library.define(f"{name}(Tensor x) -> Tensor")
    return tuple((name, library) for name in missing)


def _extension_loads(package: Path) -> bool:
    """Whether torchvision's compiled operators can be loaded; loading twice is harmless. They are in `_C.so`, from 0.29
    on in `_C_stable.so`."""
    libraries = [path for path in package.glob("_C*") if path.name.endswith((*EXTENSION_SUFFIXES, ".pyd"))]
    for path in libraries:
        try:
            torch.ops.load_library(path)
        except (ImportError, OSError):
            return False
    return bool(libraries)


def _exists(name: str) -> bool:
    return hasattr(torch.ops.torchvision, name)
