/* Attention over a tree of pieces, and its gradient, for training and for prefill.
 *
 * Tokens stand end to end, piece by piece. A token sees its own piece up to itself, and all of the pieces that its piece
 * hangs on; the tokens below a piece follow it without a gap. Queries, keys and values are rows [heads + 2 * kv_heads]
 * [dim]. A task works on COLUMNS of them, side by side, and writes what no other task writes, so nothing depends on the
 * number of threads.
 */

#include "tiles.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 128 /* rows whose scores are held at once in the backward pass */

typedef struct {
    int64_t pieces;
    const int64_t *starts, *lengths, *ends; /* `ends`: after the last token below the piece */
    const int64_t *first_above, *above;     /* the pieces that p hangs on: above[first_above[p]] to [first_above[p + 1]] */
} tree;

typedef struct {
    const float *qkv;
    int64_t stride, heads, kv_heads, dim;
} inputs;

/* Queries of one task: `count` columns, head by head of a group, token by token. */
typedef struct {
    int64_t piece, kv_head, first, count;
} block;

static int64_t group_of(const inputs *in) { return in->heads / in->kv_heads; }
static int64_t key_at(const inputs *in, int64_t kv_head) { return (in->heads + kv_head) * in->dim; }
static int64_t value_at(const inputs *in, int64_t kv_head) { return (in->heads + in->kv_heads + kv_head) * in->dim; }

/* to[r][COLUMNS] = (or +=) sum over k of rows[r * row_stride + k * step] * x[k][COLUMNS]. */
INLINE void panel(const float *rows, int64_t count, int64_t row_stride, int64_t step, int64_t inner, const float *x,
                  float *to, const int add) {
    if (count < TRIPLE) { /* too few to be reached as triples */
        for (int64_t r = 0; r < count; r++) {
            wide sums[TILE][2];
            const float *row = rows + r * row_stride, *same[GROUPS];
            for (int g = 0; g < GROUPS; g++) same[g] = row;
            tile_sums(same, 0, step, inner, x, COLUMNS, 0, sums, 2);
            for (int v = 0; v < 2; v++) {
                wide *cell = (wide *)(to + r * COLUMNS + v * WIDE);
                if (add)
                    *cell += sums[0][v];
                else
                    *cell = sums[0][v];
            }
        }
        return;
    }
    for (int64_t from = 0; from < count; from += TILE) {
        wide sums[TILE][2];
        const float *at[GROUPS];
        int64_t first[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            first[g] = smaller(from + g * TRIPLE, count - TRIPLE);
            at[g] = rows + first[g] * row_stride;
        }
        tile_sums(at, row_stride, step, inner, x, COLUMNS, 0, sums, 2);
        for (int j = 0; j < TILE; j++) {
            int64_t r = first[j / TRIPLE] + j % TRIPLE;
            if (r < from + j / TRIPLE * TRIPLE) continue; /* another triple's */
            for (int v = 0; v < 2; v++) {
                wide *cell = (wide *)(to + r * COLUMNS + v * WIDE);
                if (add)
                    *cell += sums[j][v];
                else
                    *cell = sums[j][v];
            }
        }
    }
}

/* Vectors [count][dim], one at each of `at`, to [dim][COLUMNS], times `scale`; 0 beyond the count. */
static void stand_up(const float *const *at, int64_t count, int64_t dim, float scale, float *to) {
    for (int64_t from = 0; from < dim; from += WIDE)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t i = from; i < smaller(from + WIDE, dim); i++)
                to[i * COLUMNS + c] = c < count ? at[c][i] * scale : 0.0f;
}

static void lay_down(const float *from, int64_t count, int64_t dim, float scale, float *const *at) {
    for (int64_t begin = 0; begin < dim; begin += WIDE)
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = begin; i < smaller(begin + WIDE, dim); i++) at[c][i] = from[i * COLUMNS + c] * scale;
}

/* The token of a block's column, counted from the beginning of its piece, and the query's head. */
static int64_t token_of(const block *b, int64_t group, int64_t column) { return (b->first + column) / group; }
static int64_t head_of(const block *b, int64_t group, int64_t column) {
    return b->kv_head * group + (b->first + column) % group;
}

/* How many keys of their own piece a block's columns see: each in `seen`; returns the most. */
static int64_t own_keys(const block *b, int64_t group, int64_t *seen) {
    for (int64_t c = 0; c < COLUMNS; c++) seen[c] = token_of(b, group, smaller(c, b->count - 1)) + 1;
    return seen[b->count - 1];
}

/* What a task works on: a piece has one for each kv head and each COLUMNS of its columns, `per_token` for a token. */
static block find_block(const tree *t, const int64_t *tasks_before, int64_t task, int64_t kv_heads, int64_t per_token) {
    int64_t low = 0, high = t->pieces;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tasks_before[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    int64_t columns = t->lengths[low] * per_token, within = task - tasks_before[low];
    int64_t first = within / kv_heads * COLUMNS;
    return (block){low, within % kv_heads, first, smaller(COLUMNS, columns - first)};
}

static int64_t count_tasks(const tree *t, int64_t kv_heads, int64_t per_token, int64_t *tasks_before) {
    int64_t total = 0;
    for (int64_t p = 0; p < t->pieces; p++) {
        tasks_before[p] = total;
        total += (t->lengths[p] * per_token + COLUMNS - 1) / COLUMNS * kv_heads;
    }
    return total;
}

/* Scores of a block's columns with `count` keys from a token on. */
static void scores_of(const inputs *in, const float *queries, int64_t token, int64_t count, int64_t kv_head,
                      float *scores) {
    panel(in->qkv + token * in->stride + key_at(in, kv_head), count, in->stride, 1, in->dim, queries, scores, 0);
}

static void forward_block(const inputs *in, const tree *t, const block *b, float *scratch, float *out, float *sums) {
    int64_t group = group_of(in), dim = in->dim, seen[COLUMNS], keys = 0;
    float *queries = scratch, *mixed = queries + dim * COLUMNS, *scores = mixed + dim * COLUMNS;
    const float *from[COLUMNS];
    float *to[COLUMNS];
    for (int64_t c = 0; c < b->count; c++) {
        int64_t token = t->starts[b->piece] + token_of(b, group, c), head = head_of(b, group, c);
        from[c] = in->qkv + token * in->stride + head * dim;
        to[c] = out + (token * in->heads + head) * dim;
    }
    stand_up(from, b->count, dim, 1.0f / sqrtf((float)dim), queries);
    for (int64_t i = t->first_above[b->piece]; i < t->first_above[b->piece + 1]; i++) {
        int64_t piece = t->above[i];
        scores_of(in, queries, t->starts[piece], t->lengths[piece], b->kv_head, scores + keys * COLUMNS);
        keys += t->lengths[piece];
    }
    int64_t above = keys, own = own_keys(b, group, seen);
    scores_of(in, queries, t->starts[b->piece], own, b->kv_head, scores + keys * COLUMNS);
    keys += own;

    float top[COLUMNS], mass[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; c++) {
        top[c] = -INFINITY;
        mass[c] = 0.0f;
    }
    for (int64_t k = 0; k < keys; k++) {
        float *row = scores + k * COLUMNS;
        if (k >= above)
            for (int64_t c = 0; c < COLUMNS; c++) row[c] = k - above < seen[c] ? row[c] : -INFINITY;
        for (int64_t c = 0; c < COLUMNS; c++) top[c] = row[c] > top[c] ? row[c] : top[c];
    }
    for (int64_t k = 0; k < keys; k++) {
        float *row = scores + k * COLUMNS;
#pragma omp simd
        for (int64_t c = 0; c < COLUMNS; c++) {
            row[c] = exponential(row[c] - top[c]);
            mass[c] += row[c];
        }
    }
    memset(mixed, 0, sizeof(float) * dim * COLUMNS);
    const float *values = in->qkv + value_at(in, b->kv_head), *shares = scores;
    for (int64_t i = t->first_above[b->piece]; i <= t->first_above[b->piece + 1]; i++) {
        int last = i == t->first_above[b->piece + 1];
        int64_t piece = last ? b->piece : t->above[i], count = last ? own : t->lengths[piece];
        panel(values + t->starts[piece] * in->stride, dim, 1, in->stride, count, shares, mixed, 1);
        shares += count * COLUMNS;
    }
    for (int64_t i = 0; i < dim; i++)
        for (int64_t c = 0; c < COLUMNS; c++) mixed[i * COLUMNS + c] /= mass[c];
    lay_down(mixed, b->count, dim, 1.0f, to);
    for (int64_t c = 0; c < b->count; c++) {
        int64_t token = t->starts[b->piece] + token_of(b, group, c);
        sums[token * in->heads + head_of(b, group, c)] = top[c] + logf(mass[c]);
    }
}

/* `longest`: of all pieces, with those above. `sums`: the logarithm of each softmax's denominator. */
int tree_attention(const inputs *in, const tree *t, int64_t longest, float *out, float *sums, int threads) {
    int64_t *before = malloc(sizeof(int64_t) * t->pieces);
    if (!before) return 1;
    int64_t tasks = count_tasks(t, in->kv_heads, group_of(in), before), floats = (2 * in->dim + longest) * COLUMNS;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        float *scratch = malloc(sizeof(float) * floats);
        if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            if (!scratch) continue;
            block b = find_block(t, before, task, in->kv_heads, group_of(in));
            forward_block(in, t, &b, scratch, out, sums);
        }
        free(scratch);
    }
    free(before);
    return failed;
}

typedef struct {
    const float *grad, *sums, *along; /* of `out`; logarithms of the denominators; grad . out [tokens][heads] */
    float *back;                      /* the gradient of qkv */
} gradient;

/* What a block's queries get back. */
static void backward_queries(const inputs *in, const tree *t, const gradient *g, const block *b, float *scratch) {
    int64_t group = group_of(in), dim = in->dim, seen[COLUMNS], own = own_keys(b, group, seen);
    float *queries = scratch, *grads = queries + dim * COLUMNS, *back = grads + dim * COLUMNS;
    float *scores = back + dim * COLUMNS, *pulls = scores + CHUNK * COLUMNS;
    float scale = 1.0f / sqrtf((float)dim), sums[COLUMNS], along[COLUMNS];
    const float *from[COLUMNS], *from_grad[COLUMNS];
    float *to[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; c++) {
        int64_t column = smaller(c, b->count - 1);
        int64_t token = t->starts[b->piece] + token_of(b, group, column), head = head_of(b, group, column);
        from[c] = in->qkv + token * in->stride + head * dim;
        from_grad[c] = g->grad + (token * in->heads + head) * dim;
        to[c] = g->back + token * in->stride + head * dim;
        sums[c] = g->sums[token * in->heads + head];
        along[c] = g->along[token * in->heads + head];
    }
    stand_up(from, b->count, dim, scale, queries);
    stand_up(from_grad, b->count, dim, 1.0f, grads);
    memset(back, 0, sizeof(float) * dim * COLUMNS);
    for (int64_t i = t->first_above[b->piece]; i <= t->first_above[b->piece + 1]; i++) {
        int last = i == t->first_above[b->piece + 1];
        int64_t piece = last ? b->piece : t->above[i], count = last ? own : t->lengths[piece];
        for (int64_t begin = 0; begin < count; begin += CHUNK) {
            int64_t some = smaller(CHUNK, count - begin), token = t->starts[piece] + begin;
            const float *row = in->qkv + token * in->stride;
            scores_of(in, queries, token, some, b->kv_head, scores);
            panel(row + value_at(in, b->kv_head), some, in->stride, 1, dim, grads, pulls, 0);
            for (int64_t k = 0; k < some; k++) {
                float *score = scores + k * COLUMNS, *pull = pulls + k * COLUMNS;
#pragma omp simd
                for (int64_t c = 0; c < COLUMNS; c++) {
                    float share = exponential(score[c] - sums[c]);
                    share = last && begin + k >= seen[c] ? 0.0f : share;
                    pull[c] = share * (pull[c] - along[c]);
                }
            }
            panel(row + key_at(in, b->kv_head), dim, 1, in->stride, some, pulls, back, 1);
        }
    }
    lay_down(back, b->count, dim, scale, to);
}

/* What a block of keys and values gets back: from its own piece, and from all below. Its columns are tokens. */
static void backward_keys(const inputs *in, const tree *t, const gradient *g, const block *b, float *scratch) {
    int64_t group = group_of(in), dim = in->dim, start = t->starts[b->piece] + b->first, end = t->ends[b->piece];
    float *keys = scratch, *values = keys + dim * COLUMNS, *back_keys = values + dim * COLUMNS;
    float *back_values = back_keys + dim * COLUMNS, *scores = back_values + dim * COLUMNS;
    float *pulls = scores + CHUNK * COLUMNS, scale = 1.0f / sqrtf((float)dim);
    const float *from_keys[COLUMNS], *from_values[COLUMNS];
    float *to_keys[COLUMNS], *to_values[COLUMNS];
    for (int64_t c = 0; c < b->count; c++) {
        int64_t row = (start + c) * in->stride;
        from_keys[c] = in->qkv + row + key_at(in, b->kv_head);
        from_values[c] = in->qkv + row + value_at(in, b->kv_head);
        to_keys[c] = g->back + row + key_at(in, b->kv_head);
        to_values[c] = g->back + row + value_at(in, b->kv_head);
    }
    stand_up(from_keys, b->count, dim, scale, keys);
    stand_up(from_values, b->count, dim, 1.0f, values);
    memset(back_keys, 0, sizeof(float) * 2 * dim * COLUMNS);
    for (int64_t head = b->kv_head * group; head < (b->kv_head + 1) * group; head++)
        for (int64_t begin = start; begin < end; begin += CHUNK) {
            int64_t some = smaller(CHUNK, end - begin), grad_stride = in->heads * dim;
            const float *query = in->qkv + begin * in->stride + head * dim;
            const float *grad = g->grad + begin * grad_stride + head * dim;
            panel(query, some, in->stride, 1, dim, keys, scores, 0);
            panel(grad, some, grad_stride, 1, dim, values, pulls, 0);
            for (int64_t q = 0; q < some; q++) {
                int64_t at = (begin + q) * in->heads + head;
                float *score = scores + q * COLUMNS, *pull = pulls + q * COLUMNS;
                float sum = g->sums[at], along = g->along[at];
                int64_t seen = begin + q - start + 1; /* of the keys in this block */
#pragma omp simd
                for (int64_t c = 0; c < COLUMNS; c++) {
                    float share = c < seen ? exponential(score[c] - sum) : 0.0f;
                    score[c] = share;
                    pull[c] = share * (pull[c] - along);
                }
            }
            panel(grad, dim, 1, grad_stride, some, scores, back_values, 1);
            panel(query, dim, 1, in->stride, some, pulls, back_keys, 1);
        }
    lay_down(back_keys, b->count, dim, scale, to_keys);
    lay_down(back_values, b->count, dim, 1.0f, to_values);
}

/* `along` is scratch for a number for each token and head. */
int tree_attention_backward(const inputs *in, const tree *t, const float *grad, const float *out, const float *sums,
                            float *along, float *back, int64_t tokens, int threads) {
    int64_t *before = malloc(sizeof(int64_t) * 2 * t->pieces), *keys_before = before + t->pieces;
    if (!before) return 1;
    int64_t queries = count_tasks(t, in->kv_heads, group_of(in), before);
    int64_t tasks = queries + count_tasks(t, in->kv_heads, 1, keys_before);
    const gradient g = {grad, sums, along, back};
    int failed = 0;
#pragma omp parallel num_threads(threads) if (tasks > 2)
    {
        float *scratch = malloc(sizeof(float) * (4 * in->dim + 2 * CHUNK) * COLUMNS);
        if (!scratch) failed = 1;
#pragma omp for
        for (int64_t n = 0; n < tokens * in->heads; n++) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < in->dim; i++) sum += grad[n * in->dim + i] * out[n * in->dim + i];
            along[n] = sum;
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            if (!scratch) continue;
            int of_keys = task < tasks - queries; /* first: the keys of a long stem take the longest */
            block b = of_keys ? find_block(t, keys_before, task, in->kv_heads, 1)
                              : find_block(t, before, task - (tasks - queries), in->kv_heads, group_of(in));
            if (of_keys)
                backward_keys(in, t, &g, &b, scratch);
            else
                backward_queries(in, t, &g, &b, scratch);
        }
        free(scratch);
    }
    free(before);
    return failed;
}
