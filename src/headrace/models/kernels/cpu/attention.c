/* Attention over a tree of pieces, and its gradient, for training and for prefill.
 *
 * Tokens stand end to end, piece by piece. A token sees its own piece up to itself, and all of the pieces that its piece
 * hangs on; the tokens below a piece follow it without a gap. Queries, keys and values are rows [heads + 2 * kv_heads]
 * [dim], dim a multiple of WIDE. A block of queries meets the keys panel by panel, which are transposed for it: scores
 * then have queries for rows and keys for columns. How the work is cut, and in which order it is added up, depends on the
 * tree alone, and so nothing depends on the number of threads.
 */

#include "tiles.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 48             /* queries of a block */
#define CHUNK (2 * COLUMNS) /* keys that a block of queries meets at once in the backward pass */
#define PARTS 8             /* pieces of work that the backward pass is cut into at least, if there are so many blocks */

typedef struct {
    int64_t pieces;
    const int64_t *starts, *lengths, *ends; /* `ends`: after the last token below the piece */
    const int64_t *first_above, *above;     /* the pieces that p hangs on: above[first_above[p]] to [first_above[p + 1]] */
} tree;

typedef struct {
    const float *qkv;
    int64_t stride, heads, kv_heads, dim;
} inputs;

/* Queries of one task: `count` rows, head by head of a group, token by token. */
typedef struct {
    int64_t piece, kv_head, first, count;
} block;

static int64_t group_of(const inputs *in) { return in->heads / in->kv_heads; }
static int64_t key_at(const inputs *in, int64_t kv_head) { return (in->heads + kv_head) * in->dim; }
static int64_t value_at(const inputs *in, int64_t kv_head) { return (in->heads + in->kv_heads + kv_head) * in->dim; }
static int64_t round_up(int64_t count, int64_t grain) { return (count + grain - 1) / grain * grain; }
static int64_t at_least(int64_t count, int64_t least) { return count < least ? least : count; }

/* The token of a block's row, and the query's head. */
static int64_t token_of(const inputs *in, const tree *t, const block *b, int64_t row) {
    return t->starts[b->piece] + (b->first + row) / group_of(in);
}
static int64_t head_of(const inputs *in, const block *b, int64_t row) {
    return b->kv_head * group_of(in) + (b->first + row) % group_of(in);
}

/* How many keys of their own piece the rows see: each in `seen`; returns the most. */
static int64_t own_keys(const inputs *in, const tree *t, const block *b, int64_t *seen) {
    for (int64_t r = 0; r < b->count; r++) seen[r] = token_of(in, t, b, r) - t->starts[b->piece] + 1;
    return seen[b->count - 1];
}

static int64_t blocks_of(const inputs *in, const tree *t, int64_t piece) {
    return (t->lengths[piece] * group_of(in) + ROWS - 1) / ROWS;
}

static block nth_block(const inputs *in, const tree *t, int64_t piece, int64_t kv_head, int64_t number) {
    int64_t first = number * ROWS, rows = t->lengths[piece] * group_of(in);
    return (block){piece, kv_head, first, smaller(ROWS, rows - first)};
}

/* Rows [count][dim] as panels [dim][COLUMNS], with zeros beyond the count. */
static void stand_up(const float *rows, int64_t stride, int64_t count, int64_t dim, float *to) {
    for (int64_t first = 0; first < count; first += COLUMNS, to += dim * COLUMNS)
        for (int64_t c = 0; c < COLUMNS; c += 8) {
            int64_t some = count - first - c;
            if (some >= 8) {
                for (int64_t i = 0; i < dim; i += 8)
                    turn_eight(rows + (first + c) * stride + i, stride, to + i * COLUMNS + c, COLUMNS);
                continue;
            }
            for (int64_t i = 0; i < dim; i++)
                for (int64_t j = 0; j < 8; j++)
                    to[i * COLUMNS + c + j] = j < some ? rows[(first + c + j) * stride + i] : 0.0f;
        }
}

/* A block's vectors of `dim` floats, which stand in rows of `stride` by head, to rows of their own, times `scale`. */
static void gather(const inputs *in, const tree *t, const block *b, const float *from, int64_t stride, float scale,
                   float *to) {
    for (int64_t r = 0; r < b->count; r++) {
        const float *row = from + token_of(in, t, b, r) * stride + head_of(in, b, r) * in->dim;
        for (int64_t i = 0; i < in->dim; i++) to[r * in->dim + i] = row[i] * scale;
    }
    for (int64_t r = b->count; r < TRIPLE; r++) memset(to + r * in->dim, 0, sizeof(float) * in->dim);
}

/* A piece that a block's queries see: one above, or the last, its own, of which they see `count` tokens. */
typedef struct {
    int64_t piece, start, count;
    int own;
} sight;

static int64_t sights_of(const tree *t, const block *b) {
    return t->first_above[b->piece + 1] - t->first_above[b->piece] + 1;
}

static sight nth_sight(const tree *t, const block *b, int64_t number, int64_t own_count) {
    int64_t i = t->first_above[b->piece] + number;
    int own = i == t->first_above[b->piece + 1];
    int64_t piece = own ? b->piece : t->above[i];
    return (sight){piece, t->starts[piece], own ? own_count : t->lengths[piece], own};
}

/* scores [rows][columns] of a block's queries with the panels of some keys, or whatever else stands like these. */
static void multiply(const float *rows, int64_t count, int64_t dim, const float *panels, int64_t columns, float *scores,
                     int64_t stride) {
    times(rows, dim, 1, at_least(count, TRIPLE), dim, panels, COLUMNS, dim * COLUMNS, columns, scores, stride, 0);
}

static void forward_block(const inputs *in, const tree *t, const block *b, int64_t longest, float *scratch, float *out,
                          float *sums) {
    int64_t dim = in->dim, seen[ROWS], own = own_keys(in, t, b, seen), keys = 0, rows = at_least(b->count, TRIPLE);
    float *queries = scratch, *mixed = queries + ROWS * dim, *panel = mixed + ROWS * dim;
    float *scores = panel + dim * COLUMNS;
    gather(in, t, b, in->qkv, in->stride, 1.0f / sqrtf((float)dim), queries);
    for (int64_t n = 0; n < sights_of(t, b); n++) {
        const sight s = nth_sight(t, b, n, own);
        for (int64_t from = 0; from < s.count; from += COLUMNS, keys += COLUMNS) {
            int64_t some = smaller(COLUMNS, s.count - from);
            stand_up(in->qkv + (s.start + from) * in->stride + key_at(in, b->kv_head), in->stride, some, dim, panel);
            multiply(queries, b->count, dim, panel, COLUMNS, scores + keys, longest);
            for (int64_t r = 0; r < b->count; r++)
                for (int64_t k = s.own ? at_least(seen[r] - from, 0) : some; k < COLUMNS; k++)
                    scores[r * longest + keys + k] = -INFINITY;
        }
    }
    for (int64_t r = 0; r < b->count; r++) {
        float *row = scores + r * longest, top = -INFINITY, mass = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t k = 0; k < keys; k++) top = row[k] > top ? row[k] : top;
#pragma omp simd reduction(+ : mass)
        for (int64_t k = 0; k < keys; k++) {
            row[k] = exponential(row[k] - top);
            mass += row[k];
        }
        sums[token_of(in, t, b, r) * in->heads + head_of(in, b, r)] = top + logf(mass);
        queries[r] = 1.0f / mass; /* which are not needed any more */
    }
    memset(mixed, 0, sizeof(float) * rows * dim);
    const float *shares = scores;
    for (int64_t n = 0; n < sights_of(t, b); n++) {
        const sight s = nth_sight(t, b, n, own);
        times(shares, longest, 1, rows, s.count, in->qkv + s.start * in->stride + value_at(in, b->kv_head), in->stride,
              COLUMNS, dim, mixed, dim, 1);
        shares += round_up(s.count, COLUMNS);
    }
    for (int64_t r = 0; r < b->count; r++) {
        float *to = out + (token_of(in, t, b, r) * in->heads + head_of(in, b, r)) * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = mixed[r * dim + i] * queries[r];
    }
}

/* `longest`: of all pieces, with those above. `sums`: the logarithm of each softmax's denominator. */
int tree_attention(const inputs *in, const tree *t, int64_t longest, float *out, float *sums, int threads) {
    int64_t *before = malloc(sizeof(int64_t) * (t->pieces + 1));
    if (!before) return 1;
    int64_t most = 0, depth, padded;
    before[0] = 0;
    for (int64_t p = 0; p < t->pieces; p++) {
        before[p + 1] = before[p] + blocks_of(in, t, p) * in->kv_heads;
        depth = t->first_above[p + 1] - t->first_above[p] + 1;
        most = at_least(depth, most);
    }
    padded = round_up(longest + most * COLUMNS, COLUMNS);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (before[t->pieces] > 1)
    {
        float *scratch = malloc(sizeof(float) * (2 * ROWS * in->dim + in->dim * COLUMNS + ROWS * padded));
        if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < before[t->pieces]; task++) {
            if (!scratch) continue;
            int64_t low = 0, high = t->pieces;
            while (high - low > 1) {
                int64_t middle = (low + high) / 2;
                if (before[middle] <= task)
                    low = middle;
                else
                    high = middle;
            }
            int64_t within = task - before[low];
            const block b = nth_block(in, t, low, within % in->kv_heads, within / in->kv_heads);
            forward_block(in, t, &b, padded, scratch, out, sums);
        }
        free(scratch);
    }
    free(before);
    return failed;
}

typedef struct {
    const float *grad, *out, *sums; /* of `out`, that itself, and the logarithms of the denominators */
    float *back;                    /* the gradient of qkv */
} gradient;

/* Pieces that hang together, of one kv head, and every so many of its blocks. */
typedef struct {
    int64_t piece, kv_head, part;
} work;

static int64_t tokens_below(const tree *t, int64_t root) { return t->ends[root] - t->starts[root]; }

/* What the blocks of one work share. Keys and values of all its pieces stand up as panels, each piece's from
 * `first[piece]` on; `pulled` has a row [2][dim] for each token, and some more: what its key and value get back. */
typedef struct {
    int64_t *first;
    float *keys, *values, *pulled;
} shared;

static void stand_all_up(const inputs *in, const tree *t, work w, const shared *with) {
    int64_t place = 0, dim = in->dim;
    for (int64_t p = w.piece; p < t->pieces && t->starts[p] < t->ends[w.piece]; p++) {
        const float *row = in->qkv + t->starts[p] * in->stride;
        with->first[p] = place;
        stand_up(row + key_at(in, w.kv_head), in->stride, t->lengths[p], dim, with->keys + place);
        stand_up(row + value_at(in, w.kv_head), in->stride, t->lengths[p], dim, with->values + place);
        place += round_up(t->lengths[p], COLUMNS) * dim;
    }
}

/* A block's share in all gradients: that of its queries is written, those of keys and values are added to what is pulled
 * of tokens from `start` on. */
static void backward_block(const inputs *in, const tree *t, const gradient *g, const block *b, int64_t start,
                           const shared *with, float *scratch) {
    int64_t dim = in->dim, seen[ROWS], own = own_keys(in, t, b, seen), rows = at_least(b->count, TRIPLE);
    float *queries = scratch, *grads = queries + ROWS * dim, *back = grads + ROWS * dim, *scores = back + ROWS * dim;
    float *pulls = scores + ROWS * CHUNK, scale = 1.0f / sqrtf((float)dim), sums[ROWS], along[ROWS];
    gather(in, t, b, in->qkv, in->stride, scale, queries);
    gather(in, t, b, g->grad, in->heads * dim, 1.0f, grads);
    for (int64_t r = 0; r < b->count; r++) {
        int64_t at = token_of(in, t, b, r) * in->heads + head_of(in, b, r);
        const float *out = g->out + at * dim, *grad = grads + r * dim;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < dim; i++) sum += grad[i] * out[i];
        along[r] = sum;
        sums[r] = g->sums[at];
    }
    memset(back, 0, sizeof(float) * rows * dim);
    for (int64_t n = 0; n < sights_of(t, b); n++) {
        const sight s = nth_sight(t, b, n, own);
        for (int64_t from = 0; from < s.count; from += CHUNK) {
            int64_t some = smaller(CHUNK, s.count - from), columns = round_up(some, WIDE), token = s.start + from;
            int64_t panels = with->first[s.piece] + from * dim;
            multiply(queries, b->count, dim, with->keys + panels, columns, scores, CHUNK);
            multiply(grads, b->count, dim, with->values + panels, columns, pulls, CHUNK);
            for (int64_t r = 0; r < b->count; r++) {
                float *score = scores + r * CHUNK, *pull = pulls + r * CHUNK;
                int64_t visible = s.own ? smaller(some, at_least(seen[r] - from, 0)) : some;
#pragma omp simd
                for (int64_t k = 0; k < columns; k++) {
                    float share = exponential(score[k] - sums[r]);
                    share = k < visible ? share : 0.0f;
                    score[k] = share;
                    pull[k] = share * (pull[k] - along[r]);
                }
            }
            const float *key = in->qkv + token * in->stride + key_at(in, b->kv_head);
            float *to = with->pulled + (token - start) * 2 * dim;
            int64_t least = at_least(some, TRIPLE); /* rows beyond the last key get zeros added */
            times(pulls, 1, CHUNK, least, b->count, queries, dim, COLUMNS, dim, to, 2 * dim, 1);
            times(scores, 1, CHUNK, least, b->count, grads, dim, COLUMNS, dim, to + dim, 2 * dim, 1);
            times(pulls, CHUNK, 1, rows, some, key, in->stride, COLUMNS, dim, back, dim, 1);
        }
    }
    for (int64_t r = 0; r < b->count; r++) {
        float *to = g->back + token_of(in, t, b, r) * in->stride + head_of(in, b, r) * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = back[r * dim + i] * scale;
    }
}

static void backward_part(const inputs *in, const tree *t, const gradient *g, work w, int64_t parts,
                          const shared *with, float *scratch) {
    int64_t number = 0;
    stand_all_up(in, t, w, with);
    memset(with->pulled, 0, sizeof(float) * (tokens_below(t, w.piece) + TRIPLE) * 2 * in->dim);
    for (int64_t p = w.piece; p < t->pieces && t->starts[p] < t->ends[w.piece]; p++)
        for (int64_t n = 0; n < blocks_of(in, t, p); n++, number++) {
            if (number % parts != w.part) continue;
            const block b = nth_block(in, t, p, w.kv_head, n);
            backward_block(in, t, g, &b, t->starts[w.piece], with, scratch);
        }
}

/* A token's gradients of key and value are the sums of its rows [2][dim], which stand `apart`. */
static void add_rows(const float *rows, int64_t parts, int64_t apart, int64_t dim, float *to_key, float *to_value) {
    memcpy(to_key, rows, sizeof(float) * dim);
    memcpy(to_value, rows + dim, sizeof(float) * dim);
    for (int64_t part = 1; part < parts; part++) {
        const float *more = rows + part * apart;
        for (int64_t i = 0; i < dim; i++) {
            to_key[i] += more[i];
            to_value[i] += more[dim + i];
        }
    }
}

int tree_attention_backward(const inputs *in, const tree *t, const float *grad, const float *out, const float *sums,
                            float *back, int threads) {
    int64_t roots = 0, tokens = 0, parts, *root = malloc(sizeof(int64_t) * 2 * t->pieces), *before = root + t->pieces;
    int64_t most = 0, standing = 0; /* tokens of panels, of one root */
    if (!root) return 1;
    for (int64_t p = 0; p < t->pieces; p++) {
        if (t->first_above[p] == t->first_above[p + 1]) { /* `before`: rows of `pulled`, of one part and head */
            before[roots] = tokens;
            root[roots++] = p;
            tokens += tokens_below(t, p) + TRIPLE;
            standing = 0;
        }
        standing += round_up(t->lengths[p], COLUMNS);
        most = at_least(standing, most);
    }
    parts = (PARTS + roots * in->kv_heads - 1) / (roots * in->kv_heads);
    const gradient g = {grad, out, sums, back};
    int64_t dim = in->dim, row = 2 * dim, copies = in->kv_heads * parts;
    float *pulled = malloc(sizeof(float) * tokens * copies * row);
    int failed = !pulled;
#pragma omp parallel num_threads(threads) if (!failed)
    {
        float *panels = malloc(sizeof(float) * (row * most + 3 * ROWS * dim + 2 * ROWS * CHUNK));
        shared with = {malloc(sizeof(int64_t) * t->pieces), panels, panels + most * dim, 0};
        int able = pulled && panels && with.first;
        if (!able) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < roots * copies; task++) {
            if (!able) continue;
            const work w = {root[task / copies], task % copies / parts, task % parts};
            int64_t place = before[task / copies] * copies + (tokens_below(t, w.piece) + TRIPLE) * (task % copies);
            with.pulled = pulled + place * row;
            backward_part(in, t, &g, w, parts, &with, panels + row * most);
        }
#pragma omp for
        for (int64_t task = 0; task < roots * in->kv_heads; task++) {
            if (failed) continue;
            int64_t r = task / in->kv_heads, kv_head = task % in->kv_heads, count = tokens_below(t, root[r]);
            const float *sum = pulled + (before[r] * copies + (count + TRIPLE) * kv_head * parts) * row;
            for (int64_t token = 0; token < count; token++) {
                float *to = back + (t->starts[root[r]] + token) * in->stride;
                add_rows(sum + token * row, parts, (count + TRIPLE) * row, dim, to + key_at(in, kv_head),
                         to + value_at(in, kv_head));
            }
        }
        free(with.first);
        free(panels);
    }
    free(pulled);
    free(root);
    return failed;
}
