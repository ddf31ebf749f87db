// Attention of rows over the keys of their sequence, in float32. A row sees the committed keys and those staged that
// it descends from, in that order, which is the order of their positions: its sums do not depend on where keys are staged,
// nor on what stands beside it.
#pragma once
#include "../native.h"

static const int SPLIT = 128;   // keys that one task takes
static const int QUERIES = 8;   // that are handed over together at most, all of one head of keys

struct Sight {
    int32_t window, sink;  // window < 0: none
};

struct Pool {  // a layer's keys and values of all sequences, [Hkv, slots, D] each
    void *k, *v;
    uint16_t *k_scale, *v_scale;  // [Hkv, slots], where a key is code · scale
    int64_t slots;
    int32_t bits, kind;  // 16: bfloat16, 8: integers, 4: two codes a byte, 8 added; which `Place` tells where rows lie
};

// Where the keys of a sequence lie: key n in slot base + n; with a page, in that of its table; with a ring, the committed
// ones in base + n below the sink and in a ring behind it, the staged ones by their numbers behind `staging`.
struct Place {
    int64_t base, staging;
    const int32_t *table, *numbers;
    int32_t page, ring, sink;
};

static inline int64_t committed_slot(const Place& p, int n) {
    if (p.page) return (int64_t)p.table[n / p.page] * p.page + n % p.page;
    if (p.ring) return p.base + (n < p.sink ? n : p.sink + (n - p.sink) % p.ring);
    return p.base + n;
}

static inline int64_t staged_slot(const Place& p, int prefix, int j) {
    return p.ring ? p.staging + p.numbers[j] : committed_slot(p, prefix + j);
}

static inline bool straight(const Place& p) { return !p.page && !p.ring; }

// A row's result over one split: the weights' sum, their greatest exponent, and the values weighed.
struct Partial {
    float *sum, *most, *values;  // values: [head_dim]
};

struct Query {  // a head of a row: over the first n keys of a split
    const uint16_t* q;
    int32_t n, position;
    Partial out;
};

static inline __m512i pairs_of(floats low, floats high) {  // exact for what bfloat16 holds
    const __m512i index = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
                                           17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16((__m512i)low, index, (__m512i)high);
}

// Elements `at` to at + 31 of a pool as bfloat16, codes without their scale.
template <int BITS>
static inline __m512i load32(const void* pool, int64_t at) {
    if (BITS == 16) return _mm512_loadu_si512((const uint16_t*)pool + at);
    if (BITS == 8) {
        const int8_t* from = (const int8_t*)pool + at;
        return pairs_of((floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))),
                        (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + 16)))));
    }
    // −8 … 7 by their number
    const __m512i values = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000,
                                            0x3f80, 0, (short)0xbf80, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0a0,
                                            (short)0xc0c0, (short)0xc0e0, (short)0xc100);
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)((const uint8_t*)pool + at / 2)));
    const __m512i high = _mm512_slli_epi32(_mm512_and_si512(both, _mm512_set1_epi32(0xf0)), 12);
    return _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_and_si512(both, _mm512_set1_epi32(15)), high), values);
}

// A row of a head into a slot, quantised as `attention/kept.py` says.
static inline void keep(const uint16_t* x, int D, int bits, void* pool, uint16_t* scales, int64_t slot) {
    if (bits == 16) {
        memcpy((uint16_t*)pool + slot * D, x, 2 * D);
        return;
    }
    const float largest = bits == 8 ? 127.f : 7.f;
    floats most = {};
    for (int i = 0; i < D; i += 16) most = (floats)_mm512_max_ps((__m512)most, _mm512_abs_ps((__m512)from_bf16(x + i)));
    const float wanted = highest(most) / largest;
    scales[slot] = _cvtss_sh(wanted < 65504.f ? wanted : 65504.f, 0);
    const float by = _cvtsh_ss(scales[slot]);
    for (int i = 0; i < D; i += 16) {
        const __m512 nearest = _mm512_roundscale_ps(_mm512_div_ps((__m512)from_bf16(x + i), _mm512_set1_ps(by == 0 ? 1 : by)), 8);
        const __m512 codes = _mm512_min_ps(_mm512_max_ps(nearest, _mm512_set1_ps(-largest)), _mm512_set1_ps(largest));
        int8_t each[16];
        _mm_storeu_si128((__m128i*)each, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(codes)));
        if (bits == 8) memcpy((int8_t*)pool + slot * D + i, each, 16);
        else
            for (int j = 0; j < 16; j += 2)
                ((uint8_t*)pool)[(slot * D + i + j) / 2] = (uint8_t)(each[j] + 8) | (uint8_t)(each[j + 1] + 8) << 4;
    }
}

// `spread` of attention/kept.py: sums of pairs, of blocks of the largest power of two that divides D.
static inline void spread(uint16_t* x, int D) {
    alignas(64) float wide[256], next[256];
    const int size = D & -D;
    for (int i = 0; i < D; i++) wide[i] = from_bf16(x[i]);
    for (int step = 1; step < size; step *= 2) {
        for (int i = 0; i < D; i++) next[i] = i & step ? wide[i - step] - wide[i] : wide[i] + wide[i + step];
        memcpy(wide, next, 4 * D);
    }
    const float by = 1.f / sqrtf((float)size);
    for (int i = 0; i < D; i++) x[i] = to_bf16(wide[i] * by);
}

// Keys of a head, from its first slot on.
struct Keys {
    const void *k, *v;
    const uint16_t *k_scale, *v_scale;
};

static inline floats scales_of(const uint16_t* scales, const int32_t* slots, int64_t first, int n) {  // of n keys, n <= 16
    alignas(32) uint16_t each[16] = {};
    if (slots)
        for (int j = 0; j < n; j++) each[j] = scales[slots[j]];
    else memcpy(each, scales + first, 2 * n);
    return from_half(each);
}

// Some queries over one split, whose keys lie in `slots`, or from slot `first` on; they are numbered from `begin` on.
// Values are read once for as many queries as the registers hold; a query that sees a key no more weighs it by 0.
template <int D, int BITS>
static void attend_split(const Query* queries, int count, const Keys& keys, const int32_t* slots, int64_t first, int begin, Sight sight,
                         float scale) {
    constexpr int AT_ONCE = 256 / D < QUERIES ? 256 / D : QUERIES;
    alignas(64) float scores[AT_ONCE][SPLIT];
    for (; count > 0; queries += AT_ONCE, count -= AT_ONCE) {
        const int Q = count < AT_ONCE ? count : AT_ONCE;
        int longest = 0;
        for (int q = 0; q < Q; q++) longest = queries[q].n > longest ? queries[q].n : longest;
        for (int q = Q; q < AT_ONCE; q++) memset(scores[q], 0, 4 * (size_t)longest);
        floats most[AT_ONCE];
        for (int q = 0; q < Q; q++) most[q] = all(-INFINITY);
        const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int at = 0; at < longest; at += 16) {
            const int some = longest - at < 16 ? longest - at : 16;
            alignas(64) uint16_t widened[16][D];  // codes are widened once for all queries
            const uint16_t* key[16];
            for (int j = 0; j < 16; j++) {
                const int64_t of = (slots ? slots[at + (j < some ? j : some - 1)] : first + at + (j < some ? j : some - 1)) * D;
                key[j] = BITS == 16 ? (const uint16_t*)keys.k + of : widened[j];
                for (int i = 0; i < D * BITS / 8; i += 64)  // values are needed soon
                    _mm_prefetch((const char*)keys.v + of * BITS / 8 + i, _MM_HINT_T0);
                if (BITS != 16)
                    for (int i = 0; i < D; i += 32) _mm512_store_si512(widened[j] + i, load32<BITS>(keys.k, of + i));
            }
            const floats scales = BITS == 16 ? all(scale) : scales_of(keys.k_scale, slots ? slots + at : nullptr, first + at, some) * all(scale);
            const ints number = lane + (begin + at);
            for (int q = 0; q < Q; q++) {
                const Query& one = queries[q];
                floats sum[16];
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) {
                    sum[j] = (floats){};
#pragma GCC unroll 8
                    for (int i = 0; i < D; i += 32) sum[j] = dot2(sum[j], _mm512_loadu_si512(key[j] + i), _mm512_loadu_si512(one.q + i));
                }
                ints seen = number < begin + one.n;
                if (sight.window >= 0) seen &= (number > one.position - sight.window) | (number < sight.sink);
                const __m512 kept = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), _mm512_movepi32_mask((__m512i)seen), (__m512)(sums16(sum) * scales));
                _mm512_store_ps(scores[q] + at, kept);
                most[q] = (floats)_mm512_max_ps((__m512)most[q], kept);
            }
        }
        float top[AT_ONCE];
        floats weight[AT_ONCE] = {};
        for (int q = 0; q < Q; q++) top[q] = highest(most[q]);
        for (int at = 0; at < longest; at += 16) {
            const int some = longest - at < 16 ? longest - at : 16;
            const floats scales = BITS == 16 ? all(1.f) : scales_of(keys.v_scale, slots ? slots + at : nullptr, first + at, some);
            for (int q = 0; q < Q; q++) {
                floats p = top[q] == -INFINITY ? (floats){} : exponential(*(floats*)(scores[q] + at) - all(top[q]));
                weight[q] += p;
                if (BITS != 16) p *= scales;
                *(floats*)(scores[q] + at) = p;
            }
        }
        for (int q = 0; q < Q; q++) {
            *queries[q].out.sum = added(weight[q]);
            *queries[q].out.most = top[q];
        }
        floats even[AT_ONCE][D / 32] = {}, odd[AT_ONCE][D / 32] = {};
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        for (int j = 0; j < longest; j++) {
            const int64_t of = (slots ? slots[j] : first + j) * D;
            for (int i = 0; i < D * BITS / 8; i += 64)  // keys of the next split, where they lie behind these
                _mm_prefetch((const char*)keys.k + (of + SPLIT * D) * BITS / 8 + i, _MM_HINT_T0);
            floats p[AT_ONCE];
#pragma GCC unroll 8
            for (int q = 0; q < AT_ONCE; q++) p[q] = all(scores[q][j]);
#pragma GCC unroll 8
            for (int i = 0; i < D / 32; i++) {
                const __m512i both = load32<BITS>(keys.v, of + 32 * i);
                const floats low = (floats)_mm512_slli_epi32(both, 16), high = (floats)_mm512_and_si512(both, upper);
#pragma GCC unroll 8
                for (int q = 0; q < AT_ONCE; q++) {
                    even[q][i] = p[q] * low + even[q][i];
                    odd[q][i] = p[q] * high + odd[q][i];
                }
            }
        }
        const __m512i former = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i latter = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < D / 32; i++) {
                float* to = queries[q].out.values + 32 * i;
                _mm512_storeu_ps(to, _mm512_permutex2var_ps((__m512)even[q][i], former, (__m512)odd[q][i]));
                _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps((__m512)even[q][i], latter, (__m512)odd[q][i]));
            }
    }
}

typedef void (*Attend)(const Query*, int, const Keys&, const int32_t*, int64_t, int, Sight, float);

template <int D>
static Attend of_bits(int bits) {
    return bits == 16 ? attend_split<D, 16> : bits == 8 ? attend_split<D, 8> : attend_split<D, 4>;
}

static Attend attend_of(int D, int bits) {
    switch (D) {
        case 32: return of_bits<32>(bits);
        case 64: return of_bits<64>(bits);
        case 96: return of_bits<96>(bits);
        case 128: return of_bits<128>(bits);
        default: return of_bits<256>(bits);
    }
}
