"""Nested states as JSON, their tensors set apart for safetensors; and back. Nothing is ever unpickled.

What a `state_dict` holds in practice: tensors, arrays, numbers, strings, None and containers of them. Anything else
is refused, naming the place. Floats are written exactly.

>>> tensors = {}
>>> written = pack({"lr": 0.1, 3: (True, None), "w": torch.zeros(2)}, tensors, "state")
>>> unpack(written, tensors)
{'lr': 0.1, 3: (True, None), 'w': tensor([0., 0.])}
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StateError

CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, Any] = {"map": dict, "ordered": OrderedDict, "counter": Counter}


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, Tensor):
        return {"tensor": _put(value, tensors, path), "device": str(value.device)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": _put(torch.from_numpy(value.copy()), tensors, path)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return pack(value.item(), tensors, path)
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, Mapping):
        kind = next((k for k, t in MAPPINGS.items() if type(value) is t), "map")
        return {
            kind: [[pack(k, tensors, f"{path}.key"), pack(v, tensors, f"{path}.{k}")] for k, v in value.items()],
        }
    for kind, container in CONTAINERS.items():
        if isinstance(value, container):
            return {kind: [pack(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]}
    raise StateError(
        f"cannot save the {type(value).__name__} at {path}; a state_dict may hold tensors, arrays, numbers, strings, "
        "None and lists, tuples, sets and dicts of them"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given. Tensors come back where they were, or on the CPU if that device is not here."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].to(_device(value["device"]))
    ((kind, inner),) = value.items()
    if kind in MAPPINGS:
        return MAPPINGS[kind]({unpack(k, tensors): unpack(v, tensors) for k, v in inner})
    if kind in CONTAINERS:
        return CONTAINERS[kind](unpack(v, tensors) for v in inner)
    if kind == "float":
        return float.fromhex(inner)
    if kind == "complex":
        return complex(*(float.fromhex(x) for x in inner))
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "array":
        return tensors[inner].numpy()
    if kind == "dtype" and isinstance(getattr(torch, inner), torch.dtype):
        return getattr(torch, inner)
    if kind == "device":
        return torch.device(inner)
    raise ValueError(f"unknown kind of value {kind!r}")


def _put(value: Tensor, tensors: dict[str, Tensor], path: str) -> str:
    if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.device.type == "meta":
        what = "complex" if value.is_complex() else "quantized, sparse or meta"
        raise StateError(f"cannot save the {what} tensor at {path}; only dense tensors of real numbers can be saved")
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    return name


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and torch.cuda.is_available():
        index = device.index if device.index is not None and device.index < torch.cuda.device_count() else None
        return torch.device("cuda", index) if index is not None else torch.device("cuda")
    return torch.device("cpu")
