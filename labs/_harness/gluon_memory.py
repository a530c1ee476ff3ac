"""Shared memory, mbarriers and descriptors of a Gluon kernel in the emulator."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass

import numpy as np
import torch

from labs._harness.gluon_values import GluonError, Tile, triton_dtype


@dataclass
class Barrier:
    """An mbarrier: `count` arrivals and all expected bytes complete a phase, then the next begins.

    Attributes:
        pending: arrivals that this phase still wants. bytes: that are still to come in it.
        phase: phases completed so far. A wait for parity p passes while phase p is not the one
            that runs.
        fenced: a fence came after it was initialised: TMA sees it.
    """

    count: int | None = None
    fenced: bool = False
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def arrive(self, count, name):
        if count > self.pending:
            raise GluonError(
                f"{name}: {count} more arrivals in a phase that wants {self.pending} of "
                f"{self.count}: somebody arrives twice, init has too small a count, or a loop came "
                "round before this phase was complete (is there a wait, for this round's parity?)"
            )
        self.pending -= count
        self.settle()

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Allocation:
    """Shared memory of one allocate_shared_memory: what the asynchronous units see."""

    def __init__(self, program, name, shape, dtype):
        self.program, self.name, self.dtype = program, name, dtype
        size = math.prod(shape)
        self.barriers = [Barrier() for _ in range(size)] if dtype.primitive_bitwidth == 64 else None
        self.data = np.full(size, np.nan, np.float32) if self.barriers is None else None
        self.unfenced: list[tuple[object, np.ndarray, np.ndarray]] = []  # (partition, places, data)


class Shared:
    """A shared_memory_descriptor: a view of an allocation, as an array of places in it."""

    def __init__(self, memory, places, layout, name):
        self.memory, self.places, self.layout, self.name = memory, places, layout, name

    @property
    def shape(self):
        return list(self.places.shape)

    @property
    def dtype(self):
        return self.memory.dtype

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def index(self, i):
        if not 0 <= int(i) < self.places.shape[0]:
            raise GluonError(f"{self.name}.index({int(i)}): it has {self.places.shape[0]}")
        return Shared(self.memory, self.places[int(i)], self.layout, f"{self.name}[{int(i)}]")

    def permute(self, order):
        return Shared(self.memory, self.places.transpose(order), self.layout, self.name)

    def reshape(self, shape):
        return Shared(self.memory, self.places.reshape(shape), self.layout, self.name)

    def slice(self, start, length, dim=0):
        key = [slice(None)] * self.places.ndim
        key[dim] = slice(start, start + length)
        return Shared(self.memory, self.places[tuple(key)], self.layout, self.name)

    def load(self, layout):
        run = self.memory.program
        run.point()
        data = self.memory.data.copy()
        for _, places, written in self.memory.unfenced:
            data[places] = written
        return Tile(data[self.places], self.dtype, layout)

    def store(self, value):
        run = self.memory.program
        run.point()
        if not isinstance(value, Tile):
            raise GluonError(f"{self.name}.store takes a tile: got {type(value).__name__}")
        if value.shape != self.shape or value.dtype != self.dtype:
            raise GluonError(
                f"{self.name}.store: it is {self.dtype} {self.shape}, the tile {value.dtype} "
                f"{value.shape}"
            )
        run.store_may_not_read(self)
        run.product_does_not_read(self)
        self.memory.unfenced.append((run.current, self.places.copy(), value.data.copy()))

    def now(self):
        """What the asynchronous units read there."""
        return self.memory.data[self.places]

    def barrier(self) -> Barrier:
        if self.memory.barriers is None:
            raise GluonError(
                f"{self.name} is no mbarrier but {self.dtype}: allocate it as gl.int64 with "
                "mbarrier.MBarrierLayout()"
            )
        if self.places.size != 1:
            raise GluonError(f"{self.name} {self.shape} is not one mbarrier: index it first")
        return self.memory.barriers[int(self.places.reshape(-1)[0])]

    def ready(self) -> Barrier:
        bar = self.barrier()
        if bar.count is None:
            raise GluonError(
                f"{self.name}: this mbarrier was never given its count (mbarrier.init)"
            )
        return bar


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two stretches of an allocation have a place in common."""
    return a.min() <= b.max() and b.min() <= a.max()


class Descriptor:
    """A host TensorDescriptor, as a kernel sees it."""

    def __init__(self, host):
        self.host, self.layout = host, host.layout
        self.dtype = triton_dtype(host.base.dtype)
        shape = list(host.block_shape)
        self.nbytes = math.prod(shape) * self.dtype.primitive_bitwidth // 8
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=self.nbytes)
        self.block_shape = shape
        self.nbytes_per_cta = self.nbytes
        self.view = host.base.as_strided(
            tuple(host.shape), tuple(host.strides), host.base.storage_offset()
        )

    def _cut(self, coord):
        """(slices of the tensor, slices of the tile) of what a tile at coord has of the tensor."""
        outer, inner = [], []
        for start, size, length in zip(coord, self.block_shape, self.view.shape, strict=True):
            low, high = max(start, 0), min(start + size, length)
            outer.append(slice(low, max(high, low)))
            inner.append(slice(low - start, max(high, low) - start))
        return tuple(outer), tuple(inner)

    def read(self, coord):
        tile = np.zeros(self.block_shape, np.float32)
        outer, inner = self._cut(coord)
        tile[inner] = self.view[outer].float().numpy()
        return tile

    def write(self, coord, tile):
        outer, inner = self._cut(coord)
        self.view[outer] = torch.from_numpy(np.ascontiguousarray(tile[inner])).to(self.view.dtype)
