"""A safetensors file written tensor by tensor, as the package itself reads it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from diloco_cli.train.tensor_file import DTYPES, write_tensors


def test_every_type_and_shape_comes_back(tmp_path):
    tensors = {f"x.{n}": (torch.arange(7) % 3).to(t) for n, t in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": torch.rand(3, 5).T}
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    class OneByOne(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.full((1000,), float(name))
            alive.append(weakref.ref(tensor))
            return tensor

        def __iter__(self) -> Iterator[str]:
            return map(str, range(20))

        def __len__(self) -> int:
            return 20

    write_tensors(tmp_path / "t.safetensors", OneByOne())
    assert {name: t[0].item() for name, t in load_file(tmp_path / "t.safetensors").items()} == {
        str(n): float(n) for n in range(20)
    }


def test_an_unknown_type_is_a_bug(tmp_path):
    with pytest.raises(KeyError):
        write_tensors(tmp_path / "t.safetensors", {"x": torch.zeros(3, dtype=torch.complex64)})
