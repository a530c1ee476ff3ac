// Optional exercise: the recurrence of one_query.py in C++. Plain C++, no PyTorch headers.
// Test it with: pytest labs/06_attention_kernels/extras

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
// Keep m, l and the sums of out in double: that is what float32 is to float16 in a kernel.
// Returns 0. (-1 says "not written yet" to the test.)
extern "C" int one_query(const float* q, const float* k, const float* v, int64_t S, int64_t D,
                         int64_t block, float* out, float* lse) {
    // TODO (about 25 lines): one block of scores at a time, never all S of them
    return -1;
}
