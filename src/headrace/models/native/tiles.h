/* Matrix products as tiles of sums that stay in registers: single numbers of one side times vectors of the other. */

#pragma once

#include "kernels.h"

#ifdef __AVX512F__
#define GROUPS 4
#else
#define GROUPS 2
#endif

#define TRIPLE 3 /* rows that are reached from one pointer */
#define TILE (GROUPS * TRIPLE)
#define COLUMNS (2 * WIDE) /* of a panel: numbers that stand side by side in registers */
#define INLINE static inline __attribute__((always_inline))

/* sums[r] = sum over k of row r's k-th number * x[k], for the TILE rows that begin at `rows`, TRIPLE at each, and some
 * `vectors` of x. Numbers of a row are `step` apart. `ahead`: fetches what lies so many floats further on, for rows of
 * adjacent numbers. */
INLINE void tile_sums(const float *const *rows, int64_t row_stride, int64_t step, int64_t inner, const float *x,
                      int64_t x_stride, int64_t ahead, wide (*sums)[2], const int vectors) {
    wide total[TILE][2] = {{{0}}};
    const float *at[GROUPS];
    for (int g = 0; g < GROUPS; g++) at[g] = rows[g];
    for (int64_t k = 0; k < inner; k++, x += x_stride) {
        wide some[2];
        for (int v = 0; v < vectors; v++) some[v] = *(const wide *)(x + v * WIDE);
        if (ahead && k % 2 == 0) {
            __builtin_prefetch(rows[0] + ahead + k * (TILE / 2), 0, 2);
            __builtin_prefetch(rows[GROUPS / 2] + ahead + k * (TILE / 2), 0, 2);
        }
        for (int g = 0; g < GROUPS; g++) {
            for (int j = 0; j < TRIPLE; j++)
                for (int v = 0; v < vectors; v++) total[g * TRIPLE + j][v] += at[g][j * row_stride] * some[v];
            at[g] += step;
        }
    }
    for (int j = 0; j < TILE; j++)
        for (int v = 0; v < vectors; v++) sums[j][v] = total[j][v];
}
