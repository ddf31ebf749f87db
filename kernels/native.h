// Sixteen lanes of AVX-512 in the vector types of GCC and Clang. An expression has one product and one sum at most, so
// that a compiler that fuses them does so everywhere alike.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

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
