"""What `python -m labs bench 05` compares: matrix products, square ones and a skinny one.

Formulas are those of the handout, in bytes, for elements of e bytes.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import replace

import torch

from labs._harness import interpreter
from labs._harness.bench import Check, Provider, Sweep

SIZES = [512, 1024, 2048, 4096, 8192]
SKINNY, SKINNY_SIDE = [64], 8192
COUNTED_SIZES = [64, 128, 256, 384]
PROGRAMS, WAVE_TILES = 30, 16  # a wave of the example card, one program a multiprocessor
BLOCK_K, GROUP = 32, 8
FIRST, GROUPED, TUNED = "yours (first kernel)", "yours (grouped)", "yours (tuned)"
TILED = "yours (tiled PyTorch)"
TORCH = Provider("torch.matmul", torch.matmul)

# Size of a square product in bfloat16 -> speed against torch.matmul wanted, on an H200.
BARS = {4096: 0.95, 8192: 0.90}


def timed(tm, options, gpu) -> list[Sweep]:
    """What to time on a GPU: each stage of the lab against torch.matmul."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    sizes, side, name = options.lengths or SIZES, SKINNY_SIDE, str(dtype)[6:]
    common = dict(
        verify=product_error,
        unit="TFLOP/s",
        tune=_configurations(tm, dtype, gpu) if options.tune else [],
        tuned=TUNED,
    )
    square = Sweep(
        name="square",
        title=f"Square matrix products, {name}",
        axis="N",
        sizes=sizes,
        inputs=functools.partial(_square, dtype, gpu.device),
        providers=[TORCH, *_kernels(tm, options, {(N, N, N) for N in sizes})],
        work=lambda N: 2 * N**3,
        **common,
    )
    skinny = Sweep(
        name="skinny",
        title=f"(M, {side}) times ({side}, {side}), {name}",
        axis="M",
        sizes=SKINNY,
        inputs=lambda M: _matrices(M, side, side, dtype, gpu.device),
        providers=[TORCH, *_kernels(tm, options, {(M, side, side) for M in SKINNY})],
        work=lambda M: 2 * M * side * side,
        **common,
    )
    return [square, skinny]


def counted(tm, options) -> list[Sweep]:
    """What to count without a GPU: the same code, at sizes that the interpreter can run."""
    dtype = getattr(torch, options.dtype or "float32")
    sizes, e = options.lengths or COUNTED_SIZES, dtype.itemsize
    tile = (options.block_m, options.block_n)
    formulas = {
        "moved": functools.partial(kernel_bytes, tile=tile, e=e),
        "peak": lambda N: e * N * N,
    }
    kernels = _kernels(tm, options, {(N, N, N) for N in sizes})[:-1]  # nothing is tuned here
    tiled = Provider(
        TILED,
        lambda a, b: tm.tiled_matmul(a, b, *tile, BLOCK_K),
        yours=True,
        # In half precision each tile is also converted; the formula leaves that out.
        moved=functools.partial(tiled_bytes, tile=tile, e=e) if e == 4 else None,
    )
    square = Sweep(
        name="square",
        title=f"Square matrix products, {str(dtype)[6:]}, tiles {tile[0]}x{tile[1]}x{BLOCK_K}",
        axis="N",
        sizes=sizes,
        inputs=functools.partial(_square, dtype, "cpu"),
        providers=[
            replace(TORCH, moved=lambda N: 3 * e * N * N),
            tiled,
            *(replace(p, **formulas) for p in kernels),
        ],
        verify=product_error,
    )
    return [square]


def check(tm, options, gpu) -> list[Check]:
    """The bars of the handout: tuned_matmul against torch.matmul, in turns, in bfloat16."""
    found = []
    for size, bar in BARS.items():
        a, b = _square(torch.bfloat16, gpu.device, size)
        error, budget = product_error((a, b), tm.tuned_matmul(a, b))  # tunes
        calls = {"yours": tm.tuned_matmul, "torch": torch.matmul}
        ms = gpu.medians({name: functools.partial(call, a, b) for name, call in calls.items()})
        yours, theirs = ms.values()
        rates = ", ".join(f"{2 * size**3 / ms / 1e9:.0f}" for ms in (yours, theirs))
        what = f"speed against torch.matmul, {size}x{size}x{size} bfloat16"
        figure = f"{theirs / yours:.3f}x ({rates} TFLOP/s)"
        found += [
            Check(what, figure, f">= {bar}x, the bar for an H200", theirs >= bar * yours),
            Check("relative error there", f"{error:.2g}", f"<= {budget:.2g}", error <= budget),
        ]
    return found


# ---------------------------------------------------------------- X-ray
GRID = {
    "block_m": (64, 128),
    "block_n": (64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (3, 4),
}


def launches(
    tm, block_m=128, block_n=64, block_k=64, group=1, num_warps=4, num_stages=3, dtype="float16"
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile.

    K is even for the tile in triton_matmul and tuned_matmul, and ragged in ragged_matmul.
    """
    kind = getattr(torch, dtype)
    tile = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    warps = {"num_warps": num_warps, "num_stages": num_stages}

    def inputs(K):
        return torch.empty(2 * block_m, K, dtype=kind), torch.empty(K, 2 * block_n, dtype=kind)

    def tuned():
        config = tm._config(block_m, block_n, block_k, num_warps, num_stages)
        return tm.tuned_matmul(*inputs(tm.DEEPEST), config)

    return {
        "triton_matmul": lambda: tm.triton_matmul(*inputs(2 * block_k), **tile, **warps),
        "ragged_matmul": lambda: tm.ragged_matmul(
            *inputs(2 * block_k + 16 // kind.itemsize * 2), **tile, group=group, **warps
        ),
        "tuned_matmul": tuned,
    }


# ---------------------------------------------------------------- traffic
def kernel_bytes(N, tile, e) -> int:
    """Each column of tiles of C reads A, each row of tiles B, padded to whole tiles; C once."""
    rows, cols = (math.ceil(N / block) for block in tile)
    return e * N * (cols * rows * tile[0] + rows * cols * tile[1] + N)


def tiled_bytes(N, tile, e) -> int:
    """The same tiles in PyTorch, where every operation writes its result to memory.

    A product reads two tiles and writes a third, and adding that up reads two and writes one; acc
    is made once a tile of C, and read and written once more into C.
    """
    block_m, block_n = tile
    moved = 0
    for i0 in range(0, N, block_m):
        m = min(block_m, N - i0)
        for j0 in range(0, N, block_n):
            n = min(block_n, N - j0)
            moved += N * (m + n) + (4 * math.ceil(N / BLOCK_K) + 3) * m * n
    return e * moved


class _Wave(interpreter.Observer):
    """Runs the first programs of a launch only; the different tiles of each tensor they load."""

    def __init__(self, programs):
        self.programs = programs
        self.tiles: dict[str, set[int]] = defaultdict(set)

    def program(self, launch):
        return launch.program[0] < self.programs

    def load(self, launch, address, mask, itemsize):
        first = int(address[mask].min())
        self.tiles[launch.tensor_at(first)].add(first)


def closing(tm, options, report, rows, folder) -> tuple[str, list]:
    """Counts, while the kernel runs, the tiles of a first wave, row by row and in bands."""
    if report["mode"] != "counted" or interpreter.unavailable():
        return "", []
    a, b = _matrices(WAVE_TILES * 16, WAVE_TILES * 16, 16, torch.float32, "cpu")
    lines = [
        f"Different tiles that the first {PROGRAMS} programs load in a step along K, C of "
        f"{WAVE_TILES} x {WAVE_TILES} tiles,",
        "counted while the kernel runs:",
    ]
    for order, group in {"row by row": 1, f"bands of {GROUP} rows": GROUP}.items():
        with interpreter.observe(wave := _Wave(PROGRAMS)):
            tm.ragged_matmul(a, b, 16, 16, 16, group)
        of_a, of_b = (len(wave.tiles[name]) for name in ("a_ptr", "b_ptr"))
        says = sum(tm.wave_tiles(WAVE_TILES, WAVE_TILES, group, PROGRAMS))
        line = f"  {order:<16} {of_a} of A, {of_b:>2} of B: {of_a + of_b}; wave_tiles: {says}"
        lines.append(line + ("" if says == of_a + of_b else "  (not what the kernel does)"))
    return "\n".join(lines), []


# ---------------------------------------------------------------- providers
def _kernels(tm, options, shapes) -> list[Provider]:
    """The lab's kernels; the first one only where its tile divides every (M, N, K)."""
    stages = options.num_stages or 3
    tile = (options.block_m, options.block_n, BLOCK_K)
    warps = {"num_warps": options.num_warps, "num_stages": stages}
    text = "x".join(map(str, tile)) + f" w{options.num_warps} s{stages}"

    def first(a, b):
        return tm.triton_matmul(a, b, *tile, **warps)

    def grouped(a, b):
        return tm.ragged_matmul(a, b, *tile, group=GROUP, **warps)

    found = [
        Provider(FIRST, first, yours=True, kernel=True, config=text),
        Provider(GROUPED, grouped, yours=True, kernel=True, config=f"{text} g{GROUP}"),
        Provider(TUNED, tm.tuned_matmul, yours=True, kernel=True),
    ]
    whole = all(size % block == 0 for s in shapes for size, block in zip(s, tile, strict=True))
    return found if whole else found[1:]


def _configurations(tm, dtype, gpu) -> list[Provider]:
    """Each configuration that fits, alone, so that none can hide behind another's output."""
    named_args = {"a_ptr": torch.empty(1, dtype=dtype, device=gpu.device)}
    found = []
    for config in tm.prune_for_card(tm.CONFIGS, named_args):
        m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        text = f"{m}x{n}x{k} w{config.num_warps} s{config.num_stages}"
        run = functools.partial(tm.tuned_matmul, config=config)
        found.append(Provider(TUNED, run, yours=True, kernel=True, config=text))
    return found


# ---------------------------------------------------------------- inputs and reference
def _matrices(M, N, K, dtype, device):
    """a (M, K) and b (K, N), random normal, the same for every run."""
    generator = torch.Generator(device).manual_seed(M)
    return tuple(
        torch.randn(*shape, dtype=dtype, device=device, generator=generator)
        for shape in ((M, K), (K, N))
    )


def _square(dtype, device, N):
    return _matrices(N, N, N, dtype, device)


def product_error(inputs, c) -> tuple[float, float]:
    """(largest relative error of a sampled row, budget), against float64.

    Up to 256 rows and 256 columns are compared, spread over all, with the first and the last. The
    budget is 8 ulp of the dtype (of TF32 at least, which a GPU may use for float32; of 16 bits on
    a CPU).
    """
    a, b = inputs
    M, N = a.shape[0], b.shape[1]
    budget = 8 * max(torch.finfo(a.dtype).eps, 2**-10 if a.is_cuda else 2**-16)
    if not isinstance(c, torch.Tensor) or tuple(c.shape) != (M, N):
        return math.inf, budget
    rows, cols = (torch.linspace(0, n - 1, min(n, 256)).long().to(a.device) for n in (M, N))
    want = a[rows].double() @ b[:, cols].double()
    got = c[rows][:, cols].double()
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item(), budget
