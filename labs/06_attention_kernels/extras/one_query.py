"""The FlashAttention recurrence for one query, in plain NumPy: a reading aid for steps 1 and 2.

Nothing is batched and nothing is tiled over queries, so each line is one line of the derivation in
section 3 of the handout.
"""

from __future__ import annotations

import math

import numpy as np


def one_query(q, k, v, block=16):
    """Attention of one query over all keys, `block` keys at a time.

    Args:
        q: (D,) the query.
        k: (S, D) the keys.
        v: (S, D) the values.
        block: keys looked at together, any number from 1 up.

    Returns:
        out: (D,) softmax(k q / sqrt(D)) v.
        lse: scalar, natural log of the sum of exponentials of the scaled scores.
    """
    S, D = k.shape
    m = -math.inf  # largest score so far
    l = 0.0  # sum of exp(score - m) so far
    a = np.zeros(D)  # (D,) sum of exp(score - m) * value so far
    for j in range(0, S, block):
        s = k[j : j + block] @ q / math.sqrt(D)  # (block,) scores; the last block may be short
        m_new = max(m, s.max())
        alpha = np.exp(m - m_new)  # takes the old sums from base m to base m_new; 0 at first
        p = np.exp(s - m_new)  # (block,) every exponent is <= 0: nothing overflows
        l = l * alpha + p.sum()
        a = a * alpha + p @ v[j : j + block]  # (D,)
        m = m_new
    return a / l, m + np.log(l)
