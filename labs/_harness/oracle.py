"""Inputs, float64 references and error budgets: what is right, and how close is close enough.

A result passes when its largest error against float64 is at most twice that of plain PyTorch
computed in float32 and rounded to the output's dtype, plus what a right solution may add by
ordering its sums otherwise and by rounding once more: 4 units in the last place of the output,
times the largest sum of absolute terms in the float64 formula, and the same in the precision that
the scores are computed in, times the largest score's own sum of absolute terms.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch

from labs._harness import runtime

TF32_EPS = 2.0**-10  # spacing of the 10 mantissa bits that tensor cores keep of a float32 operand


class Mismatch(AssertionError):
    """A result that is not what float64 says; the message says where and how far off.

    `expected` and `got` are set where the values are what is wrong.
    """

    def __init__(self, message: str, expected: Expected | None = None, got=None):
        super().__init__(message)
        self.expected = expected
        self.got = got


def seed(number: int, name: str) -> None:
    """Seeds torch's generators from the run's seed and a test's name."""
    digest = hashlib.sha256(f"{number}:{name}".encode()).digest()
    value = int.from_bytes(digest[:7], "big")
    if runtime.setup().device == "cpu":  # torch.manual_seed also keeps it for each other device,
        torch.default_generator.manual_seed(value)  # with a stack trace: 10 ms in a fresh process
    else:
        torch.manual_seed(value)


def eps(dtype: torch.dtype) -> float:
    """Distance from 1 to the next number of a floating-point dtype."""
    return torch.finfo(dtype).eps


def tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the nearest number with 10 mantissa bits, as tensor cores read it."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@dataclass
class Expected:
    """A float64 result and how far from it a right solution may be.

    Attributes:
        name: what to call it in messages.
        value: float64.
        budget: largest absolute error allowed.
        dtype: the dtype that the result must have.
        axes: a letter for each dimension, for messages ("BHTD").
        tiles: axis letter -> rows of a tile along it, for messages.
        causal: whether a causal diagonal could explain errors.
    """

    name: str
    value: torch.Tensor
    budget: float
    dtype: torch.dtype
    axes: str = ""
    tiles: dict[str, int] = field(default_factory=dict)
    causal: bool = False

    def check(self, got: torch.Tensor) -> None:
        """Raises Mismatch unless `got` has this shape and dtype and lies within the budget."""
        if type(got) is not torch.Tensor:
            raise Mismatch(f"{self.name}: want a torch.Tensor, got {type(got).__name__}")
        if tuple(got.shape) != tuple(self.value.shape):
            raise Mismatch(
                f"{self.name}: want shape {tuple(self.value.shape)}, got {tuple(got.shape)}"
            )
        if got.dtype != self.dtype:
            raise Mismatch(f"{self.name}: want dtype {self.dtype}, got {got.dtype}")
        if got.device != self.value.device:
            raise Mismatch(f"{self.name}: want it on {self.value.device}, got {got.device}")
        if not math.isfinite(self.budget):
            raise RuntimeError(f"{self.name}: the test's own budget is {self.budget}")
        error = (got.detach().double() - self.value).abs()
        same = (got.detach().double() == self.value) | (got.isnan() & self.value.isnan())
        error = torch.where(same, 0.0, error)  # equal infinities, and NaN where NaN is right
        wrong = ~(error <= self.budget)  # NaN counts as wrong
        if wrong.any():
            text = "\n".join(self._describe(got.detach(), error, wrong))
            raise Mismatch(text, self, got)

    def agree(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two results are the same within the budget, NaN and infinities included."""
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= self.budget)
        return bool(same.all())

    def _describe(self, got, error, wrong) -> list[str]:
        nan = got.isnan() & ~self.value.isnan()
        count, total = int(wrong.sum()), wrong.numel()
        lines = [
            f"{self.name} {tuple(got.shape)} {str(got.dtype).removeprefix('torch.')}: "
            f"{count} of {total} values wrong, {int(nan.sum()) or 'none'} of them NaN"
        ]
        ranked = torch.where(error.isnan(), torch.inf, error)
        flat = int(ranked.argmax())
        worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape))
        index = ", ".join(map(str, worst))
        lines.append(
            f"  worst at [{index}]: got {float(got[worst]):.6g}, want "
            f"{float(self.value[worst]):.6g}; error {float(error[worst]):.2g}, "
            f"budget {self.budget:.2g}"
        )
        lines += [f"  {line}" for line in self._pattern(got, wrong)]
        return lines

    def _pattern(self, got, wrong) -> list[str]:
        """Which heads, rows and columns are wrong, or what all of them have in common."""
        if wrong.dim() == 0:
            return []
        lines = []
        for axis, letter in enumerate(self.axes[: wrong.dim()]):
            size = wrong.shape[axis]
            other = [a for a in range(wrong.dim()) if a != axis]
            bad = wrong.any(dim=other) if other else wrong
            places = bad.nonzero().flatten().tolist()
            if size == 1 or len(places) == size:
                continue
            first, last = places[0], places[-1]
            where = f"{first}" if first == last else f"{first} to {last}"
            note = ""
            if len(places) == last - first + 1:
                note = self._tile_note(letter, size, first, last)
            else:
                where = f"{len(places)} of {size}, from {where}"
            lines.append(f"wrong along {_AXIS_NAMES.get(letter, letter)}: {where}{note}")
        if got.isnan().all():
            lines.append("all NaN: never stored, -inf - (-inf), or a masked load without `other`?")
        elif bool(wrong.all()):
            lines += self._ratio(got)
        return lines

    def _ratio(self, got) -> list[str]:
        """One line where every value is the right one times the same number."""
        ratios = (got.double() / self.value)[self.value.abs() > 1e-3 * self.value.abs().max()]
        ratio = float(ratios.median()) if ratios.numel() else math.nan
        if not math.isfinite(ratio) or not bool(((ratios - ratio).abs() < 0.01 * abs(ratio)).all()):
            return []
        if abs(ratio - 1) < 0.005:  # what is wrong are the small values, which have no ratio
            return []
        known = {math.log2(math.e): "log2(e): base 2?", math.log(2): "log(2): base 2?"}
        if self.axes.endswith("D"):
            root = math.sqrt(self.value.shape[-1])
            known |= {root: "sqrt(D)", 1 / root: "1/sqrt(D)", -1.0: "the sign"}
        name = next((f", {what}" for x, what in known.items() if abs(ratio / x - 1) < 0.005), "")
        return [f"every value is {ratio:.4g} times the right one{name}"]

    def _tile_note(self, letter, size, first, last) -> str:
        """What rows `first` to `last`, and only they, have to do with the tiles."""
        tile = self.tiles.get(letter)
        if not tile or size <= tile:
            return ""
        start_of_last = (size - 1) // tile * tile
        if size % tile and first >= start_of_last:
            return f" (only in the last, ragged tile of {tile})"
        if size % tile and (first, last) == (0, start_of_last - 1):
            return f" (all but the last, ragged tile of {tile})"
        if letter == "T" and last == size - 1 and first == self.tiles.get("S") and self.causal:
            return f" (just the rows that see more than the first tile of {first} keys)"
        if (first, last) == (tile, size - 1):
            return f" (all but the first tile of {tile})"
        return ""


def check_all(expected: tuple[Expected, ...], got, function: str) -> None:
    """Checks a tuple of results; the failure also says which of the others are right.

    Args:
        expected: in the order that the function returns them.
        got: what it returned.
        function: its name, for messages.
    """
    names = ", ".join(e.name for e in expected)
    if not isinstance(got, (tuple, list)) or len(got) != len(expected):
        what = f"{len(got)} values" if isinstance(got, (tuple, list)) else type(got).__name__
        raise Mismatch(f"{function} must return ({names}): got {what}")
    problems = {}
    for e, result in zip(expected, got, strict=True):
        try:
            e.check(result)
        except Mismatch as mismatch:
            problems[e.name] = mismatch
    if problems:
        first = next(iter(problems.values()))
        verdicts = ", ".join(
            f"{e.name} {'wrong' if e.name in problems else 'right'}" for e in expected
        )
        raise Mismatch(f"{first}\n  of all results: {verdicts}", first.expected, first.got)


_AXIS_NAMES = {
    "B": "batch",
    "H": "heads",
    "T": "query rows",
    "S": "key rows",
    "D": "head dim",
    "R": "rows",
    "C": "columns",
}


def softmax_stats(row: torch.Tensor, blocks: int) -> tuple[Expected, Expected]:
    """Maximum and sum of exponentials of one row.

    Args:
        row: (N,) floating point.
        blocks: how many blocks it arrives in; each may rescale and round the sum once.

    Returns:
        Expected m and l, 0-dim, in the dtype of the row.
    """
    x = row.double()
    m = x.max() if x.numel() else x.new_full((), -math.inf)
    l = x.new_zeros(()) if m == -math.inf else torch.exp(x - m).sum()
    # Each block rounds l once or twice; a running log-sum-exp also rounds m + log l.
    rounding = 2 * (blocks + 2) + (4 * abs(float(m)) if math.isfinite(m) else 0.0)
    budget = rounding * eps(row.dtype) * max(1.0, float(l))
    return Expected("m", m, 0.0, row.dtype), Expected("l", l, budget, row.dtype)


def softmax(x: torch.Tensor) -> Expected:
    """Softmax over the last axis of x (R, C), in the dtype of x."""
    want = x.double().softmax(dim=-1)
    plain = torch.promote_types(x.dtype, torch.float32)
    base = x.to(plain).softmax(dim=-1).to(x.dtype)
    error = (base.double() - want).abs().nan_to_num(0.0).max()
    terms = want.nan_to_num(0.0).max()
    return Expected("softmax", want, float(2 * error + 4 * eps(x.dtype) * terms), x.dtype, "RC")


def matmul(a, b, kernel=False, tiles=None) -> Expected:
    """Product of two matrices, accumulated in float32 at least, rounded once.

    Args:
        a: (M, K) floating point.
        b: (K, N), dtype and device of a.
        kernel: whether a Triton kernel computes it, which may use TF32 for float32 on a GPU.
        tiles: (block_m, block_n), for messages.

    Returns:
        Expected c (M, N) in the dtype of a.
    """
    want = a.double() @ b.double()
    plain, operand_eps, rounded = _precision(a, kernel)
    base = (rounded(a.to(plain)) @ rounded(b.to(plain))).to(a.dtype)
    # Where the result is not finite there is nothing to allow: it must be the same.
    error = torch.where(want.isfinite(), (base.double() - want).abs(), 0.0).max()
    largest = torch.where(want.isfinite(), want.abs(), 0.0).max()
    finite = (torch.where(x.isfinite(), x.double().abs(), 0.0) for x in (a, b))
    terms = float(torch.matmul(*finite).max())
    # A tensor core may cut off, not round, the running sum: once for each 16 terms.
    sums = 4 * operand_eps + a.shape[1] / 16 * eps(plain)
    budget = 2 * error + eps(a.dtype) * largest + sums * terms
    tiles = dict(zip("MN", tiles, strict=True)) if tiles else {}
    return Expected("c", want, float(budget), a.dtype, "MN", tiles)


@dataclass(frozen=True)
class _Problem:
    """Scores' scale, and which key each query sees: (T, S), or (B, 1, T, S); None for all."""

    scale: float
    visible: torch.Tensor | None

    def forward(self, q, k, v, dtype, rounded=lambda x: x):
        """(out, lse, p) by the plain formula in `dtype`; `rounded` acts on operands of products."""
        q, k, v = (rounded(t.to(dtype)) for t in (q, _for_heads(k, q), _for_heads(v, q)))
        s = q @ k.transpose(-2, -1) * self.scale
        if self.visible is not None:
            s = s.masked_fill(~self.visible, -math.inf)
        lse = s.logsumexp(dim=-1)
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # a row that sees no key: p = 0, out = 0
        p = torch.exp(s - finite[..., None])
        return rounded(p) @ v, lse, p

    def gradients(self, q, k, v, dout, dtype, rounded=lambda x: x):
        """(dq, dk, dv) by the plain formulas in `dtype`."""
        _, _, p = self.forward(q, k, v, dtype, rounded)
        kv_heads = k.shape[1]
        q, k, v, dout = (
            rounded(t.to(dtype)) for t in (q, _for_heads(k, q), _for_heads(v, q), dout)
        )
        dv = rounded(p).transpose(-2, -1) @ dout
        dp = dout @ v.transpose(-2, -1)
        ds = rounded(p * (dp - (p * dp).sum(dim=-1, keepdim=True)))
        dk = ds.transpose(-2, -1) @ q * self.scale
        return ds @ k * self.scale, _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)

    def gradient_terms(self, q, k, v, dout) -> tuple[float, float, float]:
        """Largest sum of absolute terms in the formulas of dq, dk and dv."""
        _, _, p = self.forward(q, k, v, torch.float64)
        kv_heads = k.shape[1]
        q, k, v, dout = (t.double().abs() for t in (q, _for_heads(k, q), _for_heads(v, q), dout))
        dp = dout @ v.transpose(-2, -1)
        ds = p * (dp + (dout * (p @ v)).sum(dim=-1, keepdim=True))
        return (
            float((ds @ k).max()) * abs(self.scale),
            float(_sum_groups(ds.transpose(-2, -1) @ q, kv_heads).max()) * abs(self.scale),
            float(_sum_groups(p.transpose(-2, -1) @ dout, kv_heads).max()),
        )

    def score_terms(self, q, k) -> float:
        """Largest sum of absolute terms of one visible score."""
        s = q.double().abs() @ _for_heads(k, q).double().abs().transpose(-2, -1) * abs(self.scale)
        if self.visible is not None:
            s = s.masked_fill(~self.visible, 0.0)
        return float(s.max())


def _problem(q, k, causal, visible, scale) -> _Problem:
    if causal:
        if visible is not None:
            raise ValueError("give either causal or visible, not both")
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return _Problem(1 / math.sqrt(q.shape[-1]) if scale is None else scale, visible)


def _for_heads(kv, q):
    """k or v (B, H_kv, S, D) with each head repeated for its group of query heads."""
    group = q.shape[1] // kv.shape[1]
    return kv if group == 1 else kv.repeat_interleave(group, dim=1)


def _sum_groups(grad, kv_heads):
    B, H, S, D = grad.shape
    return grad.view(B, kv_heads, H // kv_heads, S, D).sum(dim=2)


def _precision(q, kernel: bool):
    """(dtype of plain PyTorch, eps of the scores, rounding of product operands)."""
    if q.dtype == torch.float64:
        return torch.float64, eps(torch.float64), lambda x: x
    if kernel and q.dtype == torch.float32 and runtime.setup().device == "cuda":
        return torch.float32, TF32_EPS, tf32
    return torch.float32, eps(torch.float32), lambda x: x


def attention(
    q, k, v, causal=False, kernel=False, tiles=None, *, visible=None, scale=None
) -> tuple[Expected, Expected]:
    """Attention's output and log-sum-exp.

    Args:
        q: (B, H, T, D) floating point.
        k, v: (B, H_kv, S, D), H a multiple of H_kv; v may have another head dim.
        causal: query i sees keys 0 to i only.
        kernel: whether a Triton kernel computes it, which may use TF32 for float32 on a GPU.
        tiles: (block_q, block_k), for messages.
        visible: bool (T, S) or (B, 1, T, S): which keys each query sees, in place of causal. A row
            that sees none has out 0 and lse -inf.
        scale: of the scores; None means 1 / sqrt(D).

    Returns:
        Expected out (B, H, T, D) in the dtype of q, and lse (B, H, T) in float32 (float64 for
        float64 inputs).
    """
    problem = _problem(q, k, causal, visible, scale)
    want, lse, p = problem.forward(q, k, v, torch.float64)
    plain, score_eps, rounded = _precision(q, kernel)
    base, base_lse, _ = problem.forward(q, k, v, plain, rounded)
    error = (base.to(q.dtype).double() - want).abs().max()
    terms = float((p @ _for_heads(v, q).double().abs()).max())
    scores = problem.score_terms(q, k)
    budget = 2 * error + 4 * (eps(q.dtype) + score_eps * (1 + scores)) * terms
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    seen = lse != -math.inf
    error = torch.where(seen, (base_lse.double() - lse).abs(), 0.0).max()
    largest = float(torch.where(seen, lse, 0.0).abs().max())
    lse_budget = 2 * error + 4 * (eps(lse_dtype) * (1 + largest) + score_eps * scores)
    tiles = dict(zip("TS", tiles, strict=True)) if tiles else {}
    return (
        Expected("out", want, float(budget), q.dtype, "BHTD", tiles, causal),
        Expected("lse", lse, float(lse_budget), lse_dtype, "BHT", tiles, causal),
    )


def attention_gradients(
    q, k, v, dout, causal=False, kernel=False, tiles=None, *, visible=None, scale=None
) -> tuple[Expected, Expected, Expected]:
    """Gradients of attention with respect to q, k and v.

    Args:
        q, k, v, causal, kernel, tiles, visible, scale: as in `attention`.
        dout: (B, H, T, D), gradient of the loss with respect to the output.

    Returns:
        Expected dq, dk, dv in the shapes and dtype of q, k, v.
    """
    problem = _problem(q, k, causal, visible, scale)
    plain, score_eps, rounded = _precision(q, kernel)
    want = problem.gradients(q, k, v, dout, torch.float64)
    base = problem.gradients(q, k, v, dout, plain, rounded)
    terms = problem.gradient_terms(q, k, v, dout)
    scores = problem.score_terms(q, k)
    tiles = dict(zip("TS", tiles, strict=True)) if tiles else {}
    result = []
    for name, axes, w, b, t in zip(
        ("dq", "dk", "dv"), ("BHTD", "BHSD", "BHSD"), want, base, terms, strict=True
    ):
        error = (b.to(q.dtype).double() - w).abs().max()
        budget = 2 * error + 4 * (eps(q.dtype) + score_eps * (1 + scores)) * t
        result.append(Expected(name, w, float(budget), q.dtype, axes, tiles, causal))
    return tuple(result)


# ---------------------------------------------------------------- inputs


def inputs(*shape, dtype=torch.float32, device="cpu", layout="contiguous") -> torch.Tensor:
    """Standard normal numbers, drawn in float64 so that every dtype sees the same ones.

    Args:
        layout: "contiguous"; "transposed", the last two of (B, H, T, D) axes H and T swapped in
            memory as a (B, T, H, D) tensor's view has them; or "strided", rows with gaps.
    """
    x = torch.randn(*shape, dtype=torch.float64).to(device=device, dtype=dtype)
    return _laid_out(x, layout)


def qkv(
    B,
    H,
    T,
    D,
    S=None,
    dtype=torch.float32,
    device="cpu",
    kind="normal",
    layout="contiguous",
    kv_heads=None,
):
    """q (B, H, T, D), k and v (B, kv_heads or H, S, D) that make a chosen kind of scores.

    Args:
        kind: "normal"; "large", scores of some hundreds; "growing" or "shrinking", scores that rise
            or fall along the keys, so that the running maximum changes at each tile or never;
            "equal", all scores of a row the same; "low", all scores near -50,000.
    """
    S = T if S is None else S
    heads = H if kv_heads is None else kv_heads
    q, k = inputs(B, H, T, D), inputs(B, heads, S, D)
    v = inputs(B, heads, S, D, dtype=dtype, device=device, layout=layout)
    if kind == "large":
        q, k = q * 12, k * 12
    elif kind in ("growing", "shrinking"):
        ramp = torch.linspace(-1, 1, S)[:, None] * (1 if kind == "growing" else -1)
        q, k = q * 0.3, k * 0.3
        q[..., :1] = 6.0 * math.sqrt(D)
        k[..., :1] = ramp * 5.0
    elif kind == "low":
        q[..., :1], k[..., :1] = 256.0, -192.0 * math.sqrt(D)
        k[..., :1] = k[..., :1].round()
    elif kind == "equal":
        k = k[:, :, :1].expand(B, heads, S, D).clone()
    elif kind != "normal":
        raise ValueError(f"unknown kind {kind!r}")
    q, k = (_laid_out(t.to(device=device, dtype=dtype), layout) for t in (q, k))
    return q, k, v


def _laid_out(x, layout):
    """The same numbers with other strides; gaps hold NaN."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]
