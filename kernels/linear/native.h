// y = x Wᵀ + b over a weight [N, K] in bfloat16 as a checkpoint has it. Sums are in float32, of each output in one order,
// whatever the number of rows and threads.
#pragma once
#include "../native.h"

// O outputs of R rows at once, as many as the registers hold; of those that are missing, the last one stands in. The
// weight is fetched before it is needed: ALONG bytes ahead in the order in which it lies, or 0: the next O outputs.
template <int O, int R, int ALONG>
static inline void dense_block(const uint16_t* w, const uint16_t* bias, int outputs, const uint16_t* x, int rows, int K, uint16_t* y,
                               int64_t stride) {
    constexpr int SUMS = (O * R + 15) / 16 * 16;
    floats sum[SUMS] = {};
    const uint16_t *weight[O], *row[R];
    for (int o = 0; o < O; o++) weight[o] = w + (int64_t)(o < outputs ? o : outputs - 1) * K;
    for (int r = 0; r < R; r++) row[r] = x + (int64_t)(r < rows ? r : rows - 1) * K;
    const char* ahead = (const char*)w + ALONG;
    for (int k = 0; k < K; k += 32) {
        __m512i some[O];
#pragma GCC unroll 16
        for (int o = 0; o < O; o++) {
            some[o] = _mm512_loadu_si512(weight[o] + k);
            _mm_prefetch(ALONG ? ahead : (const char*)(weight[o] + (int64_t)O * K + k), _MM_HINT_T0);
            ahead += 64;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const __m512i each = _mm512_loadu_si512(row[r] + k);
#pragma GCC unroll 16
            for (int o = 0; o < O; o++) sum[r * O + o] = dot2(sum[r * O + o], some[o], each);
        }
    }
    alignas(64) float whole[SUMS];
    for (int i = 0; i < SUMS; i += 16) *(floats*)(whole + i) = sums16(sum + i);
    for (int r = 0; r < R && r < rows; r++)
        for (int o = 0; o < O && o < outputs; o++) {
            const float b = bias ? from_bf16(bias[o]) : 0.f;
            y[r * stride + o] = to_bf16(whole[r * O + o] + b);
        }
}

template <int O, int R, int ALONG = 0>
static void dense_outputs(const uint16_t* weight, const uint16_t* bias, int K, int first, int stop, const uint16_t* x, int T, uint16_t* y,
                          int64_t stride) {
    for (int o = first; o < stop; o += O)
        for (int t = 0; t < T; t += R)
            dense_block<O, R, ALONG>(weight + (int64_t)o * K, bias ? bias + o : nullptr, stop - o, x + (int64_t)t * K, T - t, K,
                                     y + t * stride + o, stride);
}

// Outputs `first` to `stop` of all T rows. Memory is read fastest in one stream, an output after the other, as long as one
// output's chain of sums is short enough for the processor to begin the next meanwhile.
static void dense(const uint16_t* weight, const uint16_t* bias, int K, int first, int stop, const uint16_t* x, int T, uint16_t* y,
                  int64_t stride) {
    decltype(&dense_outputs<1, 1>) each;
    if (T == 1) each = K <= 2048 ? dense_outputs<1, 1, 4096> : dense_outputs<16, 1>;
    else if (T == 2) each = K <= 2048 ? dense_outputs<1, 2, 4096> : dense_outputs<8, 2>;
    else if (T <= 4) each = K <= 2048 ? dense_outputs<4, 4, 8192> : dense_outputs<4, 4>;
    else if (T > 5 && T <= 8 && K <= 1024) each = dense_outputs<3, 8, 8192>;
    else each = (T + 3) / 4 > (T + 4) / 5 ? dense_outputs<5, 5> : dense_outputs<6, 4>;
    each(weight, bias, K, first, stop, x, T, y, stride);
}
