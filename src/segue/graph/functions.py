"""Functions by name: those of a graph of models run in workers, which import them.

A name is `MODULE:NAME` for a module of a package, else `FILE.py:NAME`: a single file is imported from where it lies,
with its folder on the path, as Python does with a script.

Optional reading: only for graphs of models.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from segue.messages.errors import ConfigError, shown


def name_of(function: object, where: str, arguments: tuple[str, ...]) -> str:
    """Return the name by which a worker imports a function that takes these arguments. Raises `ConfigError` for
    anything that cannot be imported or called so; `where` names its place."""
    right = f"a plain function of ({', '.join(arguments)}), defined at the top of a module"
    if not isinstance(function, FunctionType) or "<" in function.__qualname__ or "." in function.__qualname__:
        raise ConfigError(f"{where} is {shown(function)}; it must be {right}", field="transform")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where} is {function.__name__!r}, which does not return its result; it must be {right}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where} is {function.__name__}{inspect.signature(function)}; it must be {right}", field="transform"
        ) from error
    if function.__module__ == "__main__":
        raise ConfigError(
            f"{where} is {function.__name__!r} of the script that runs, which no worker can import; put it into a "
            "module of its own and import it",
            field="transform",
        )
    module = sys.modules.get(function.__module__)
    file = None if module is None else module.__file__
    if file is None:
        raise ConfigError(f"{where} is {function.__name__!r}, whose module has no file; put it into one")
    single = "." not in function.__module__
    return f"{Path(file).resolve() if single else function.__module__}:{function.__name__}"


def function_at(name: str) -> Callable[..., Any]:
    """Return the function of a name. Raises `ConfigError`."""
    where, _, function = name.rpartition(":")
    try:
        module = module_at(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(f"transform {name!r} cannot be imported: {error}", field="transform") from error
    found = getattr(module, function, None)
    if not isinstance(found, FunctionType):
        raise ConfigError(f"transform {name!r}: the module has no function {function!r}", field="transform")
    return found


def module_at(path: Path) -> ModuleType:
    """Import a single file, once. Raises `ConfigError` for one that is not there; whatever it raises, propagates."""
    path = path.resolve()
    for known in list(sys.modules.values()):
        if getattr(known, "__file__", None) == str(path):
            return known
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}", field="model")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # no other module can have this name
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} is no file of Python code", field="model")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
