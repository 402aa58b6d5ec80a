"""What tells one `losses` from another: in this process by identity, in another one by a digest of its code.

A lambda written anew in every round of a loop is the same function; one that holds another function in its closure
is not. Numbers and tensors in closures do not count: they may change from step to step.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


def key_of(function: Callable[..., Any]) -> Any:
    """Hashable; equal for functions of the same code with the same functions in their closures.

    >>> make = lambda f: lambda x: f(x)
    >>> key_of(make(abs)) == key_of(make(abs)), key_of(make(lambda x: x)) == key_of(make(lambda x: -x))
    (True, False)
    """
    return tuple(found for found, _ in _codes(function))


def digest_of(function: Callable[..., Any], model: nn.Module) -> str | None:
    """SHA-256 of the code of `function`, of functions that it holds or calls by name in its module, and of the model's
    forward methods. None if there is no code to be looked at."""
    text: list[str] = []
    for found, where in _codes(function, calls=True):
        if not isinstance(found, CodeType):
            return None
        text.append(where)
        text.extend(_text(found))
    for kind in {type(module): None for module in model.modules()}:
        code = getattr(kind.forward, "__code__", None)
        text.append(f"{kind.__module__}.{kind.__qualname__}")
        text.extend(_text(code) if isinstance(code, CodeType) else ["?"])
    return hashlib.sha256("\0".join(text).encode("utf-8", "backslashreplace")).hexdigest()


def _codes(function: Any, calls: bool = False) -> Iterator[tuple[Any, str]]:
    """Code and name of `function` and of the functions it holds; the thing itself where it has no code."""
    todo, done = [function], set()
    while todo:
        f = todo.pop()
        if isinstance(f, functools.partial):
            todo += [f.func, *filter(_is_function, (*f.args, *f.keywords.values()))]
            continue
        if isinstance(f, MethodType):
            f = f.__func__
        if id(f) in done:
            continue
        done.add(id(f))
        code = getattr(f, "__code__", None)
        if code is None and not isinstance(f, type):
            f = getattr(type(f).__call__, "__func__", type(f).__call__)
            code = getattr(f, "__code__", None)
        yield (f if code is None else code), f"{getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', '?')}"
        if not isinstance(f, FunctionType):
            continue
        for cell in f.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if _is_function(held):
                todo.append(held)
        if calls:
            named = [f.__globals__.get(name) for name in _names(f.__code__)]
            todo += [g for g in named if isinstance(g, FunctionType) and g.__module__ == f.__module__]


def _is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def _names(code: CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _text(code: CodeType) -> list[str]:
    text = [code.co_name, code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars)]
    for const in code.co_consts:
        if isinstance(const, CodeType):
            text.extend(_text(const))
        elif isinstance(const, frozenset):  # its order is another in every process
            text.append(repr(sorted(map(repr, const))))
        else:
            text.append(repr(const))
    return text
