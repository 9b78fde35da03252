/* Weights in fewer bits than a float, which are read faster where few slots are decoded: bfloat16, or bytes, with a scale
 * for each row. Their inputs are a multiple of WIDE. Sums are of floats all the same. */

#pragma once

#include "tiles.h"

#include <math.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define FEW LANES /* slots up to which weights are vectors, and not single numbers that vectors of slots are multiplied by */
#define AT_ONCE 4 /* of those slots */
#define MOST_BYTE 127.0f

/* WIDE weights from number `at` on; bytes are without their scale. Compilers do not see by themselves that there are single
 * instructions for it. */
INLINE wide weights_at(const void *small, int64_t at, const int scaled) {
    const int8_t *bytes = (const int8_t *)small + at;
    const uint16_t *halves = (const uint16_t *)small + at;
#if defined(__AVX512F__)
    if (scaled) return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    return (wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves)), 16);
#elif defined(__AVX2__)
    if (scaled) return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
    return (wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves)), 16);
#else
    wide some;
    for (int i = 0; i < WIDE; i++) {
        union { uint32_t bits; float number; } half = {(uint32_t)halves[scaled ? 0 : i] << 16};
        some[i] = scaled ? (float)bytes[i] : half.number;
    }
    return some;
#endif
}

INLINE float scale_of(const float *scales, int64_t row) { return scales ? scales[row] : 1.0f; }

/* Fetches TRIPLE rows that will be needed. */
static void fetch_triple(const void *small, const float *scales, int64_t row, int64_t inputs) {
    int64_t size = scales ? sizeof(int8_t) : sizeof(uint16_t);
    const char *from = (const char *)small + row * inputs * size;
    for (int64_t i = 0; i < TRIPLE * inputs * size; i += 64) __builtin_prefetch(from + i, 0, 2);
}

INLINE float sum_of(wide v) {
    const lanes *parts = (const lanes *)&v;
    lanes sum = parts[0];
    for (int i = 1; i < WIDE / LANES; i++) sum += parts[i];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

/* TRIPLE rows times some slots, which stand in rows. */
INLINE void dots_of(const void *small, const float *scales, int64_t row, int64_t inputs, const float *x, int64_t from,
                    wide (*sums)[2], const int slots, const int scaled) {
    wide total[TRIPLE][AT_ONCE];
    for (int r = 0; r < TRIPLE; r++)
        for (int s = 0; s < slots; s++) total[r][s] = (wide){0};
    for (int64_t k = 0; k < inputs; k += WIDE)
        for (int r = 0; r < TRIPLE; r++) {
            wide some = weights_at(small, (row + r) * inputs + k, scaled);
            for (int s = 0; s < slots; s++) total[r][s] += some * *(const wide *)(x + (from + s) * inputs + k);
        }
    for (int r = 0; r < TRIPLE; r++)
        for (int s = 0; s < slots; s++)
            ((float *)sums[r])[from + s] = sum_of(total[r][s]) * scale_of(scales, row + r);
}

INLINE void dots_as(const void *small, const float *scales, int64_t row, int64_t inputs, const float *x, int64_t slots,
                    wide (*sums)[2], const int scaled) {
    int64_t from = 0;
    for (; slots - from >= AT_ONCE; from += AT_ONCE)
        dots_of(small, scales, row, inputs, x, from, sums, AT_ONCE, scaled);
    for (; slots - from >= 2; from += 2) dots_of(small, scales, row, inputs, x, from, sums, 2, scaled);
    if (from < slots) dots_of(small, scales, row, inputs, x, from, sums, 1, scaled);
}

/* TRIPLE rows times at most FEW slots: what `tile_sums` gives, in the first vector of each. */
static void dots(const void *small, const float *scales, int64_t row, int64_t inputs, const float *x, int64_t slots,
                 wide (*sums)[2]) {
    for (int r = 0; r < TRIPLE; r++) sums[r][0] = (wide){0};
    if (scales)
        dots_as(small, scales, row, inputs, x, slots, sums, 1);
    else
        dots_as(small, scales, row, inputs, x, slots, sums, 0);
}

/* Rounds a row to the nearest in fewer bits, `row` of `small`, and what these are as floats. */
static void shrink_row(const float *from, int64_t row, int64_t inputs, void *small, float *scales, float *rounded) {
    if (!scales) {
        uint16_t *to = (uint16_t *)small + row * inputs;
        for (int64_t i = 0; i < inputs; i++) {
            union { float number; uint32_t bits; } whole = {from[i]}, half;
            half.bits = (whole.bits + 0x7FFF + (whole.bits >> 16 & 1)) & 0xFFFF0000;
            to[i] = (uint16_t)(half.bits >> 16);
            rounded[i] = half.number;
        }
        return;
    }
    int8_t *to = (int8_t *)small + row * inputs;
    float most = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < inputs; i++) most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    float inverse = most > 0.0f ? MOST_BYTE / most : 0.0f, scale = most / MOST_BYTE;
    for (int64_t i = 0; i < inputs; i++) {
        float whole = rintf(from[i] * inverse);
        to[i] = (int8_t)whole;
        rounded[i] = whole * scale;
    }
    scales[row] = scale;
}
