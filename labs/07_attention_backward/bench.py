"""What `python -m labs bench 07` compares: the backward of attention, and its three kernels.

Formulas are those of the handout, for N = B * H heads and elements of e bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics

import torch

from labs._harness import oracle
from labs._harness.bench import Check, Provider, Sweep, fit, sdpa
from labs._harness.trace import Traced

LENGTHS = [512, 1024, 2048, 4096, 8192]
COUNTED_LENGTHS = [64, 128, 256, 512]
BACKENDS = {"SDPA FLASH": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}
TOKENS, WIDTH = 16_384, 2048  # B * T and H * D of a timed sweep, unless they are given
YOURS, PARTS = "yours (3 kernels)", ("yours: delta", "yours: dk, dv", "yours: dq")


def timed(ab, options, gpu) -> list[Sweep]:
    """What to time on a GPU: the backward through autograd, and each kernel by itself."""
    dtype = getattr(torch, options.dtype or "bfloat16")
    D, causal = options.head_dim, options.causal
    H = options.heads or max(1, WIDTH // D)

    def batch(T):
        wanted = options.batch or max(1, TOKENS // T)
        return fit(wanted, 16 * H * T * D * dtype.itemsize, gpu)

    def inputs(T):
        return _inputs(ab, batch(T), H, D, dtype, causal, gpu.device, T)

    def work(T, products=5):
        return flops(batch(T), H, T, D, causal, products)

    common = {"axis": "T", "sizes": options.lengths or LENGTHS, "inputs": inputs, "unit": "TFLOP/s"}
    backward = Sweep(
        name="backward",
        title=_title(H, D, dtype, causal),
        providers=[
            Provider(YOURS, _autograd(ab, causal), yours=True, kernel=True),
            *(_sdpa(name, causal) for name in BACKENDS),
        ],
        verify=functools.partial(gradient_error, causal=causal),
        work=work,
        **common,
    )
    parts = Sweep(
        name="kernels",
        title=f"{_title(H, D, dtype, causal)}: dk, dv (4 products) and dq (3), each as if it did 5",
        providers=_parts(ab, options, dtype),
        verify=functools.partial(gradient_error, causal=causal),
        work=work,
        tune=[],
        **common,
    )
    return [backward, parts, *(_tuning(ab, options, common, causal, work) if options.tune else [])]


def counted(ab, options) -> list[Sweep]:
    """What to count without a GPU: bytes that the kernels move, beside the handout's formulas."""
    dtype = getattr(torch, options.dtype or "float32")
    B, H, D, causal = options.batch or 1, options.heads or 1, options.head_dim, options.causal
    M, N, e = options.block_m, options.block_n, dtype.itemsize
    sizes = functools.partial(dict, heads=B * H, D=D, e=e, causal=causal)
    tiles = sizes(block_m=M, block_n=N)
    formulas = {
        PARTS[0]: functools.partial(delta_bytes, heads=B * H, D=D, e=e),
        PARTS[1]: functools.partial(dkdv_bytes, **tiles),
        PARTS[2]: functools.partial(dq_bytes, **tiles),
    }
    providers = [
        Provider(p.name, p.run, yours=True, kernel=True, moved=formulas[p.name], config=p.config)
        for p in _parts(ab, options, dtype)
    ]
    naive = Provider(
        "naive (PyTorch)",
        functools.partial(_naive, causal=causal),
        moved=functools.partial(naive_bytes, **sizes()),
    )
    return [
        Sweep(
            name="backward",
            title=f"{_title(H, D, dtype, causal)}, B={B}, tiles {M}x{N}",
            axis="T",
            sizes=options.lengths or COUNTED_LENGTHS,
            inputs=lambda T: _inputs(ab, B, H, D, dtype, causal, "cpu", T),
            providers=[naive, *providers],
            verify=functools.partial(gradient_error, causal=causal),
        )
    ]


def check(ab, options, gpu) -> list[Check]:
    """Speed against both backends at eight sizes, and whether two runs are bit-equal."""
    found, ratios = [], {64: [], 128: []}
    for D, causal, T in itertools.product((64, 128), (True, False), (2048, 8192)):
        x = _inputs(ab, TOKENS // T, WIDTH // D, D, torch.bfloat16, causal, gpu.device, T)
        codes = {"yours": _autograd(ab, causal)}
        codes |= {name: _sdpa(name, causal).run for name in BACKENDS}
        ms = gpu.medians({name: functools.partial(run, *x) for name, run in codes.items()})
        rate = flops(TOKENS // T, WIDTH // D, T, D, causal) / ms["yours"] / 1e9
        where = f"D={D} {'causal' if causal else 'full'} T={T} bfloat16"
        flash = ms["SDPA FLASH"] / ms["yours"]
        ratios[D].append(ms["SDPA cuDNN"] / ms["yours"])
        figure = f"{flash:.3f}x ({rate:.0f} TFLOP/s; {ratios[D][-1]:.3f}x cuDNN)"
        found.append(Check(f"speed against FLASH, {where}", figure, ">= 1.4x", flash >= 1.4))
    for D, wanted in ((64, 0.90), (128, 0.80)):
        mean = statistics.geometric_mean(ratios[D])
        what = f"geometric mean against cuDNN, D={D}"
        found.append(Check(what, f"{mean:.3f}x", f">= {wanted:.2f}x", mean >= wanted))
    error, budget = gradient_error(x, _autograd(ab, causal)(*x), causal)
    found.append(
        Check("relative error", f"{error:.2g}", f"<= {budget:.2g}", error <= budget),
    )
    a, b = (_gradients(ab, causal)(*x[:4]) for _ in "ab")
    same = all(map(torch.equal, a, b))
    found.append(Check("two runs bit-equal", "yes" if same else "no", "yes", same))
    return found


# ---------------------------------------------------------------- trace and X-ray
def traced(ab, options) -> list[Traced]:
    """What `python -m labs trace 07` can run: the given forward, and both walks of the backward."""
    T, D, causal = options.T, options.head_dim, options.causal
    M, N = options.block_m, options.block_n
    tile, heads = {"block_m": M, "block_n": N}, {"heads": 1, "D": D, "e": 4, "causal": causal}
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(1, 1, T, D, generator=generator)

    def forward(q, k, v):
        return ab.attention_forward(q, k, v, causal, **tile)

    def given(q, k, v):
        out, lse = (expected.value for expected in oracle.attention(q, k, v, causal))
        delta = (out * dout.double()).sum(dim=-1)
        return q, k, v, dout, lse.float(), delta.float(), causal

    def dkdv(q, k, v):
        return ab.attention_dkdv(*given(q, k, v), **tile)

    def dq(q, k, v):
        return (ab.attention_dq(*given(q, k, v), **tile),)

    def want(which):
        return lambda q, k, v: oracle.attention_gradients(
            q, k, v, dout, causal, kernel=True, tiles=(M, N)
        )[which]

    columns = sum(math.ceil((T - (j // M * M if causal else 0)) / M) for j in range(0, T, N))
    rows = sum(math.ceil((min(T, i + M) if causal else T) / N) for i in range(0, T, M))
    # The formulas of the counts, less what is stored.
    least2 = dkdv_bytes(T, **heads, **tile) - 2 * T * D * 4, columns * 8 * M * N * D
    least3 = dq_bytes(T, **heads, **tile) - T * D * 4, rows * 6 * M * N * D
    return [
        Traced(4, "attention_forward", forward, True),
        Traced(2, "attention_dkdv", dkdv, True, want=want(slice(1, 3)), least=least2),
        Traced(3, "attention_dq", dq, True, want=want(slice(0, 1)), least=least3),
    ]


def launches(
    ab,
    block_m=64,
    block_n=64,
    num_warps=4,
    num_stages=2,
    head_dim=64,
    dtype="float16",
    causal=True,
    registers=False,
) -> dict:
    """Launcher name -> a call that launches its kernel once, for the X-ray to compile."""
    q = torch.empty(1, 2, 2 * max(block_m, block_n), head_dim, dtype=getattr(torch, dtype))
    row = torch.empty(q.shape[:3], dtype=torch.float32)
    sizes = {"block_m": block_m, "block_n": block_n}
    sizes |= {"num_warps": num_warps, "num_stages": num_stages}
    held = sizes | {"registers": registers}
    return {
        "attention_forward": lambda: ab.attention_forward(q, q, q, causal, **sizes),
        "attention_delta": lambda: ab.attention_delta(q, q),
        "attention_dkdv": lambda: ab.attention_dkdv(q, q, q, q, row, row, causal, **held),
        "attention_dq": lambda: ab.attention_dq(q, q, q, q, row, row, causal, **held),
    }


# ---------------------------------------------------------------- work and traffic
def flops(B, H, T, D, causal, products=5) -> float:
    """FLOP of so many products of 2 B H T T D, half of them when causal. A backward counts 5."""
    return products * 2 * B * H * T * T * D / (2 if causal else 1)


def delta_bytes(T, heads, D, e) -> int:
    """out and dout once, delta once."""
    return heads * T * (2 * D * e + 4)


def dkdv_bytes(T, heads, D, e, causal, block_m, block_n) -> int:
    """k, v, dk, dv once; for each key tile q, dout, lse and delta of the rows that see it."""
    rows = sum(T - (j0 // block_m * block_m if causal else 0) for j0 in range(0, T, block_n))
    return heads * (4 * T * D * e + rows * (2 * D * e + 8))


def dq_bytes(T, heads, D, e, causal, block_m, block_n) -> int:
    """q, dout, dq, lse, delta once; for each query tile the k and v that it sees."""
    keys = 0
    for i0 in range(0, T, block_m):
        hi = min(T, i0 + block_m) if causal else T
        keys += min(T, math.ceil(hi / block_n) * block_n)
    return heads * (T * (3 * D * e + 8) + keys * 2 * D * e)


def naive_bytes(T, heads, D, e, causal) -> int:
    """See `_naive`: passes over T x T matrices, and the (T, D) operands of five products."""
    passes = 16 + (2 if causal else 0)
    mask = 4 * T * T if causal else 0
    return heads * (passes * T * T * e + 20 * T * D * e + 8 * T) + mask


def _naive(q, k, v, dout, out, lse, delta, causal):
    """The backward by its formulas, each line an operation that writes its matrix to memory."""
    scale = q.shape[-1] ** -0.5
    s = (q @ k.transpose(-2, -1)).mul_(scale)
    if causal:
        s.masked_fill_(torch.ones_like(s[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    p = s.sub_(lse[..., None]).exp_()
    dv = p.transpose(-2, -1) @ dout
    ds = (dout @ v.transpose(-2, -1)).sub_(delta[..., None]).mul_(p)
    return torch.stack([(ds @ k).mul_(scale), (ds.transpose(-2, -1) @ q).mul_(scale), dv])


# ---------------------------------------------------------------- providers
def _autograd(ab, causal):
    """run(q, k, v, dout, ...) -> the three gradients, by autograd, as a training step does it."""
    return _through_autograd(lambda q, k, v: ab.flash_attention(q, k, v, causal=causal))


def _gradients(ab, causal):
    run = _autograd(ab, causal)
    return lambda *x: [g.clone() for g in run(*x)]


def _through_autograd(attention):
    """The backward alone: the forward of each new input runs once, outside of what is timed."""
    kept = {}

    def run(q, k, v, dout, *_):
        if kept.get("q") is not q:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                kept.update(q=q, leaves=leaves, out=attention(*leaves))
        return Gradients(torch.autograd.grad(kept["out"], kept["leaves"], dout, retain_graph=True))

    return run


class Gradients(tuple):
    """dq, dk, dv."""


def _sdpa(name, causal) -> Provider:
    """SDPA's backward with one backend pinned for the forward, which decides the backward."""
    return Provider(name, _through_autograd(sdpa(name, BACKENDS[name], causal)))


def _parts(ab, options, dtype) -> list[Provider]:
    """The three kernels, each by itself: in the tiles given here, or those of `tiles` on a GPU."""
    causal, D = options.causal, options.head_dim
    given = {"block_m": options.block_m, "block_n": options.block_n, "num_warps": options.num_warps}
    if options.num_stages:
        given["num_stages"] = options.num_stages

    def sizes(kernel, device):
        if device.type == "cpu":
            return given
        return ab.tiles(D, causal, dtype, device)[kernel]

    def delta(q, k, v, dout, out, lse, delta):
        return ab.attention_delta(out, dout)

    def dkdv(q, k, v, dout, out, lse, delta):
        found = ab.attention_dkdv(q, k, v, dout, lse, delta, causal, **sizes("dkdv", q.device))
        return Gradients((None, *found))

    def dq(q, k, v, dout, out, lse, delta):
        found = ab.attention_dq(q, k, v, dout, lse, delta, causal, **sizes("dq", q.device))
        return Gradients((found, None, None))

    runs = zip(PARTS, (delta, dkdv, dq), strict=True)
    return [Provider(name, run, yours=True, kernel=True) for name, run in runs]


def _tuning(ab, options, common, causal, work) -> list[Sweep]:
    """A sweep for each of the two large kernels whose configurations are tried at each length."""
    tiles = [(32, 64), (64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (32, 128)]
    found = []
    for name, function in (("dkdv", ab.attention_dkdv), ("dq", ab.attention_dq)):

        def provider(m, n, w, s, function=function, name=name):
            def run(q, k, v, dout, out, lse, delta):
                sizes = {"block_m": m, "block_n": n, "num_warps": w, "num_stages": s}
                got = function(q, k, v, dout, lse, delta, causal, **sizes)
                return Gradients((None, *got) if name == "dkdv" else (got, None, None))

            return Provider(YOURS, run, yours=True, kernel=True, config=f"{m}x{n} w{w} s{s}")

        found.append(
            Sweep(
                name=name,
                title=f"{name}, tuned",
                providers=[provider(64, 64, 4, 2)],
                verify=functools.partial(gradient_error, causal=causal),
                work=work,
                tune=[
                    provider(m, n, w, s)
                    for (m, n), w, s in itertools.product(tiles, (4, 8), (2, 3))
                ],
                tuned=YOURS,
                **common,
            )
        )
    return found


# ---------------------------------------------------------------- inputs and oracle
def _inputs(ab, B, H, D, dtype, causal, device, T):
    """q, k, v, dout, and out, lse, delta of the float64 forward in their dtypes."""
    generator = torch.Generator(device).manual_seed(T)
    q, k, v, dout = (
        torch.randn(B, H, T, D, dtype=dtype, device=device, generator=generator) for _ in range(4)
    )
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=device)
    for b, h in itertools.product(range(B), range(H)):  # one head at a time, in tiles of rows
        for i0 in range(0, T, 1024):
            rows = slice(i0, min(T, i0 + 1024))
            s = _scores(q[b, h, rows].float(), k[b, h].float(), i0, causal)
            lse[b, h, rows] = s.logsumexp(dim=-1)
            out[b, h, rows] = (torch.exp(s - lse[b, h, rows, None]) @ v[b, h].float()).to(dtype)
    return q, k, v, dout, out, lse, (out.float() * dout.float()).sum(dim=-1)


def _scores(q, k, first, causal):
    """Scaled scores of some rows of one head against all its keys, -inf in the future."""
    s = q @ k.T / math.sqrt(q.shape[-1])
    if causal:
        rows = first + torch.arange(len(q), device=q.device)
        s = s.masked_fill(torch.arange(len(k), device=q.device)[None, :] > rows[:, None], -math.inf)
    return s


def gradient_error(inputs, got, causal) -> tuple[float, float]:
    """(largest relative error of a head's gradients, budget), against float64.

    The first head is compared, up to T = 8192. The error is |got - want| / |want| over the whole
    tensor of a head; the budget 8 ulp of the dtype (of TF32 at least, which a GPU may use for
    float32; of 16 bits on a CPU).
    """
    q, k, v, dout, _, _, delta = inputs
    budget = 8 * max(torch.finfo(q.dtype).eps, 2**-10 if q.is_cuda else 2**-16)
    if isinstance(got, torch.Tensor) and got.dim() == 3:  # delta by itself
        fits = got.shape == delta.shape
        return ((got - delta).norm() / delta.norm()).item() if fits else math.inf, budget
    want = _one_head(q, k, v, dout, causal)
    errors = []
    for g, w in zip(got, want, strict=True):
        if g is None:  # a kernel by itself makes some of the three
            continue
        if not isinstance(g, torch.Tensor) or g.shape != q.shape:
            return math.inf, budget
        errors.append(((g[0, 0].double() - w).norm() / w.norm()).item())
    return max(errors, default=math.inf), budget


@functools.lru_cache(maxsize=1)
def _one_head(q, k, v, dout, causal):
    """dq, dk, dv of the first head in float64, a tile of rows at a time."""
    q, k, v, dout = (x[0, 0].double() for x in (q, k, v, dout))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / math.sqrt(q.shape[-1])
    for i0 in range(0, len(q), 1024):
        rows = slice(i0, i0 + 1024)
        p = _scores(q[rows], k, i0, causal).softmax(dim=-1)
        dv += p.T @ dout[rows]
        dp = dout[rows] @ v.T
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
        dq[rows] = ds @ k * scale
        dk += ds.T @ q[rows] * scale
    return dq, dk, dv


def _title(H, D, dtype, causal) -> str:
    mask = "causal" if causal else "full"
    return f"Attention backward, H={H} D={D} {str(dtype)[6:]} {mask}"
