// Attention of a few rows over the keys of their sequence, in float32. A row sees the committed keys and those staged that
// it descends from, in that order, which is the order of their positions: its sums do not depend on where keys are staged,
// nor on what stands beside it.
#pragma once
#include "../native.h"

static const int SPLIT = 256;  // keys that one task takes

struct Part {  // the rows of one sequence
    int32_t first, stop;      // of the forward
    int32_t prefix, staged;   // keys of it; the rows are the last ones staged
    int64_t block;            // where its keys begin, in elements from those of the pool
    const uint8_t* sees;      // [staged, staged]
};

struct Sight {
    int32_t window, sink;  // window < 0: none
};

// A row's result over one split: the weights' sum, their greatest exponent, and the values weighed.
struct Partial {
    float *sum, *most, *values;  // values: [head_dim]
};

struct Query {  // a head of a row: over the first n keys of a split
    const uint16_t* q;
    int32_t n, position;
    Partial out;
};

static const int QUERIES = 8;  // that are handed over together at most, all of one head of keys

// Some queries over one split, whose keys are from number `begin` on, in slots of that number or in `slots`. Values are
// read once for as many queries as the registers hold; a query that sees a key no more weighs it by 0.
template <int D>
static void attend_split(const Query* queries, int count, const uint16_t* k, const uint16_t* v, const int32_t* slots, int begin,
                         Sight sight, float scale) {
    constexpr int AT_ONCE = 256 / D < QUERIES ? 256 / D : QUERIES;
    alignas(64) float scores[AT_ONCE][SPLIT];
    for (; count > 0; queries += AT_ONCE, count -= AT_ONCE) {
        const int Q = count < AT_ONCE ? count : AT_ONCE;
        int longest = 0;
        for (int q = 0; q < Q; q++) longest = queries[q].n > longest ? queries[q].n : longest;
        for (int q = 0; q < AT_ONCE; q++) {
            if (q >= Q) {
                memset(scores[q], 0, 4 * (size_t)longest);
                continue;
            }
            const Query& one = queries[q];
            __m512i query[D / 32];
            for (int i = 0; i < D / 32; i++) query[i] = _mm512_loadu_si512(one.q + 32 * i);
            floats most = all(-INFINITY);
            const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            for (int at = 0; at < longest; at += 16) {
                floats sum[16];
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) {
                    const int key = at + j < longest ? at + j : longest - 1;
                    const uint16_t* of = k + (int64_t)(slots ? slots[key] : begin + key) * D;
                    sum[j] = (floats){};
                    for (int i = 0; i < D / 32; i++) sum[j] = dot2(sum[j], _mm512_loadu_si512(of + 32 * i), query[i]);
                }
                const ints number = lane + (begin + at);
                ints seen = number < begin + one.n;
                if (sight.window >= 0) seen &= (number > one.position - sight.window) | (number < sight.sink);
                const __m512 score = (__m512)(sums16(sum) * all(scale));
                const __m512 kept = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), _mm512_movepi32_mask((__m512i)seen), score);
                _mm512_store_ps(scores[q] + at, kept);
                most = (floats)_mm512_max_ps((__m512)most, kept);
            }
            const float top = highest(most);
            floats weight = {};
            for (int at = 0; at < longest; at += 16) {
                const floats p = top > -INFINITY ? exponential(*(floats*)(scores[q] + at) - all(top)) : (floats){};
                *(floats*)(scores[q] + at) = p;
                weight += p;
            }
            *one.out.sum = added(weight);
            *one.out.most = top;
        }
        floats sum[AT_ONCE][D / 16] = {};
        for (int j = 0; j < longest; j++) {
            const uint16_t* of = v + (int64_t)(slots ? slots[j] : begin + j) * D;
            floats p[AT_ONCE];
#pragma GCC unroll 8
            for (int q = 0; q < AT_ONCE; q++) p[q] = all(scores[q][j]);
#pragma GCC unroll 16
            for (int i = 0; i < D / 16; i++) {
                const floats value = from_bf16(of + 16 * i);
#pragma GCC unroll 8
                for (int q = 0; q < AT_ONCE; q++) sum[q][i] = p[q] * value + sum[q][i];
            }
        }
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < D / 16; i++) *(floats*)(queries[q].out.values + 16 * i) = sum[q][i];
    }
}

static void attend(int D, const Query* queries, int count, const uint16_t* k, const uint16_t* v, const int32_t* slots, int begin,
                   Sight sight, float scale) {
    switch (D) {
        case 32: return attend_split<32>(queries, count, k, v, slots, begin, sight, scale);
        case 64: return attend_split<64>(queries, count, k, v, slots, begin, sight, scale);
        case 96: return attend_split<96>(queries, count, k, v, slots, begin, sight, scale);
        case 128: return attend_split<128>(queries, count, k, v, slots, begin, sight, scale);
        case 256: return attend_split<256>(queries, count, k, v, slots, begin, sight, scale);
    }
}
