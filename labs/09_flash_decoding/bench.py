"""What `python -m labs bench 09` compares: one query a head against a long cache.

Formulas are those of the handout, in bytes, for elements of e bytes. Grouped: 4 query heads share a
key head.
"""

from __future__ import annotations

import functools
import math
import statistics

import torch
import torch.nn.functional as F

from labs._harness.bench import Check, Provider, Sweep, fit, sdpa
from labs._harness.trace import Traced

LENGTHS = [1024, 4096, 16384, 32768, 131072]
COUNTED_LENGTHS = [256, 1024, 4096]
GROUP, COUNTED_SPLITS, TRACED_SPLITS, PAGE = 4, 4, 2, 16
BACKENDS = {"SDPA FLASH": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}
YOURS, PAGED, UNSPLIT = "yours (Triton)", "yours (paged)", "yours (one chunk)"

# (B, H, H_kv, S, D), share of the copy's bandwidth wanted, speed against cuDNN wanted.
BARS = [
    ((1, 32, 32, 32768, 128), 0.93, 1.0),
    ((1, 32, 8, 131072, 128), 0.93, 1.0),
    ((16, 32, 8, 8192, 128), None, 0.97),
    ((1, 32, 8, 32768, 128), None, 1.0),
    ((1, 16, 16, 32768, 64), None, 1.0),
]
PAGED_BAR, UNSPLIT_BAR = 0.9, 10.0
CACHES, ROUNDS = 3, 4  # in one CUDA graph


def timed(fd, options, gpu) -> list[Sweep]:
    """What to time on a GPU: every provider against the length of the cache."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    H, D, lengths = options.heads or 32, options.head_dim, options.lengths or LENGTHS
    H_kv = max(1, H // GROUP)
    # The cache, its copy in pages, and what SDPA may make of it.
    B = fit(options.batch or 1, 6 * H_kv * max(lengths) * D * dtype.itemsize, gpu)
    decode = Sweep(
        name="decode",
        title=_title(B, H, H_kv, D, dtype),
        axis="S",
        sizes=lengths,
        inputs=functools.partial(_inputs, B, H, H_kv, D, dtype, gpu.device),
        providers=[*_yours(fd), *(sdpa(name, BACKENDS[name], causal=False) for name in BACKENDS)],
        verify=decode_error,
        unit="TB/s",
        work=lambda S: 2 * B * H_kv * S * D * dtype.itemsize,
        ceiling="copy",
    )
    return [decode]


def counted(fd, options) -> list[Sweep]:
    """What to count without a GPU: the same code, at sizes that the interpreter can run."""
    dtype = getattr(torch, options.dtype or "float32")
    B, H, D, e = options.batch or 1, options.heads or 8, options.head_dim, dtype.itemsize
    H_kv = max(1, H // GROUP)
    sizes = dict(B=B, H=H, H_kv=H_kv, D=D, e=e)
    unsplit, split = (
        Provider(
            name,
            functools.partial(_decode, fd, n),
            yours=True,
            kernel=True,
            moved=functools.partial(kernel_bytes, n=n, **sizes),
            peak=functools.partial(kernel_peak, n=n, **sizes),
            config=f"{n} chunks",
        )
        for name, n in ((UNSPLIT, 1), (YOURS, COUNTED_SPLITS))
    )
    decode = Sweep(
        name="decode",
        title=f"{_title(B, H, H_kv, D, dtype)}, {COUNTED_SPLITS} chunks",
        axis="S",
        sizes=options.lengths or COUNTED_LENGTHS,
        inputs=functools.partial(_inputs, B, H, H_kv, D, dtype, "cpu"),
        providers=[Provider("naive", _naive), unsplit, split],
        verify=decode_error,
    )
    return [decode]


def check(fd, options, gpu) -> list[Check]:
    """The bars of the handout: CUDA graphs, caches in turn so that none is left in L2."""
    copy, found = _copy_rate(gpu), []
    for (B, H, H_kv, S, D), of_copy, of_cudnn in BARS:
        inputs = [_inputs(B, H, H_kv, D, torch.bfloat16, gpu.device, S) for _ in range(CACHES)]
        shape = f"B={B} H={H} H_kv={H_kv} S={S} D={D}"
        cudnn = sdpa("SDPA cuDNN", BACKENDS["SDPA cuDNN"], causal=False)
        with cudnn.context():
            vendor = _graph_us(cudnn.run, inputs)
        us = _graph_us(lambda q, k, v, *pages: fd.flash_decode(q, k, v)[0], inputs)
        error, budget = decode_error(inputs[0], fd.flash_decode(*inputs[0][:3])[0])
        figure = f"{vendor / us:.3f}x ({us:.1f} us against {vendor:.1f})"
        ok = vendor >= of_cudnn * us and error <= budget
        found.append(Check(f"speed against cuDNN, {shape}", figure, f">= {of_cudnn}x", ok))
        if of_copy:
            rate = 2 * B * H_kv * S * D * 2 / us / 1e6
            figure = f"{rate / copy:.2f} ({rate:.2f} of {copy:.2f} TB/s)"
            found.append(
                Check("  share of a copy", figure, f">= {of_copy}", rate >= of_copy * copy)
            )
        if H_kv == 8:
            found += _check_paged(fd, inputs, us)
        if (B, H_kv, S) == (1, 8, 32768):
            slow = _graph_us(lambda q, k, v, *pages: fd.flash_decode(q, k, v, 1)[0], inputs)
            figure = f"{slow / us:.1f}x ({slow:.0f} us)"
            ok = slow >= UNSPLIT_BAR * us
            found.append(Check("  speed against one chunk", figure, f">= {UNSPLIT_BAR}x", ok))
        del inputs
    return found


def _copy_rate(gpu) -> float:
    x = torch.randn(1 << 28, device=gpu.device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / statistics.median(gpu.time(lambda: y.copy_(x))) / 1e9


def _check_paged(fd, inputs, us) -> list[Check]:
    found = []
    for page_size in (16, 64):
        paged = [(q, *_pages(k, v, page_size)) for q, k, v, *_ in inputs]
        paged_us = _graph_us(lambda *args: fd.paged_decode(*args, check_values=False)[0], paged)
        ok = us >= PAGED_BAR * paged_us
        figure = f"{us / paged_us:.3f}x ({paged_us:.1f} us)"
        found.append(Check(f"  pages of {page_size} against none", figure, f">= {PAGED_BAR}x", ok))
    return found


def _graph_us(run, inputs) -> float:
    """Median microseconds of a call in a CUDA graph that takes the inputs in turn."""
    torch.cuda.synchronize()  # the inputs were made on another stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for args in inputs:
            run(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for args in inputs:
                run(*args)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (ROUNDS * len(inputs)))
    return statistics.median(times[2:])


# ---------------------------------------------------------------- trace and X-ray
def traced(fd, options) -> list[Traced]:
    """What `python -m labs trace 09` can run: TRACED_SPLITS chunks, the whole decode first.

    There is one query a head, so the T queries of the trace become T query heads: block_m of them
    share a key head, and all key heads share one cache of T keys.
    """

    def heads(q, k, v):
        """q (1, H_kv * G, 1, D) in groups of block_m, padded; k, v (1, H_kv, T, D), not copied."""
        if options.causal:
            raise ValueError("the query is the newest token and sees every key: leave out --causal")
        H_kv = math.ceil(options.T / options.block_m)
        q = F.pad(q, (0, 0, 0, H_kv * options.block_m - options.T)).transpose(1, 2)
        return q, k.expand(1, H_kv, -1, -1), v.expand(1, H_kv, -1, -1)

    def queries(out, lse):
        """out (1, T, D) and lse of the real heads, as the trace compares them."""
        return out[:, : options.T].transpose(1, 2), lse[:, : options.T].transpose(1, 2)

    def decode(q, k, v):
        return queries(*fd.flash_decode(*heads(q, k, v), TRACED_SPLITS, block_n=options.block_n))

    def split(q, k, v):
        parts = fd.split_partials(*heads(q, k, v), TRACED_SPLITS, block_n=options.block_n)
        m, l, acc = fd.merge_accumulators(*parts)
        return queries((acc / l[..., None])[:, :, None], (m + torch.log(l))[:, :, None])

    def paged(q, k, v):
        q, k, v = heads(q, k, v)
        n = math.ceil(options.T / PAGE)
        order = torch.arange(n).flip(0)  # the first key lies in the last page
        pages = [
            F.pad(x[:, :1], (0, 0, 0, n * PAGE - options.T))
            .view(n, 1, PAGE, -1)
            .index_select(0, order)
            .expand(-1, k.shape[1], -1, -1)
            for x in (k, v)
        ]
        lens = torch.tensor([options.T], dtype=torch.int32)
        cache = *pages, order[None].int(), lens
        return queries(*fd.paged_decode(q, *cache, TRACED_SPLITS, block_n=options.block_n))

    return [
        Traced(4, "flash_decode", decode, True),
        Traced(3, "split_partials", split, True),
        Traced(5, "paged_decode", paged, True),
    ]


def launches(
    fd,
    block_n=64,
    num_warps=None,
    num_stages=None,
    head_dim=128,
    group=4,
    page=16,
    dtype="float16",
    overlap=False,
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile.

    num_warps and num_stages: None leaves each launcher its own. overlap: as on a card that may
    begin a kernel before the one in front of it has ended (handout section 5).
    """
    if overlap:
        fd.capability = lambda device: (9, 0)
    kind = getattr(torch, dtype)
    q = torch.empty(1, 2 * group, 1, head_dim, dtype=kind)
    kv = torch.empty(1, 2, 4 * block_n, head_dim, dtype=kind)
    pages = torch.empty(4 * block_n // page, 2, page, head_dim, dtype=kind)
    table = torch.zeros(1, len(pages), dtype=torch.int32)
    lens = torch.full((1,), 4 * block_n, dtype=torch.int32)
    m = torch.empty(3, 1, 2 * group)
    acc = torch.empty(3, 1, 2 * group, head_dim)
    config = dict(block_n=block_n)
    if num_warps:
        config["num_warps"] = num_warps
    if num_stages:
        config["num_stages"] = num_stages
    return {
        "split_partials": lambda: fd.split_partials(q, kv, kv, 3, **config),
        "merge_partials": lambda: fd.merge_partials(m, m, acc, kind),
        "paged_partials": lambda: fd.paged_partials(q, pages, pages, table, lens, 3, **config),
    }


# ---------------------------------------------------------------- traffic
def kernel_bytes(S, B, H, H_kv, D, e, n) -> int:
    """K and V once, q once a chunk, the partial results out and back in, out and lse."""
    partials = 4 * n * B * H * (D + 2)
    return e * (2 * B * H_kv * S * D + n * B * H * D) + 2 * partials + B * H * (e * D + 4)


def kernel_peak(S, B, H, H_kv, D, e, n) -> int:
    """The partial results, out and lse: nothing that grows with S."""
    return 4 * n * B * H * (D + 2) + B * H * (e * D + 4)


# ---------------------------------------------------------------- providers
def _decode(fd, n_splits, q, k, v, *pages):
    return fd.flash_decode(q, k, v, n_splits)[0]


def _yours(fd) -> list[Provider]:
    def paged(q, k, v, *pages):
        return fd.paged_decode(q, *pages, check_values=False)[0]

    return [
        Provider(YOURS, functools.partial(_decode, fd, None), yours=True, kernel=True),
        Provider(PAGED, paged, yours=True, kernel=True, config=f"pages of {PAGE}"),
        Provider(UNSPLIT, functools.partial(_decode, fd, 1), yours=True, kernel=True),
    ]


def _naive(q, k, v, *pages):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1) @ v


# ---------------------------------------------------------------- inputs and oracle
def _inputs(B, H, H_kv, D, dtype, device, S):
    """q, k, v, and the same cache in pages; random normal."""
    q = torch.randn(B, H, 1, D, dtype=dtype, device=device)
    k, v = (torch.randn(B, H_kv, S, D, dtype=dtype, device=device) for _ in range(2))
    return q, k, v, *_pages(k, v, PAGE)


def _pages(k, v, page_size):
    """k and v (B, H_kv, S, D), S a multiple of page_size, cut into pages in a mixed order."""
    B, H_kv, S, D = k.shape
    n = -(-S // page_size)
    order = torch.randperm(B * n, device=k.device)
    pages = []
    for x in (k, v):
        x = F.pad(x, (0, 0, 0, n * page_size - S))
        cache = torch.empty(B * n, H_kv, page_size, D, dtype=x.dtype, device=x.device)
        cut = x.view(B, H_kv, n, page_size, D).transpose(1, 2)
        cache[order] = cut.reshape(B * n, H_kv, page_size, D)
        pages.append(cache)
    lens = torch.full((B,), S, dtype=torch.int32, device=k.device)
    return *pages, order.view(B, n).int(), lens


def decode_error(inputs, out) -> tuple[float, float]:
    """(largest relative error of a head's output, budget), against float64, 4 heads of it."""
    q, k, v = inputs[:3]
    budget = 8 * max(torch.finfo(q.dtype).eps, 2**-10 if q.is_cuda else 2**-16)
    if not isinstance(out, torch.Tensor) or out.shape != q.shape:
        return math.inf, budget
    B, H, _, D = q.shape
    errors = []
    for row in {0, B * H // 3, B * H // 2, B * H - 1}:
        b, h = divmod(row, H)
        key = h // (H // k.shape[1])
        s = q[b, h].double() @ k[b, key].double().T / math.sqrt(D)
        want = s.softmax(dim=-1) @ v[b, key].double()
        errors.append(((out[b, h].double() - want).norm() / want.norm()).item())
    return max(errors), budget


def _title(B, H, H_kv, D, dtype) -> str:
    return f"Decoding, B={B} H={H} H_kv={H_kv} D={D} {str(dtype)[6:]}"
