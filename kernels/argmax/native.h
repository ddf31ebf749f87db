// The first of the largest of a row of bfloat16; -1 where the row has a NaN.
#pragma once
#include "../native.h"

static int64_t argmax_row(const uint16_t* x, int64_t n) {
    // in the order of what they are bits of: negative ones turned over. A NaN is beyond infinity, of either sign.
    const auto ordered = [](uint16_t v) { return (int16_t)(v & 0x8000 ? v ^ 0x7fff : v); };
    const __m512i infinite = _mm512_set1_epi16(0x7f80), size = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_set1_epi16(-0x8000);
    __mmask32 nan = 0;
    const auto in_order = [&](__m512i v) {
        return _mm512_mask_xor_epi32(v, 0xffff, v, _mm512_and_si512(_mm512_srai_epi16(v, 15), size));
    };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512i v = _mm512_loadu_si512(x + i);
        nan |= _mm512_cmpgt_epi16_mask(_mm512_and_si512(v, size), infinite);
        most = _mm512_max_epi16(most, in_order(v));
    }
    alignas(64) int16_t each[32];
    _mm512_store_si512(each, most);
    int16_t top = -0x8000;
    for (const int16_t one : each) top = one > top ? one : top;
    for (int64_t j = i; j < n; j++) {
        if ((x[j] & 0x7fff) > 0x7f80) return -1;
        top = ordered(x[j]) > top ? ordered(x[j]) : top;
    }
    if (nan) return -1;
    if (top == -1) top = 0;  // the negative zero, which is no less than the positive one
    const bool zero = top == 0;
    for (i = 0; i + 32 <= n; i += 32) {
        const __m512i v = in_order(_mm512_loadu_si512(x + i));
        __mmask32 same = _mm512_cmpeq_epi16_mask(v, _mm512_set1_epi16(top));
        if (zero) same |= _mm512_cmpeq_epi16_mask(v, _mm512_set1_epi16(-1));
        if (same) return i + __builtin_ctz(same);
    }
    for (; i < n; i++)
        if (ordered(x[i]) == top || (zero && ordered(x[i]) == -1)) return i;
    return -1;
}
