// Sixteen lanes of AVX-512 in the vector types of GCC and Clang. An expression has one product and one sum at most, so
// that a compiler that fuses them does so everywhere alike.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#ifndef __AVX512VNNI__
#error "these kernels are written for AVX-512 with VNNI"
#endif

typedef float floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(64), aligned(1)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));

static inline floats all(float x) { return (floats)_mm512_set1_ps(x); }

static inline floats from_bf16(const uint16_t* at) {
    return (floats)(__builtin_convertvector(*(const halves*)at, ints) << 16);
}

// Rounded to the nearest, of two to the even one.
static inline void to_bf16(floats x, uint16_t* at) {
    ints bits = (ints)x, nan = (bits & 0x7fffffff) > 0x7f800000;
    ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    ints kept = ((rounded & ~nan) | ((bits | 0x400000) & nan)) >> 16;
    *(halves*)at = __builtin_convertvector(kept & 0xffff, halves);
}

static inline float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits | 0x400000) >> 16;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline floats from_half(const uint16_t* at) {
    return (floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)at));
}

static inline floats from_bytes(const uint8_t* at) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)));
}

// sum + codes · x over four neighbouring columns of each lane; codes have no sign. Exact.
static inline ints dot4(ints sum, bytes codes, const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
}

// sum + a · b over two neighbouring elements of each lane, bfloat16 both.
static inline floats dot2(floats sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i odd = _mm512_set1_epi32(0xffff0000);
    sum = (floats)_mm512_slli_epi32(a, 16) * (floats)_mm512_slli_epi32(b, 16) + sum;
    return (floats)_mm512_and_si512(a, odd) * (floats)_mm512_and_si512(b, odd) + sum;
#endif
}

// The sums of sixteen vectors, in their order; of each, lanes are added in one order.
static inline floats sums16(const floats* v) {
    __m512 pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {
        const __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    return (floats)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// e^x for x <= 88, to 2 units of the last place; 0 far below, not a number of what is none.
static inline floats exponential(floats x) {
    const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x);  // of the two, the second where one is no number
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), clamped);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.f / 720);
    for (const float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return (floats)_mm512_scalef_ps(p, n);
}

static inline float highest(floats x) { return _mm512_reduce_max_ps((__m512)x); }
static inline float added(floats x) { return _mm512_reduce_add_ps((__m512)x); }

// Threads that wait for each other many times a millisecond. One that waits long lets others have its core.
struct Team {
    int threads;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};

    void wait() {
        if (threads == 1) return;
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins < 4000) _mm_pause();
            else sched_yield();
        }
    }
};

// Of `items`, those of thread `me`: from its share of `me` to that of me + 1.
static inline int64_t share(int64_t items, int me, int threads) { return items * me / threads; }
