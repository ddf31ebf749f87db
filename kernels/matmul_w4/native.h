// y = x̂ Wᵀ + b over codes of 4 or 8 bits in groups, x̂ being x rounded to 8 bits in blocks of 32 columns. Sums of a block
// are of integers; those of blocks and groups are in float32 and in one order, whatever the number of rows and threads.
#pragma once
#include "../native.h"

static const int BLOCK = 32;  // columns of x with one scale
static const int AHEAD = 6144;  // bytes that are fetched before they are needed
static const int TILE = 32;   // outputs side by side, in two vectors
static const int ROWS = 8;    // of x that are taken at once

struct Weight {
    const uint8_t* data;  // of a tile after the other, and of each group: scales, zeros or shifts, codes
    int N, K, group;
    int64_t tile;  // bytes of one
};

struct Rounded {
    int8_t* values;   // [T, K]
    float* scales;    // [T, K / 32]
    float* sums;      // [T, K / group], of what the values stand for
};

static inline int32_t size_of(floats a, floats b) {  // the greatest of 32, as the bits of a float without its sign
    const ints size = (ints)a & 0x7fffffff, other = (ints)b & 0x7fffffff;  // in the order of what they are bits of
    return _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)size, (__m512i)other));
}

// Groups `first` to `stop` of row t of x [T, K]; `whole_row`: one scale for all of it, and it is one group.
static void round_groups(const uint16_t* x, const Rounded& to, int t, int K, int group, int first, int stop, bool whole_row) {
    int8_t* values = to.values + (int64_t)t * K + (int64_t)first * group;
    float *scales = to.scales + (int64_t)t * (K / BLOCK) + first * (group / BLOCK), *sums = to.sums + (int64_t)t * (K / group) + first;
    x += (int64_t)t * K + (int64_t)first * group;
    int32_t most_of_row = 0;
    if (whole_row)
        for (int k = 0; k < K; k += BLOCK) {
            const int32_t most = size_of(from_bf16(x + k), from_bf16(x + k + 16));
            most_of_row = most > most_of_row ? most : most_of_row;
        }
    for (int g = first; g < stop; g++) {
        float whole = 0;
        for (int block = 0; block < group / BLOCK; block++, x += BLOCK, values += BLOCK) {
            floats a = from_bf16(x), b = from_bf16(x + 16);
            const int32_t most = whole_row ? most_of_row : size_of(a, b);
            float greatest;
            memcpy(&greatest, &most, 4);
            const bool finite = most < 0x7f800000, some = finite && greatest > 1e-30f;
            const floats by = all(some ? 127.f / greatest : 0.f);
            const float scale = finite ? (some ? greatest / 127.f : 0.f) : __builtin_nanf("");
            // what is not finite becomes the least integer, and its scale is not a number
            const __m512i p = _mm512_cvtps_epi32((__m512)(a * by)), q = _mm512_cvtps_epi32((__m512)(b * by));
            _mm_storeu_si128((__m128i*)values, _mm512_cvtsepi32_epi8(p));
            _mm_storeu_si128((__m128i*)(values + 16), _mm512_cvtsepi32_epi8(q));
            const int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(p, q));
            *scales++ = scale;
            whole += scale * (float)total;
        }
        *sums++ = whole;
    }
}

// Tile n of R rows from t on. What is read of x serves two vectors of outputs, and the codes are read in one stream.
template <int BITS, bool SHIFTED, int R>
static void tile(const Weight& w, int n, const Rounded& x, int t, const uint16_t* bias, uint16_t* y, int stride) {
    const uint8_t* at = w.data + n * w.tile;
    const int blocks = w.K / BLOCK, groups = w.K / w.group;
    const int8_t* values = x.values + (int64_t)t * w.K;
    const float *scales = x.scales + (int64_t)t * blocks, *sums = x.sums + (int64_t)t * groups;
    floats total[2 * R] = {};
    for (int g = 0, block = 0; g < groups; g++) {
        const uint8_t* head = at;
        at += TILE * (SHIFTED ? 4 : 3);
        floats part[2 * R] = {};
        for (int end = block + w.group / BLOCK; block < end; block++) {
            ints sum[2 * R] = {};
            const int8_t* four = values + block * BLOCK;
#pragma GCC unroll 8
            for (int k = 0; k < BLOCK; k += BITS == 4 ? 8 : 4) {
                const bytes codes[2] = {*(const bytes*)at, *(const bytes*)(at + 64)};
                _mm_prefetch((const char*)at + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char*)at + AHEAD + 64, _MM_HINT_T0);
                at += 128;
#pragma GCC unroll 16
                for (int j = 0; j < 2 * R; j++)
                    sum[j] = dot4(sum[j], BITS == 4 ? codes[j % 2] & 15 : codes[j % 2], four + (int64_t)(j / 2) * w.K + k);
                if (BITS == 4)
#pragma GCC unroll 16
                    for (int j = 0; j < 2 * R; j++) sum[j] = dot4(sum[j], codes[j % 2] >> 4, four + (int64_t)(j / 2) * w.K + k + 4);
            }
#pragma GCC unroll 16
            for (int j = 0; j < 2 * R; j++)
                part[j] = __builtin_convertvector(sum[j], floats) * scales[(int64_t)(j / 2) * blocks + block] + part[j];
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const floats scale = from_half((const uint16_t*)head + 16 * i);
            const floats shift = SHIFTED ? from_half((const uint16_t*)(head + 2 * TILE) + 16 * i) : -scale * from_bytes(head + 2 * TILE + 16 * i);
#pragma GCC unroll 8
            for (int j = i; j < 2 * R; j += 2) {
                total[j] = part[j] * scale + total[j];
                total[j] = shift * sums[(int64_t)(j / 2) * groups + g] + total[j];
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        const int first = n * TILE + i * 16, left = w.N - first < 16 ? w.N - first : 16;
        if (left <= 0) break;
        uint16_t whole[16] = {};
        if (bias) memcpy(whole, bias + first, 2 * left);
        const floats added = from_bf16(whole);
        for (int r = 0; r < R; r++) {
            to_bf16(total[2 * r + i] + added, whole);
            memcpy(y + (int64_t)(t + r) * stride + first, whole, 2 * left);
        }
    }
}

// Tiles `first` to `end` of all T rows.
template <int BITS, bool SHIFTED>
static void tiles(const Weight& w, int first, int end, const Rounded& x, int T, const uint16_t* bias, uint16_t* y, int stride) {
    static constexpr decltype(&tile<BITS, SHIFTED, 1>) of[ROWS] = {tile<BITS, SHIFTED, 1>, tile<BITS, SHIFTED, 2>, tile<BITS, SHIFTED, 3>,
                                                                   tile<BITS, SHIFTED, 4>, tile<BITS, SHIFTED, 5>, tile<BITS, SHIFTED, 6>,
                                                                   tile<BITS, SHIFTED, 7>, tile<BITS, SHIFTED, 8>};
    const int passes = (T + ROWS - 1) / ROWS;
    for (int n = first; n < end; n++)
        for (int p = 0; p < passes; p++) {
            const int t = share(T, p, passes), rows = share(T, p + 1, passes) - t;
            of[rows - 1](w, n, x, t, bias, y, stride);
        }
}
