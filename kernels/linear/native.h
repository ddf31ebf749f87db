// y = x Wᵀ + b over a weight [N, K] in bfloat16 as a checkpoint has it. Sums are in float32, of each output in one order,
// whatever the number of rows and threads.
//
// Few rows are read as they lie and summed in the lanes of a vector. For the many rows of a prompt a piece of the weight is
// transposed first, so that lanes are outputs: sums have another order there, again one for any number of rows.
#pragma once
#include "../native.h"

static const int WIDE = 12;    // of many rows, those that are taken at once
static const int CHUNK = 256;  // columns of the piece

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
            if (ALONG && O == 1) _mm_prefetch(ahead, _MM_HINT_NTA);  // read once: what else is cached may stay
            else _mm_prefetch(ALONG ? ahead : (const char*)(weight[o] + (int64_t)O * K + k), _MM_HINT_T0);
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
    if (T == 1) each = K <= 2048 ? dense_outputs<1, 1, 4096> : dense_outputs<8, 1>;
    else if (T == 2) each = K <= 2048 ? dense_outputs<1, 2, 4096> : dense_outputs<8, 2>;
    else if (T <= 4) each = K <= 2048 ? dense_outputs<4, 4, 8192> : dense_outputs<4, 4>;
    else if (T > 5 && T <= 8 && K <= 1024) each = dense_outputs<3, 8, 8192>;
    else each = (T + 3) / 4 > (T + 4) / 5 ? dense_outputs<5, 5> : dense_outputs<6, 4>;
    each(weight, bias, K, first, stop, x, T, y, stride);
}

// Sixteen pairs of neighbouring columns of sixteen rows: pair j of all of them to `to` + j · 32.
static inline void transposed(const uint16_t* const row[16], int k, uint32_t* to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(row[i] + k);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 q + j] has of rows 4q … 4q+3 the pairs j, 4 + j, 8 + j, 12 + j
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), q = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i r = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88), s = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + j * 32, _mm512_shuffle_i32x4(p, r, 0x88));
        _mm512_storeu_si512(to + (4 + j) * 32, _mm512_shuffle_i32x4(q, s, 0x88));
        _mm512_storeu_si512(to + (8 + j) * 32, _mm512_shuffle_i32x4(p, r, 0xdd));
        _mm512_storeu_si512(to + (12 + j) * 32, _mm512_shuffle_i32x4(q, s, 0xdd));
    }
}

// R rows by a piece of n columns and 32 outputs, onto sums [R, 32], or from 0.
template <int R>
static void wide_block(const uint32_t* piece, int n, const uint16_t* x, int K, float* sums, bool first) {
    floats sum[2 * R];
#pragma GCC unroll 32
    for (int j = 0; j < 2 * R; j++) sum[j] = first ? (floats){} : *(floats*)(sums + 16 * j);
    const uint16_t* row[R];
    for (int r = 0; r < R; r++) row[r] = x + (int64_t)r * K;
    for (int k = 0; k < n; k += 2) {
        const __m512i left = _mm512_loadu_si512(piece + k * 16), right = _mm512_loadu_si512(piece + k * 16 + 16);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, row[r] + k, 4);
            const __m512i each = _mm512_set1_epi32(pair);
            sum[2 * r] = dot2(sum[2 * r], left, each);
            sum[2 * r + 1] = dot2(sum[2 * r + 1], right, each);
        }
    }
#pragma GCC unroll 32
    for (int j = 0; j < 2 * R; j++) *(floats*)(sums + 16 * j) = sum[j];
}

// 32 outputs of T rows. `sums`: room for [T, 32]; `then`: the weight that is multiplied next.
static void dense_many(const uint16_t* weight, const uint16_t* bias, int K, const uint16_t* then, const uint16_t* x, int T, uint16_t* y,
                       int64_t stride, float* sums) {
    alignas(64) uint32_t piece[CHUNK / 2 * 32];
    static constexpr decltype(&wide_block<1>) of[WIDE] = {wide_block<1>, wide_block<2>, wide_block<3>,  wide_block<4>,
                                                          wide_block<5>, wide_block<6>, wide_block<7>,  wide_block<8>,
                                                          wide_block<9>, wide_block<10>, wide_block<11>, wide_block<12>};
    const int passes = (T + WIDE - 1) / WIDE, lines = 32 * CHUNK / 32;
    for (int k = 0; k < K; k += CHUNK) {
        const int n = K - k < CHUNK ? K - k : CHUNK;
        for (int half = 0; half < 32; half += 16) {
            const uint16_t* row[16];
            for (int i = 0; i < 16; i++) row[i] = weight + (int64_t)(half + i) * K + k;
            for (int j = 0; j < n; j += 32) transposed(row, j, piece + j * 16 + half);
        }
        const uint16_t* next = k + CHUNK < K ? weight + k + CHUNK : then;
        for (int p = 0; p < passes; p++) {
            const int t = share(T, p, passes), rows = share(T, p + 1, passes) - t;
            for (int line = share(lines, p, passes), end = share(lines, p + 1, passes); line < end; line++)
                _mm_prefetch((const char*)(next + (int64_t)(line / (CHUNK / 32)) * K + line % (CHUNK / 32) * 32), _MM_HINT_T1);
            of[rows - 1](piece, n, x + (int64_t)t * K + k, K, sums + t * 32, k == 0);
        }
    }
    for (int i = 0; i < 32; i += 16) {
        const floats added = bias ? from_bf16(bias + i) : (floats){};
        for (int t = 0; t < T; t++) to_bf16(*(floats*)(sums + t * 32 + i) + added, y + t * stride + i);
    }
}
