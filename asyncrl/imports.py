"""Functions by import path: rewards and tasks that a recipe names. A path that leads nowhere is one clear line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.user_error import UserError, raised_where


def load_callable(path: str, args: Mapping[str, Any], *, key: str) -> Callable[..., Any]:
    """Return what an import path names, checked to be callable with one value and `args`.

    Args:
        path: "module:function" or "path/to/file.py:function", the file relative to the current folder.
        args: keyword arguments that it will be called with, after one positional value.
        key: the recipe's key, for messages, for instance "reward.function".

    Raises:
        UserError: no such module, file or name (with the nearest one), not callable, or arguments that do not fit.
            An exception that the module itself raises at import is chained.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name.isidentifier():
        raise UserError(f'{key} = "{path}": must be "module:function" or "path/to/file.py:function"')

    module = _load_file(path, module_name, key) if module_name.endswith(".py") else _load_module(path, module_name, key)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [entry for entry in vars(module) if not entry.startswith("_")], n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise UserError(f'{key} = "{path}": {module_name} has no {name}{hint}')

    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise UserError(f'{key} = "{path}": {name} is a {type(function).__name__}, not a function')

    signature = inspect.signature(function)
    try:
        signature.bind(None, **args)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[1:]) or "none"
        raise UserError(f'{key} = "{path}": args {dict(args)} do not fit: {error}; it takes: {takes}') from None

    return function


def _load_module(path: str, module_name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f'{key} = "{path}": {module_name} needs {error.name}, which is not installed') from error

        hint = f"a file is written path/to/{module_name.rpartition('.')[2]}.py:{path.rpartition(':')[2]}"
        raise UserError(f'{key} = "{path}": no module {error.name}; {hint}') from None
    except Exception as error:
        raise UserError(f'{key} = "{path}": importing it {raised_where(error)}') from error


def _load_file(path: str, file_name: str, key: str) -> ModuleType:
    file = Path(file_name).resolve()
    if not file.is_file():
        raise UserError(f'{key} = "{path}": no file {file}')

    name = f"asyncrl_user_{file.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f'{key} = "{path}": running it {raised_where(error)}') from error

    return module
