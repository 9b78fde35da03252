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

/* sums[r] = sum over k of row r's k-th number * x[k], for the rows that begin at `rows`, TRIPLE at each of some `groups`,
 * and some `vectors` of x. Numbers of a row are `step` apart. `ahead`: fetches what lies so many floats further on, for
 * rows of adjacent numbers. */
INLINE void tile_sums(const float *const *rows, int64_t row_stride, int64_t step, int64_t inner, const float *x,
                      int64_t x_stride, int64_t ahead, wide (*sums)[2], const int groups, const int vectors) {
    wide total[TILE][2] = {{{0}}};
    const float *at[GROUPS];
    for (int g = 0; g < groups; g++) at[g] = rows[g];
    for (int64_t k = 0; k < inner; k++, x += x_stride) {
        wide some[2];
        for (int v = 0; v < vectors; v++) some[v] = *(const wide *)(x + v * WIDE);
        if (ahead && k % 2 == 0) {
            __builtin_prefetch(rows[0] + ahead + k * (TILE / 2), 0, 2);
            __builtin_prefetch(rows[GROUPS / 2] + ahead + k * (TILE / 2), 0, 2);
        }
        for (int g = 0; g < groups; g++) {
            for (int j = 0; j < TRIPLE; j++)
                for (int v = 0; v < vectors; v++) total[g * TRIPLE + j][v] += at[g][j * row_stride] * some[v];
            at[g] += step;
        }
    }
    for (int j = 0; j < groups * TRIPLE; j++)
        for (int v = 0; v < vectors; v++) sums[j][v] = total[j][v];
}

/* A tile of `times`: the rows from `from` on, of which the last triples may begin earlier, so as not to overrun. */
INLINE void tile(const float *a, int64_t a_row, int64_t a_step, int64_t from, int64_t rows, int64_t inner,
                 const float *b, int64_t b_row, float *to, int64_t to_row, const int groups, const int vectors,
                 const int add) {
    wide sums[TILE][2];
    const float *at[GROUPS];
    int64_t first[GROUPS];
    for (int g = 0; g < groups; g++) {
        first[g] = smaller(from + g * TRIPLE, rows - TRIPLE);
        at[g] = a + first[g] * a_row;
    }
    tile_sums(at, a_row, a_step, inner, b, b_row, 0, sums, groups, vectors);
    for (int g = 0; g < groups; g++)
        for (int j = 0; j < TRIPLE; j++) {
            if (first[g] + j < from + g * TRIPLE) continue; /* another triple's */
            float *row = to + (first[g] + j) * to_row;
            for (int v = 0; v < vectors; v++) {
                wide sum = sums[g * TRIPLE + j][v];
                if (add) sum += *(const wide *)(row + v * WIDE);
                *(wide *)(row + v * WIDE) = sum;
            }
        }
}

/* to [rows][columns] = (or +=) sum over k of a[row * a_row + k * a_step] * b[k][column]. Of b, COLUMNS columns at a time
 * stand `b_panel` apart, and its rows `b_row`. There are at least TRIPLE rows, and the columns are a multiple of WIDE. */
INLINE void times(const float *a, int64_t a_row, int64_t a_step, int64_t rows, int64_t inner, const float *b,
                  int64_t b_row, int64_t b_panel, int64_t columns, float *to, int64_t to_row, const int add) {
    for (int64_t column = 0; column < columns; column += COLUMNS, b += b_panel)
        for (int64_t from = 0; from < rows; from += TILE)
            if (columns - column <= WIDE)
                tile(a, a_row, a_step, from, rows, inner, b, b_row, to + column, to_row, GROUPS, 1, add);
            else if (rows - from <= TILE / 2)
                tile(a, a_row, a_step, from, rows, inner, b, b_row, to + column, to_row, GROUPS / 2, 2, add);
            else
                tile(a, a_row, a_step, from, rows, inner, b, b_row, to + column, to_row, GROUPS, 2, add);
}

/* Eight rows of eight become columns. */
static inline void turn_eight(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    lanes v[8], w[8];
    for (int i = 0; i < 8; i++) v[i] = *(const lanes *)(from + i * from_stride);
    for (int i = 0; i < 8; i += 2) {
        w[i] = SHUFFLE(v[i], v[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        w[i + 1] = SHUFFLE(v[i], v[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + j] = SHUFFLE(w[i + j], w[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            v[i + j + 2] = SHUFFLE(w[i + j], w[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; j++) {
        *(lanes *)(to + j * to_stride) = SHUFFLE(v[j], v[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(lanes *)(to + (j + 4) * to_stride) = SHUFFLE(v[j], v[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Features of eight slots side by side, from panels to rows of `stride`. */
static inline void lay_down(const float *columns, int64_t features, float *rows, int64_t stride) {
    for (int64_t i = 0; i < features; i += LANES) turn_eight(columns + i * COLUMNS, COLUMNS, rows + i, stride);
}
