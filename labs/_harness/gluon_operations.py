"""Gluon's operations in the emulator, by their names there. What is not here is refused."""

from __future__ import annotations

import linecache
import math
import re
import sys

import numpy as np
import torch

from labs._harness import triton_private
from labs._harness.gluon_memory import Descriptor, Shared, overlap
from labs._harness.gluon_program import Load, Product, Store, running
from labs._harness.gluon_values import (
    Derived,
    GluonError,
    InFlight,
    Int,
    Tile,
    Unsupported,
    data_of,
    gluon_language,
    half_bits,
    numpy_type,
    pair,
    short,
    triton_dtype,
)

MOST_BYTES = (1 << 20) - 1  # that an mbarrier can expect at a time


def _check_copy(desc, coord, shared, what):
    if not isinstance(desc, Descriptor) or not isinstance(shared, Shared):
        raise GluonError(f"{what} takes a descriptor, coordinates and shared memory")
    if len(coord) != len(desc.block_shape):
        raise GluonError(f"{what}: {len(coord)} coordinates for {len(desc.block_shape)} axes")
    if shared.shape != desc.block_shape or shared.dtype != desc.dtype:
        raise GluonError(
            f"{what}: the descriptor's tile is {desc.dtype} {desc.block_shape}, "
            f"{shared.name} is {shared.dtype} {shared.shape}"
        )
    if shared.layout != desc.layout:
        raise GluonError(f"{what}: {shared.name} must have the layout of the descriptor")


def _allocate_shared_memory(element_ty, shape, layout, value=None):
    run = running()
    run.point()
    if value is not None:
        raise Unsupported("allocate_shared_memory with a value")
    shape = [int(n) for n in shape]
    shared = run.allocate(_assigned_name(), shape, element_ty, layout)
    run.memories.append(shared.memory)
    return shared


def _assigned_name() -> str:
    """What the kernel calls the memory that it allocates now.

    "k_ring.full" for one that a helper returns, assigned to `full` there and to `k_ring` by its
    caller; "_ring(k_desc).full" where the call stands in a list.
    """
    names, frame = [], sys._getframe(2)
    file = frame.f_code.co_filename
    while frame is not None and frame.f_code.co_filename == file:
        text = linecache.getline(file, frame.f_lineno)
        assigned = re.match(r"\s*(\w+)\s*=", text)
        called = re.match(r"\s*(\w+\(\w+)\b", text) if names else None
        if not assigned and not called:
            break
        names.append(assigned[1] if assigned else f"{called[1]})")
        frame = frame.f_back if assigned else None
    return ".".join(reversed(names)) or "shared memory"


def _init(mbarrier, count):
    bar = mbarrier.barrier()
    if bar.count is not None:
        raise GluonError(f"{mbarrier.name}: initialised a second time; mbarrier.invalidate first")
    bar.count = bar.pending = int(count)
    bar.bytes = bar.phase = 0
    bar.fenced = False


def _expect(mbarrier, bytes_per_cta=None, pred=True):
    run = running()
    run.point()
    if not pred:
        return
    size = int(bytes_per_cta)
    if size > MOST_BYTES:
        raise GluonError(f"{mbarrier.name}: expects {size:,} bytes, at most {MOST_BYTES:,}")
    bar = mbarrier.ready()
    bar.bytes += size
    bar.arrive(1, mbarrier.name)


def _invalidate(mbarrier):
    mbarrier.ready().count = None


def _arrive(mbarrier, *, count=1, pred=True):
    run = running()
    run.point()
    if pred:
        run.record("arrive")
        mbarrier.ready().arrive(int(count), mbarrier.name)
        run.let_others_go_on()


def _wait(mbarrier, phase, pred=True, deps=()):
    if pred:
        running().record("wait")
        running().wait(mbarrier, int(phase))


def _tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    run = running()
    run.point()
    if not pred:
        return
    _check_copy(tensor_desc, coord, result, "a TMA load")
    for memory, places in ((load.target.memory, load.target.places) for load in run.loads):
        if memory is result.memory and overlap(places, result.places):
            raise GluonError(f"two TMA loads into {result.name} are in flight")
    if not barrier.ready().fenced:
        raise GluonError(
            f"a TMA load with {barrier.name}: no fence_async_shared since it was initialised, and "
            "TMA may see it as it was before"
        )
    result.memory.data[result.places] = np.nan
    coord = tuple(int(i) for i in coord)
    run.record("load", tensor_desc.nbytes, tensor=tensor_desc.host.base, place=coord)
    run.loads.append(Load(tensor_desc, coord, barrier, result))


def _tma_store(tensor_desc, coord, src):
    run = running()
    run.point()
    _check_copy(tensor_desc, coord, src, "a TMA store")
    coord = tuple(int(i) for i in coord)
    run.record("store", tensor_desc.nbytes, tensor=tensor_desc.host.base, place=coord)
    run.current.stores.append(Store(tensor_desc, coord, src))
    run.record_write(tensor_desc.host.base)


def _store_wait(pendings):
    run = running()
    run.point()
    run.record("store wait")
    while len(run.current.stores) > int(pendings):
        run.current.stores.pop(0).land()


def _fence_async_shared(cluster=False):
    run = running()
    run.point()
    run.fence()


def _warpgroup_mma(
    a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    run = running()
    run.point()
    layout = acc.layout
    if type(layout).__name__ != "NVMMADistributedLayout" or layout.version[0] != 3:
        raise GluonError(
            f"warpgroup_mma: the accumulator's layout must be NVMMADistributedLayout with "
            f"version=[3, 0], it is {short(layout)}"
        )
    if math.prod(layout.warps_per_cta) != run.current.warps:
        raise GluonError(
            f"warpgroup_mma: the layout is for {math.prod(layout.warps_per_cta)} warps, "
            f"{run.current.name} has {run.current.warps}"
        )
    if not isinstance(b, Shared):
        raise GluonError("warpgroup_mma: b must lie in shared memory")
    if isinstance(a, Product):
        raise GluonError(f"warpgroup_mma: a: {a.describe()}; warpgroup_mma_wait gives its numbers")
    if isinstance(a, Tile):
        ok = type(a.layout).__name__ == "DotOperandLayout" and a.layout.operand_index == 0
        if not ok or a.layout.parent != layout:
            raise GluonError(
                "warpgroup_mma: a in registers must have a DotOperandLayout(operand_index=0, "
                f"parent=the accumulator's layout, k_width=2), it has {short(a.layout)}"
            )
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if len(a.shape) != 2 or len(b.shape) != 2 or b.shape[0] != k or list(acc.shape) != [m, n]:
        raise GluonError(f"warpgroup_mma: {a.shape} times {b.shape} onto {list(acc.shape)}")
    if a.dtype != b.dtype or a.dtype.primitive_bitwidth != 16:
        raise GluonError(
            f"warpgroup_mma: both operands in one half dtype, got {a.dtype}, {b.dtype}"
        )
    if m % 64 or n % 8 or k % 16 or layout.instr_shape[1] > n:
        raise GluonError(
            f"warpgroup_mma: M a multiple of 64, N of 8, K of 16, and an instruction no wider than "
            f"N: got M={m}, N={n}, K={k}, instr_shape={list(layout.instr_shape)}"
        )
    if isinstance(acc, Product) and acc.waited:
        raise GluonError("warpgroup_mma: go on with what warpgroup_mma_wait returned")
    product = Product(a, b, acc, bool(use_acc), run.current.line)
    run.record("product", 2 * m * n * k, registers=isinstance(a, Tile))
    run.current.products.append(product)
    run.has_registers_for_products()
    if run.mood == "early":
        product.compute()
    if is_async:
        return product
    return _warpgroup_mma_wait(0, [product])


def _warpgroup_mma_wait(num_outstanding=0, deps=None):
    run = running()
    run.point()
    if deps is None:
        raise GluonError("warpgroup_mma_wait: deps must name what is waited for")
    run.record("product wait")
    products = run.current.products
    while len(products) > int(num_outstanding):
        products.pop(0).compute()
    results = []
    for dep in deps:
        if isinstance(dep, Product):
            if dep in products:
                raise GluonError(
                    f"warpgroup_mma_wait({num_outstanding}): {dep.describe()} still, among the "
                    f"{len(products)} youngest"
                )
            dep.waited = True
            if dep.result is None:
                dep.compute()
            dep = Tile(dep.result, dep.dtype, dep.layout)
        results.append(dep)
    return results[0] if len(results) == 1 else tuple(results)


def _warpgroup_mma_init(value):
    product = Product(None, None, value, True, 0)
    product.result = value.data
    return product


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    run = running()
    if len(worker_num_warps) != len(functions_and_args) - 1:
        raise GluonError("warp_specialize: a number of warps for each function but the first")
    left, others = 255, [255] * len(worker_num_warps)
    if worker_num_regs is not None:
        warps = run.num_warps + sum(4 * math.ceil(w / 4) for w in worker_num_warps)
        taken = sum(
            32 * 4 * math.ceil(w / 4) * r
            for w, r in zip(worker_num_warps, worker_num_regs, strict=True)
        )
        left = (65_536 // (32 * warps) // 8 * 8 * 32 * warps - taken) // (32 * run.num_warps)
        if any(r % 8 or not 24 <= r <= 256 for r in worker_num_regs) or left < 24:
            raise GluonError(
                f"warp_specialize: registers are multiples of 8 from 24 to 256, and all fit in "
                f"65,536: got {worker_num_regs} for {list(worker_num_warps)} warps, which leaves "
                f"{left} a thread for the first function"
            )
        others = worker_num_regs
    warps, registers = [run.num_warps, *worker_num_warps], [min(left, 255), *others]
    return run.specialise(functions_and_args, warps, registers)


def _zeros(shape, dtype, layout=None):
    return _full(shape, 0, dtype, layout)


def _full(shape, value, dtype, layout=None):
    _power_of_two(shape, "gl.full")
    return Tile(np.full([int(n) for n in shape], value, numpy_type(dtype)), dtype, layout)


def _zeros_like(x, shape=None, dtype=None, layout=None):
    return _full_like(x, 0, shape, dtype, layout)


def _full_like(x, value, shape=None, dtype=None, layout=None):
    return _full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def _expand_dims(x, axis):
    colons = [slice(None)] * len(x.shape)
    return x[(*colons[:axis], None, *colons[axis:])]


def _power_of_two(shape, what):
    if any(int(n) < 1 or int(n) & (int(n) - 1) for n in shape):
        raise GluonError(f"{what}: sides of a tile are powers of two, got {list(map(int, shape))}")


def _arange(start, end, layout=None):
    _power_of_two([end - start], "gl.arange")
    return Tile(np.arange(start, end, dtype=np.int32), gluon_language().int32, layout)


def _convert_layout(value, layout, assert_trivial=False):
    if isinstance(value, InFlight):
        raise GluonError(
            f"convert_layout: {value.describe()}; warpgroup_mma_wait gives its numbers"
        )
    return Tile(value.data, value.dtype, layout)


def _reduction(function):
    def reduce(x, axis=None, *, keep_dims=False):
        if isinstance(x, InFlight):
            raise GluonError(f"a reduction: {x.describe()}; warpgroup_mma_wait gives its numbers")
        if axis is None or keep_dims:
            raise Unsupported("a reduction over one axis, which goes away, is what there is")
        gl = gluon_language()
        with np.errstate(invalid="ignore"):
            data = function(x.data, axis=axis, dtype=x.data.dtype)
        return Tile(data, x.dtype, gl.SliceLayout(axis, x.layout))

    return reduce


def _largest(data, axis, dtype):
    return np.max(data, axis=axis)  # NaN stays, where a card drops it: a NaN here is a bug shown


def _elementwise(function):
    def apply(x):
        if isinstance(x, InFlight):
            raise GluonError(f"arithmetic: {x.describe()}; warpgroup_mma_wait gives its numbers")
        with np.errstate(all="ignore"):
            if not isinstance(x, Tile):
                return float(function(np.float32(x)))
            if function is np.exp2 and x.data.ndim == 2:
                running().record("exp2", x.data.size)
            return Tile(function(x.data).astype(x.data.dtype), x.dtype, x.layout)

    return apply


def _two(function, scalar):
    def apply(x, y):
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            result = scalar(x, y)
            bits = max(getattr(x, "bits", 32), getattr(y, "bits", 32))
            return Int(result, bits) if isinstance(result, int) else result
        layout, dtype = pair(x, y, "gl.maximum or gl.minimum")
        with np.errstate(invalid="ignore"):
            return Tile(function(data_of(x), data_of(y)).astype(numpy_type(dtype)), dtype, layout)

    return apply


def _where(condition, x, y):
    if not isinstance(condition, Tile):
        raise GluonError("gl.where: the condition is a tile; for one value use `if`")
    layout, dtype = condition.layout, None
    for value in (x, y):
        if isinstance(value, InFlight):
            raise GluonError(f"gl.where: {value.describe()}; warpgroup_mma_wait gives its numbers")
        if isinstance(value, Tile):
            layout, dtype = pair(condition, value, "gl.where")[0], value.dtype
    dtype = dtype or gluon_language().float32
    if condition.data.ndim > 1:
        running().record("where", condition.data.size)
    return Tile(
        np.where(condition.data, data_of(x), data_of(y)).astype(numpy_type(dtype)), dtype, layout
    )


def _load(pointer, mask=None, other=None):
    run = running()
    run.point()
    flat, places, active = pointer.places(mask)
    dtype = triton_dtype(flat.dtype)
    poison = np.nan if dtype.is_floating() else np.iinfo(np.int32).max
    data = np.full(active.shape, poison if other is None else other, numpy_type(dtype))
    found = flat[torch.from_numpy(places.astype(np.int64))]
    data[active] = (found.float() if found.is_floating_point() else found).numpy()
    if isinstance(pointer.offset, Tile):
        return Tile(data, dtype, pointer.offset.layout)
    return float(data) if dtype.is_floating() else Int(int(data), dtype.primitive_bitwidth)


def _store(pointer, value, mask=None):
    run = running()
    run.point()
    if not isinstance(pointer.offset, Tile):
        raise Unsupported("a store at a single pointer: give it a tile of pointers")
    if isinstance(value, Tile) and value.layout != pointer.offset.layout:
        raise GluonError(
            f"gl.store: pointers and values have different layouts, "
            f"{short(pointer.offset.layout)} and {short(value.layout)}"
        )
    flat, places, active = pointer.places(mask)
    data = np.broadcast_to(data_of(value), active.shape)[active]
    flat[torch.from_numpy(places.astype(np.int64))] = torch.from_numpy(data.copy()).to(flat.dtype)
    run.record_write(flat)


def _split(x):
    if not isinstance(x, Tile) or x.shape[-1] != 2:
        raise GluonError("gl.split: takes a tile whose last side is 2, and gives its two halves")
    layout = Derived("split", x.layout, tuple(x.shape[:-1]))
    return Tile(x.data[..., 0], x.dtype, layout), Tile(x.data[..., 1], x.dtype, layout)


def _join(a, b):
    layout, dtype = pair(a, b, "gl.join")
    return Tile(np.stack([a.data, b.data], -1), dtype, Derived("join", layout, (*a.shape, 2)))


_PACK = re.compile(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$([12]), \$([12]);")
_TAKE = re.compile(r"mov\.b32 \{\$([01]), \$([01])\}, \$2;")
_TIMES = re.compile(
    r"\{ \.reg \.pred (\w+); setp\.neu\.f32 \1, \$2, 0f3F800000; "
    r"mov\.f32 \$0, \$1; @\1 mul\.f32 \$0, \$1, \$2; \}"
)


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    """The instructions of the labs: two halves into a word, out of it; x times f unless f is 1."""
    layout = pair(args[0], args[-1], "gl.inline_asm_elementwise")[0]
    text = " ".join(asm.split())
    if (packs := _PACK.fullmatch(text)) and len(args) == 2:
        half = torch.bfloat16 if packs[1] == "bf16" else torch.float16
        upper, lower = (half_bits(args[int(packs[i]) - 1].data, half) for i in (2, 3))
        return Tile((upper << 16) | lower, dtype, layout)
    if (takes := _TAKE.fullmatch(text)) and len(args) == 1:
        halves = {takes[1]: args[0].data & 0xFFFF, takes[2]: (args[0].data >> 16) & 0xFFFF}
        return tuple(Tile(halves[i], kind, layout) for i, kind in zip("01", dtype, strict=True))
    if _TIMES.fullmatch(text) and len(args) == 2:
        x, factor = (arg.data for arg in args)
        running().record("times", np.count_nonzero(np.broadcast_to(factor, x.shape) != 1))
        return Tile(np.where(factor == 1, x, x * factor).astype(np.float32), dtype, layout)
    raise Unsupported(f"the emulator does not know this assembler: {text}")


def _static_assert(condition, message=""):
    if not condition:
        raise AssertionError(message)


def _cdiv(a, b):
    return (a + b - 1) // b


def _program_id(axis):
    return Int(running().pid[axis])


def _num_programs(axis):
    return Int(running().grid[axis])


GL = {
    "allocate_shared_memory": _allocate_shared_memory,
    "warp_specialize": _warp_specialize,
    "program_id": _program_id,
    "num_programs": _num_programs,
    "num_warps": lambda: running().num_warps,
    "zeros": _zeros,
    "full": _full,
    "zeros_like": _zeros_like,
    "full_like": _full_like,
    "expand_dims": _expand_dims,
    "arange": _arange,
    "convert_layout": _convert_layout,
    "max": _reduction(_largest),
    "sum": _reduction(np.sum),
    "exp": _elementwise(np.exp),
    "exp2": _elementwise(np.exp2),
    "log": _elementwise(np.log),
    "log2": _elementwise(np.log2),
    "abs": _elementwise(np.abs),
    "maximum": _two(np.maximum, max),
    "minimum": _two(np.minimum, min),
    "where": _where,
    "fma": lambda x, y, z: x * y + z,  # which is rounded once: see _combine
    "split": _split,
    "join": _join,
    "inline_asm_elementwise": _inline_asm,
    "to_tensor": lambda value: Int(value) if type(value) is int else value,
    "load": _load,
    "store": _store,
    "cdiv": _cdiv,
    "static_assert": _static_assert,
    "static_range": range,
    "constexpr": lambda value: value,
}
MBARRIER = {
    "init": _init,
    "expect": _expect,
    "arrive": _arrive,
    "wait": _wait,
    "invalidate": _invalidate,
}
TMA = {name: _tma_load for name in triton_private.TMA_LOAD}
TMA |= {name: _tma_store for name in triton_private.TMA_STORE} | {"store_wait": _store_wait}
HOPPER = {
    "fence_async_shared": _fence_async_shared,
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
    "warpgroup_mma_init": _warpgroup_mma_init,
}
