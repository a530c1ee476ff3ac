// Optional exercise, reference: the recurrence of one_query.py in C++.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// Attention of one query over S keys, `block` keys at a time.
//
//   q    (D)      the query
//   k    (S, D)   the keys, row after row
//   v    (S, D)   the values, row after row
//   out  (D)      receives softmax(k q / sqrt(D)) v
//   lse  (1)      receives the natural log of the sum of exponentials of the scaled scores
//
// Returns 0.
extern "C" int one_query(const float* q, const float* k, const float* v, int64_t S, int64_t D,
                         int64_t block, float* out, float* lse) {
    const double scale = 1.0 / std::sqrt(static_cast<double>(D));
    double m = -std::numeric_limits<double>::infinity();
    double l = 0.0;
    std::vector<double> a(D, 0.0);
    std::vector<double> s(std::min(block, S));
    for (int64_t j0 = 0; j0 < S; j0 += block) {
        const int64_t n = std::min(block, S - j0);  // the last block may be short
        double m_new = m;
        for (int64_t j = 0; j < n; ++j) {
            s[j] = 0.0;
            for (int64_t d = 0; d < D; ++d) s[j] += static_cast<double>(q[d]) * k[(j0 + j) * D + d];
            s[j] *= scale;
            m_new = std::max(m_new, s[j]);
        }
        const double alpha = std::exp(m - m_new);  // 0 for the first block
        l *= alpha;
        for (int64_t d = 0; d < D; ++d) a[d] *= alpha;
        for (int64_t j = 0; j < n; ++j) {
            const double p = std::exp(s[j] - m_new);
            l += p;
            for (int64_t d = 0; d < D; ++d) a[d] += p * v[(j0 + j) * D + d];
        }
        m = m_new;
    }
    for (int64_t d = 0; d < D; ++d) out[d] = static_cast<float>(a[d] / l);
    *lse = static_cast<float>(m + std::log(l));
    return 0;
}
