// y = x̂ Wᵀ + b over codes of 4 or 8 bits in groups, x̂ being x rounded to 8 bits in blocks of 32 columns. Sums of a block
// are of integers; those of blocks and groups are in float32 and in one order, whatever the number of rows and threads.
#pragma once
#include "../native.h"

static const int BLOCK = 32;  // columns of x with one scale
static const int AHEAD = 2048;  // bytes that are fetched before they are needed
static const int ROWS = 8;    // of x that are taken at once: what the registers hold

struct Weight {
    const uint8_t* data;  // of 16 outputs after the other, and of each group: scales, zeros or shifts, codes
    int N, K, group;
    int64_t tile;  // bytes of 16 outputs
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

template <int BITS, bool SHIFTED, int R>
static void tile(const Weight& w, int n, const Rounded& x, int t, const uint16_t* bias, uint16_t* y, int stride) {
    const uint8_t* at = w.data + n * w.tile;
    const int blocks = w.K / BLOCK, groups = w.K / w.group;
    const int8_t* values = x.values + (int64_t)t * w.K;
    const float *scales = x.scales + (int64_t)t * blocks, *sums = x.sums + (int64_t)t * groups;
    floats total[R] = {};
    for (int g = 0, block = 0; g < groups; g++) {
        const floats scale = from_half((const uint16_t*)at);
        const floats shift = SHIFTED ? from_half((const uint16_t*)(at + 32)) : -scale * from_bytes(at + 32);
        at += SHIFTED ? 64 : 48;
        floats part[R] = {};
        for (int end = block + w.group / BLOCK; block < end; block++) {
            ints sum[R] = {};
            const int8_t* four = values + block * BLOCK;
#pragma GCC unroll 8
            for (int k = 0; k < BLOCK; k += BITS == 4 ? 8 : 4) {
                const bytes codes = *(const bytes*)at;
                _mm_prefetch((const char*)at + AHEAD, _MM_HINT_T0);
                at += 64;
                if (BITS == 4) {
                    const bytes low = codes & 15, high = codes >> 4;
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        sum[r] = dot4(sum[r], low, four + (int64_t)r * w.K + k);
                        sum[r] = dot4(sum[r], high, four + (int64_t)r * w.K + k + 4);
                    }
                } else {
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sum[r] = dot4(sum[r], codes, four + (int64_t)r * w.K + k);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                part[r] = __builtin_convertvector(sum[r], floats) * scales[(int64_t)r * blocks + block] + part[r];
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            total[r] = part[r] * scale + total[r];
            total[r] = shift * sums[(int64_t)r * groups + g] + total[r];
        }
    }
    const int first = n * 16, left = w.N - first;
    uint16_t whole[16] = {};
    if (bias) memcpy(whole, bias + first, 2 * (left < 16 ? left : 16));
    const floats added = from_bf16(whole);
    for (int r = 0; r < R; r++) {
        uint16_t* out = y + (int64_t)(t + r) * stride + first;
        to_bf16(total[r] + added, whole);
        memcpy(out, whole, 2 * (left < 16 ? left : 16));
    }
}

template <int BITS, bool SHIFTED, int R = ROWS>
static void rows(const Weight& w, int n, const Rounded& x, int t, int T, const uint16_t* bias, uint16_t* y, int stride) {
    for (; T - t >= R; t += R) tile<BITS, SHIFTED, R>(w, n, x, t, bias, y, stride);
    if constexpr (R > 1)
        if (t < T) rows<BITS, SHIFTED, R - 1>(w, n, x, t, T, bias, y, stride);
}

