"""The values of a Gluon kernel in the emulator: numbers, tiles with layouts, pointers.

Integers overflow and divide as a card's do, half types are rounded where a card rounds, and a
product and a sum become one operation, as the compiler makes them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


class GluonError(RuntimeError):
    """A kernel did what Gluon refuses to compile, or what a card does not promise to survive."""


class Deadlock(GluonError):
    """Every partition waits; the message says for what, and since which line."""


class Unsupported(GluonError):
    """The emulator has no such operation."""


class InFlight:
    """A result that is not there yet: whatever a kernel does with it but wait is refused."""

    def describe(self) -> str:
        raise NotImplementedError

    def __getattr__(self, name):
        raise GluonError(f".{name}: {self.describe()}; warpgroup_mma_wait gives its numbers")


for _name in "add sub mul truediv radd rsub rmul rtruediv neg getitem lt le gt ge".split():

    def _refused(self, *_):
        raise GluonError(f"arithmetic: {self.describe()}; warpgroup_mma_wait gives its numbers")

    setattr(InFlight, f"__{_name}__", _refused)


class Int(int):
    """A 32- or 64-bit integer of a kernel: divides towards zero, and says so when it overflows."""

    bits = 32

    def __new__(cls, value, bits=32):
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise GluonError(f"{int(value):,} does not fit an int{bits}: use .to(gl.int64) earlier")
        self = super().__new__(cls, value)
        self.bits = bits
        return self

    def to(self, dtype):
        return Int(int(self), dtype.primitive_bitwidth) if dtype.is_int() else float(self)


def _int_method(name, function):
    def method(self, other):
        if isinstance(other, Tile) or not isinstance(other, (int, np.integer)):
            return NotImplemented
        bits = max(self.bits, getattr(other, "bits", 32))
        return Int(function(int(self), int(other)), bits)

    def reflected(self, other):
        return method(Int(int(other), getattr(other, "bits", 32)), self)

    setattr(Int, f"__{name}__", method)
    setattr(Int, f"__r{name}__", reflected)


def _divided(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


for _name, _function in {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _divided,
    "mod": lambda a, b: a - _divided(a, b) * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "rshift": lambda a, b: a >> b,
    "lshift": lambda a, b: a << b,
}.items():
    _int_method(_name, _function)


def numpy_type(dtype) -> type:
    """The NumPy type that stands for a Triton dtype; half types are kept as float32."""
    if dtype.is_floating():
        return np.float64 if dtype.primitive_bitwidth == 64 else np.float32
    if dtype.primitive_bitwidth == 1:
        return np.bool_
    return np.int64 if dtype.primitive_bitwidth == 64 else np.int32


def rounded(data: np.ndarray, dtype) -> np.ndarray:
    """float32 numbers rounded to what a dtype can hold, to nearest even."""
    name = str(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "fp16":
            return data.astype(np.float16).astype(np.float32)
        if name == "bf16":
            return (
                torch.from_numpy(np.ascontiguousarray(data, np.float32)).bfloat16().float().numpy()
            )
        return data.astype(numpy_type(dtype))


@dataclass(frozen=True)
class Derived:
    """The layout that Gluon finds for itself when a tile is reshaped, split or joined."""

    how: str
    parent: object
    shape: tuple[int, ...]


class Tile:
    """A tensor of a kernel: numbers, a dtype and a layout."""

    __array_ufunc__ = None

    def __init__(self, data, dtype, layout, exact=None):
        self.data, self.dtype, self.layout = data, dtype, layout
        self._exact = exact  # the factors of a product: a sum with it may be fused

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def to(self, dtype, bitcast=False):
        if bitcast:
            if self.dtype.is_floating() or dtype.primitive_bitwidth != 16:
                raise Unsupported(f"{self.dtype} to {dtype} with bitcast")
            return Tile(from_half_bits(self.data, dtype), dtype, self.layout)
        return Tile(rounded(self.data, dtype), dtype, self.layout)

    def reshape(self, shape):
        shape = tuple(int(n) for n in shape)
        if math.prod(shape) != self.data.size:
            raise GluonError(f".reshape: {self.shape} has other elements than {list(shape)}")
        return Tile(self.data.reshape(shape), self.dtype, Derived("reshape", self.layout, shape))

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        if any(k not in (None, slice(None)) for k in key):
            raise Unsupported(f"a tile is indexed by None and colons: got {key}")
        layout = self.layout
        for axis in (axis for axis, k in enumerate(key) if k is None):  # from left to right
            if type(layout).__name__ != "SliceLayout" or layout.dim != axis:
                raise GluonError(
                    f"[{', '.join('None' if k is None else ':' for k in key)}] adds axis {axis}: "
                    f"the tile's layout must be a SliceLayout of that axis, it is {short(layout)}"
                )
            layout = layout.parent
        exact = self._exact
        if exact is not None:
            exact = tuple(np.broadcast_to(x, self.data.shape)[key] for x in exact)
        return Tile(self.data[key], self.dtype, layout, exact)

    def __bool__(self):
        raise GluonError("an `if` takes one value, not a tile: use gl.where")

    def __neg__(self):
        return Tile(-self.data, self.dtype, self.layout)


def half_bits(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers rounded to a half dtype, as the 16 bits of each in an int32."""
    half = torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(dtype)
    return half.view(torch.int16).numpy().astype(np.int32) & 0xFFFF


def from_half_bits(data: np.ndarray, dtype) -> np.ndarray:
    """The numbers of a half dtype that these 16-bit patterns stand for."""
    half = torch.float16 if str(dtype) == "fp16" else torch.bfloat16
    bits = np.ascontiguousarray(data.astype(np.uint16)).view(np.int16)
    return torch.from_numpy(bits).view(half).float().numpy()


def short(layout) -> str:
    """A layout in a few words, for messages."""
    name = type(layout).__name__
    if name == "Derived":
        return f"that of a {layout.how} to {list(layout.shape)}"
    if name == "SliceLayout":
        return f"SliceLayout({layout.dim}, {short(layout.parent)})"
    if name == "DotOperandLayout":
        return f"DotOperandLayout({layout.operand_index}, {short(layout.parent)})"
    if name == "NVMMADistributedLayout":
        return f"NVMMADistributedLayout(instr_shape={list(layout.instr_shape)})"
    return name


def pair(a, b, what):
    """The data of two operands, their common dtype and layout. Raises where layouts differ."""
    tiles = [x for x in (a, b) if isinstance(x, Tile)]
    for x in (a, b):
        if isinstance(x, InFlight):
            raise GluonError(f"{what}: {x.describe()}; warpgroup_mma_wait gives its numbers")
        if not isinstance(x, (Tile, int, float, np.integer, np.floating)):
            raise Unsupported(f"{what} of {type(x).__name__}")
    if len(tiles) == 2 and a.layout != b.layout:
        raise GluonError(
            f"{what}: the two tiles have different layouts, {short(a.layout)} and "
            f"{short(b.layout)}: gl.convert_layout one of them"
        )
    if len(tiles) == 2 and len(a.shape) != len(b.shape):
        raise GluonError(f"{what}: ranks differ, {a.shape} and {b.shape}")
    dtype = tiles[0].dtype
    if len(tiles) == 2 and a.dtype != b.dtype:
        floats = [t for t in tiles if t.dtype.is_floating()] or tiles
        dtype = max((t.dtype for t in floats), key=lambda d: d.primitive_bitwidth)
    elif len(tiles) == 1 and dtype.is_int():
        other = b if tiles[0] is a else a
        gl = gluon_language()
        if isinstance(other, float):
            dtype = gl.float32
        elif getattr(other, "bits", 32) == 64 and dtype.primitive_bitwidth > 1:
            dtype = gl.int64
    return tiles[0].layout, dtype


def gluon_language():
    from triton.experimental.gluon import language

    return language


def data_of(x, kind=None):
    data = x.data if isinstance(x, Tile) else x
    return data if kind is None else np.asarray(data).astype(kind)


def _arithmetic(name, symbol):
    def method(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return _combine(symbol, self, other)

    def reflected(self, other):
        return _combine(symbol, other, self)

    setattr(Tile, f"__{name}__", method)
    setattr(Tile, f"__r{name}__", reflected)


def _combine(symbol, a, b):
    layout, dtype = pair(a, b, f"`{symbol}`")
    kind = numpy_type(dtype)
    x, y = data_of(a, kind), data_of(b, kind)
    with np.errstate(all="ignore"):
        if symbol == "*":
            exact = (x, y) if str(dtype) == "fp32" else None
            _count_arithmetic(x, y)
            return Tile(rounded(x * y, dtype), dtype, layout, exact)
        if symbol in "+-":
            for one in (a, b):  # as the compiler does: a product and a sum become one operation
                if isinstance(one, Tile) and one._exact is not None:
                    exact = np.multiply(*(f.astype(np.float64) for f in one._exact))
                    x, y = (exact, y) if one is a else (x, exact)
                    break
            else:
                _count_arithmetic(x, y)
            total = x + y if symbol == "+" else x - y
            return Tile(rounded(np.asarray(total).astype(kind), dtype), dtype, layout)
        if symbol == "/":
            dtype = dtype if dtype.is_floating() else gluon_language().float32
            return Tile(rounded(x / y, dtype), dtype, layout)
        return Tile(_INTEGER[symbol](x, y), dtype, layout)


def _count_arithmetic(x, y):
    if max(np.ndim(x), np.ndim(y)) == 2:
        on_arithmetic(max(np.size(x), np.size(y)))


def _ignore(size: int) -> None:
    pass


on_arithmetic: Callable[[int], None] = _ignore  # called with the size of a matrix


_INTEGER = {
    "//": lambda x, y: np.trunc(x / y).astype(x.dtype),
    "%": np.fmod,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    ">>": np.right_shift,
}
for _name, _symbol in {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "rshift": ">>",
}.items():
    _arithmetic(_name, _symbol)


def _comparison(name, function):
    def method(self, other):
        layout, _ = pair(self, other, "a comparison")
        with np.errstate(invalid="ignore"):
            return Tile(function(self.data, data_of(other)), gluon_language().int1, layout)

    setattr(Tile, f"__{name}__", method)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(
        _name,
        getattr(
            np,
            {
                "lt": "less",
                "le": "less_equal",
                "gt": "greater",
                "ge": "greater_equal",
                "eq": "equal",
                "ne": "not_equal",
            }[_name],
        ),
    )
Tile.__hash__ = None


@dataclass(frozen=True)
class Pointer:
    """A pointer argument, a number of elements further on; or a tile of such pointers."""

    tensor: torch.Tensor
    name: str
    offset: object = 0

    def __add__(self, other):
        return Pointer(self.tensor, self.name, self.offset + other)

    __radd__ = __add__

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=triton_dtype(self.tensor.dtype))

    def places(self, mask):
        """(flat view of the memory, element numbers that are active). Raises outside of it."""
        from labs._harness.interpreter import span

        offsets = self.offset.data if isinstance(self.offset, Tile) else np.asarray(self.offset)
        active = np.broadcast_to(np.asarray(True if mask is None else data_of(mask)), offsets.shape)
        size = span(self.tensor)
        wrong = offsets[active & ((offsets < 0) | (offsets >= size))]
        if wrong.size:
            raise GluonError(
                f"element {wrong[0]:,} of {self.name}, which has {size:,}: mask it off"
            )
        flat = self.tensor.as_strided((size,), (1,), self.tensor.storage_offset())
        return flat, offsets[active], active


def triton_dtype(dtype: torch.dtype):
    gl = gluon_language()
    return {
        torch.float16: gl.float16,
        torch.bfloat16: gl.bfloat16,
        torch.float32: gl.float32,
        torch.int32: gl.int32,
        torch.int64: gl.int64,
    }[dtype]
