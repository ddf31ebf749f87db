// y = x̂ Wᵀ + b over codes of 4 or 8 bits in groups, x̂ being x rounded to 8 bits in blocks of 32 columns. Sums of a block
// are of integers; those of blocks and groups are in float32 and in one order, whatever the number of rows and threads.
#include <stdlib.h>

#include "../native.h"

static const int BLOCK = 32;  // columns of x with one scale
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

static void round_row(const uint16_t* x, int8_t* values, float* scales, float* sums, int K, int group) {
    for (int g = 0; g < K / group; g++) {
        float whole = 0;
        for (int block = 0; block < group / BLOCK; block++, x += BLOCK, values += BLOCK) {
            floats a = from_bf16(x), b = from_bf16(x + 16);
            const ints size = (ints)a & 0x7fffffff, other = (ints)b & 0x7fffffff;  // in the order of what they are bits of
            const int32_t most = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)size, (__m512i)other));
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
static void tile(const Weight& w, int n, const Rounded& x, int t, const uint16_t* bias, uint16_t* y) {
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
        uint16_t* out = y + (int64_t)(t + r) * w.N + first;
        to_bf16(total[r] + added, whole);
        memcpy(out, whole, 2 * (left < 16 ? left : 16));
    }
}

template <int BITS, bool SHIFTED, int R = ROWS>
static void rows(const Weight& w, int n, const Rounded& x, int t, int T, const uint16_t* bias, uint16_t* y) {
    for (; T - t >= R; t += R) tile<BITS, SHIFTED, R>(w, n, x, t, bias, y);
    if constexpr (R > 1)
        if (t < T) rows<BITS, SHIFTED, R - 1>(w, n, x, t, T, bias, y);
}

extern "C" int matmul_codes(const uint16_t* x, const uint8_t* data, const uint16_t* bias, uint16_t* y, int T, int N, int K,
                            int group, int bits, int shifted, int threads) {
    const int blocks = K / BLOCK, groups = K / group, tiles = (N + 15) / 16;
    static thread_local char* room = nullptr;
    static thread_local size_t size = 0;
    const size_t floats_at = ((size_t)T * K + 63) / 64 * 64, needed = floats_at + 4 * (size_t)T * (blocks + groups);
    if (needed > size) {
        free(room);
        room = (char*)malloc(needed);
        size = room ? needed : 0;
        if (!room) return 1;
    }
    const Rounded r = {(int8_t*)room, (float*)(room + floats_at), (float*)(room + floats_at) + (size_t)T * blocks};
    const Weight w = {data, N, K, group, (int64_t)groups * ((shifted ? 64 : 48) + group * 2 * bits)};
    auto* each = bits == 4 ? (shifted ? rows<4, true> : rows<4, false>) : (shifted ? rows<8, true> : rows<8, false>);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++)
            round_row(x + (int64_t)t * K, r.values + (int64_t)t * K, r.scales + (int64_t)t * blocks,
                      r.sums + (int64_t)t * groups, K, group);
#pragma omp for schedule(static)
        for (int n = 0; n < tiles; n++) each(w, n, r, 0, T, bias, y);
    }
    return 0;
}
