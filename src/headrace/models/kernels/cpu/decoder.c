/* Decoding with a Llama-like model: every slot's next token through all layers, step by step in one parallel region.
 *
 * Activations stand in panels of COLUMNS slots side by side, feature by feature ([panels][features][COLUMNS], padded with
 * zeros), so that a product multiplies vectors of slots by single weights: rows of a weight are read as they lie in
 * memory, once, and nothing is laid out beforehand. A slot's numbers never depend on the other slots or on the number
 * of threads: each is summed up by one thread, in one order. Only with small weights (small.h), few slots are summed up in
 * another order than many.
 */

#include "small.h"

#include <math.h>
#include <string.h>

typedef struct {
    float *weight;     /* [outputs][inputs] */
    const float *bias; /* or null */
    int64_t outputs, inputs;
    const float *original; /* or null; then the weight is this one rounded to fewer bits, in which `small` has it: */
    void *small;           /* as bytes if there are scales of the rows, else as bfloat16 */
    float *scales;
} linear;

typedef struct layer {
    linear qkv, out, gate_up, down;
    const float *norm_1, *norm_2, *q_norm, *k_norm; /* of the last two: null where heads are not normed */
} layer;

typedef struct {
    const layer *layers;
    int64_t depth, width, heads, kv_heads, dim;
    const float *embedding, *norm;
    linear head;
    float eps;
} decoder;

/* What is decoded: keys and values have a pointer for each layer, to [slots][kv heads][capacity][dim], of which the batch
 * has some from `first` on; a slot's first positions may be in another, its stem. `cosine` and `sine` have a row for each
 * position. */
typedef struct {
    const int64_t *lengths, *stem_slots, *stem_lengths;
    const float *cosine, *sine;
    float *const *keys, *const *values;
    int64_t capacity, slots, first;
} batch;

/* Those who decode a batch together, and which of them this thread is. */
typedef struct {
    int thread, threads;
} team;

/* Waits for the others. */
static void meet(team t) {
    if (t.threads > 1) {
#pragma omp barrier
    }
}

typedef enum { STORED, ADDED, GATED, BY_SLOT } ending;

static int64_t panels_for(int64_t slots) { return (slots + COLUMNS - 1) / COLUMNS; }

/* Where a slot's first feature stands; the next is COLUMNS further on. */
static int64_t place_of(int64_t slot, int64_t features) { return slot / COLUMNS * features * COLUMNS + slot % COLUMNS; }

INLINE float bias_of(const linear *l, int64_t output) { return l->bias ? l->bias[output] : 0.0f; }

/* The rows of a weight that a tile is about: TRIPLE from each `row` on, which are outputs from `first` on. The last triple
 * may begin earlier than wanted, so as not to overrun. */
typedef struct {
    int64_t row[GROUPS], first[GROUPS], wanted[GROUPS];
} tile_rows;

INLINE tile_rows rows_of_tile(int64_t tile, int64_t outputs, const ending how) {
    tile_rows t;
    for (int g = 0; g < GROUPS; g++) {
        int second = how == GATED && g >= GROUPS / 2;
        t.wanted[g] = tile * (how == GATED ? TILE / 2 : TILE) + TRIPLE * (second ? g - GROUPS / 2 : g);
        t.first[g] = smaller(t.wanted[g], outputs - TRIPLE);
        t.row[g] = second * outputs + t.first[g];
    }
    return t;
}

/* What becomes of the sums of a tile, for slots from `c` on. */
INLINE void end_tile(const linear *l, const tile_rows *at, wide (*sums)[2], float *to, int64_t outputs, int64_t slots,
                     int64_t c, const int vectors, const ending how) {
    if (how == BY_SLOT) {
        for (int64_t i = 0; i < smaller(vectors * WIDE, slots - c); i++)
            for (int j = 0; j < TILE; j++) {
                int64_t o = at->first[j / TRIPLE] + j % TRIPLE;
                to[(c + i) * outputs + o] = ((const float *)sums[j])[i] + bias_of(l, o);
            }
        return;
    }
    for (int j = 0; j < (how == GATED ? TILE / 2 : TILE); j++) {
        int64_t o = at->first[j / TRIPLE] + j % TRIPLE;
        if (o < at->wanted[j / TRIPLE]) continue; /* another triple's */
        const float *sum = (const float *)sums[j], *second = (const float *)sums[j + TILE / 2];
        float *row = to + c * outputs + o * COLUMNS, bias = bias_of(l, o);
        float second_bias = how == GATED ? bias_of(l, outputs + o) : 0.0f;
#pragma omp simd
        for (int i = 0; i < vectors * WIDE; i++) {
            float value = sum[i] + bias;
            if (how == STORED) row[i] = value;
            if (how == ADDED) row[i] += value;
            if (how == GATED) row[i] = value * sigmoid(value) * (second[i] + second_bias);
        }
    }
}

/* This thread's share of the outputs of a product. GATED: silu(first half) * second half. BY_SLOT: to
 * [slots][outputs]; else to panels. With `own`, this thread's scratch, slots are laid down there and multiplied by the
 * small weights. */
INLINE void product(const linear *l, const float *x, float *to, int64_t slots, team t, float *own, const ending how) {
    int64_t outputs = how == GATED ? l->outputs / 2 : l->outputs, step = how == GATED ? TILE / 2 : TILE;
    int64_t tiles = (outputs + step - 1) / step, inputs = l->inputs;
    int few = l->small && own;
    if (few) lay_down(x, inputs, own, inputs);
    for (int64_t tile = tiles * t.thread / t.threads; tile < tiles * (t.thread + 1) / t.threads; tile++) {
        const tile_rows at = rows_of_tile(tile, outputs, how);
        const float *rows[GROUPS];
        wide sums[TILE][2];
        if (few) {
            for (int g = 0; g < GROUPS; g++) {
                fetch_triple(l->small, l->scales, at.row[g] + step, inputs);
                dots(l->small, l->scales, at.row[g], inputs, own, slots, sums + g * TRIPLE);
            }
            end_tile(l, &at, sums, to, outputs, slots, 0, 1, how);
            continue;
        }
        for (int g = 0; g < GROUPS; g++) rows[g] = l->weight + at.row[g] * inputs;
        for (int64_t c = 0; c < slots; c += COLUMNS) {
            int64_t ahead = c ? 0 : step * inputs;
            const float *panel = x + c * inputs;
            if (slots - c > WIDE) {
                tile_sums(rows, inputs, 1, inputs, panel, COLUMNS, ahead, sums, GROUPS, 2);
                end_tile(l, &at, sums, to, outputs, slots, c, 2, how);
            } else {
                tile_sums(rows, inputs, 1, inputs, panel, COLUMNS, ahead, sums, GROUPS, 1);
                end_tile(l, &at, sums, to, outputs, slots, c, 1, how);
            }
        }
    }
}

/* RMS norm of every slot. */
static void norm_slots(const float *x, const float *weight, float *to, int64_t features, int64_t slots, float eps) {
    for (int64_t b = 0; b < slots; b += WIDE) {
        const float *from = x + place_of(b, features);
        float *into = to + place_of(b, features);
        wide squares = {0};
        for (int64_t i = 0; i < features; i++) {
            wide some = *(const wide *)(from + i * COLUMNS);
            squares += some * some;
        }
        wide scale;
        for (int j = 0; j < WIDE; j++) scale[j] = 1.0f / sqrtf(squares[j] / (float)features + eps);
        for (int64_t i = 0; i < features; i++)
            *(wide *)(into + i * COLUMNS) = *(const wide *)(from + i * COLUMNS) * scale * weight[i];
    }
}

/* [slots][features] to panels. */
static void stand_up(const float *x, float *to, int64_t slots, int64_t features) {
    memset(to, 0, sizeof(float) * panels_for(slots) * features * COLUMNS);
    for (int64_t first = 0; first < slots; first += COLUMNS)
        for (int64_t from = 0; from < features; from += WIDE) /* few lines at a time: they stay in the nearest cache */
            for (int64_t b = first; b < smaller(first + COLUMNS, slots); b++)
                for (int64_t i = from; i < smaller(from + WIDE, features); i++)
                    to[place_of(b, features) + i * COLUMNS] = x[b * features + i];
}

static void norm_head(float *head, int64_t dim, const float *weight, float eps) {
    float squares = 0.0f;
    for (int64_t i = 0; i < dim; i++) squares += head[i] * head[i];
    float scale = 1.0f / sqrtf(squares / (float)dim + eps);
    for (int64_t i = 0; i < dim; i++) head[i] *= scale * weight[i];
}

/* Where keys or values of a slot begin that are its own, from position `from` on. */
static const float *own_at(const decoder *m, const batch *b, const float *held, int64_t slot, int64_t head,
                           int64_t from) {
    return held + (((b->first + slot) * m->kv_heads + head) * b->capacity + from) * m->dim;
}

#define AHEAD 1024 /* floats that are fetched of the next slot: from there on, the processor has seen the pattern */

static void fetch(const decoder *m, const batch *b, int64_t layer, int64_t slot, int64_t head, int64_t length) {
    int64_t from = b->stem_lengths[slot], floats = smaller((length - from) * m->dim, AHEAD);
    const float *keys = own_at(m, b, b->keys[layer], slot, head, from);
    const float *values = own_at(m, b, b->values[layer], slot, head, from);
    for (int64_t i = 0; i < floats; i += 16) {
        __builtin_prefetch(keys + i, 0, 2);
        __builtin_prefetch(values + i, 0, 2);
    }
    for (int64_t i = (length - from) * m->dim, end = i + m->dim; i < end; i += 16) { /* where it will be written to */
        __builtin_prefetch(keys + i, 1, 3);
        __builtin_prefetch(values + i, 1, 3);
    }
}

/* `row`: the slot's queries that share a key and value head, its key and its value. */
static void attention_of(const decoder *m, const batch *b, int64_t layer, int64_t slot, int64_t head, int64_t length,
                         float *row, float *mixed) {
    const struct layer *l = m->layers + layer;
    int64_t group = m->heads / m->kv_heads, dim = m->dim, size = b->capacity * dim, angle = length * dim;
    int64_t own = ((b->first + slot) * m->kv_heads + head) * size, stem = (b->stem_slots[slot] * m->kv_heads + head) * size;
    float *key = row + group * dim, *value = key + dim, out[group * dim];
    float *keys = b->keys[layer], *values = b->values[layer];
    for (int64_t h = 0; l->q_norm && h < group; h++) norm_head(row + h * dim, dim, l->q_norm, m->eps);
    if (l->k_norm) norm_head(key, dim, l->k_norm, m->eps);
    decode_group(row, key, value, b->cosine + angle, b->sine + angle, keys + own, values + own, keys + stem,
                 values + stem, b->stem_lengths[slot], length, group, dim, out);
    float *to = mixed + place_of(slot, m->heads * dim) + head * group * dim * COLUMNS;
    for (int64_t i = 0; i < group * dim; i++) to[i * COLUMNS] = out[i];
}

/* A thread's share of attention: pairs of slot and head, counted slot by slot, from `first` to before `end`. */
typedef struct {
    int64_t first, end;
} share;

/* As many positions as the others have, as nearly as can be. It is the same thread that sees a slot in every step, so
 * that keys and values stay in its cache. */
static share share_of(const decoder *m, const batch *b, team t) {
    int64_t total = 0, before = 0;
    share mine = {0, 0};
    for (int64_t slot = 0; slot < b->slots; slot++) total += m->kv_heads * (b->lengths[slot] + 1);
    for (int64_t slot = 0; slot < b->slots; slot++)
        for (int64_t head = 0; head < m->kv_heads; head++, before += b->lengths[slot] + 1) {
            mine.first += before * t.threads < total * t.thread;
            mine.end += before * t.threads < total * (t.thread + 1);
        }
    return mine;
}

static void attend_share(const decoder *m, const batch *b, share mine, int64_t layer, int64_t fed, const float *qkv,
                         float *mixed) {
    int64_t kv_heads = m->kv_heads, group = m->heads / kv_heads, dim = m->dim, stride = (group + 2) * dim;
    float rows[LANES * stride];
    for (int64_t head = 0; head < kv_heads; head++) { /* slots of one stem, which stand side by side, read the same */
        int64_t begin = (mine.first - head + kv_heads - 1) / kv_heads, end = (mine.end - head + kv_heads - 1) / kv_heads;
        for (int64_t slot = begin; slot < end; slot++) {
            if (slot == begin || slot % LANES == 0) {
                const float *columns = qkv + place_of(slot / LANES * LANES, m->layers[layer].qkv.outputs);
                lay_down(columns + head * group * dim * COLUMNS, group * dim, rows, stride);
                lay_down(columns + (m->heads + head) * dim * COLUMNS, dim, rows + group * dim, stride);
                lay_down(columns + (m->heads + kv_heads + head) * dim * COLUMNS, dim, rows + (group + 1) * dim, stride);
            }
            if (slot + 1 < end) fetch(m, b, layer, slot + 1, head, b->lengths[slot + 1] + fed);
            attention_of(m, b, layer, slot, head, b->lengths[slot] + fed, rows + slot % LANES * stride, mixed);
        }
    }
}

static int64_t widest(const decoder *m) {
    int64_t inner = m->layers[0].down.inputs, mixed = m->heads * m->dim, most = m->width;
    most = inner > most ? inner : most;
    return mixed > most ? mixed : most;
}

/* What a thread needs to lay few slots down. */
static int64_t own_floats(const decoder *m) { return FEW * widest(m); }

/* Floats of scratch for slots that a team of so many decodes. */
static int64_t scratch_for(const decoder *m, int64_t slots, int threads) {
    int64_t floats = m->width + m->layers[0].qkv.outputs + m->heads * m->dim + (threads + 1) * widest(m);
    return panels_for(slots) * COLUMNS * floats + threads * own_floats(m);
}

static int64_t even_share(int64_t slots, int threads) { return (slots + threads - 1) / threads; }

/* Floats of scratch that decoding needs, whichever way. */
int64_t decode_scratch(const decoder *m, int64_t slots, int threads) {
    int64_t together = scratch_for(m, slots, threads), apart = threads * scratch_for(m, even_share(slots, threads), 1);
    return together > apart ? together : apart;
}

/* In panels: what passes through the layers, and this thread's copy of what is normed; and its own for products, null
 * where the whole batch is not of few slots: how a slot is summed up must not depend on how many a thread has of it. */
typedef struct {
    float *x, *qkv, *mixed, *inner, *normed, *own;
} states;

static states states_in(const decoder *m, int64_t slots, float *scratch, team t, int few) {
    int64_t columns = panels_for(slots) * COLUMNS;
    states s = {.x = scratch};
    s.qkv = s.x + m->width * columns;
    s.mixed = s.qkv + m->layers[0].qkv.outputs * columns;
    s.inner = s.mixed + m->heads * m->dim * columns;
    s.normed = s.inner + (t.thread + 1) * widest(m) * columns;
    s.own = few ? s.inner + (t.threads + 1) * widest(m) * columns + t.thread * own_floats(m) : 0;
    return s;
}

/* One step, by all of a team; `fed` tokens have been fed since the lengths were counted. Ends with the normed states. */
static void step(const decoder *m, const batch *b, team t, share mine, const int64_t *ids, int64_t fed,
                 const states *s) {
    int64_t width = m->width, slots = b->slots, columns = panels_for(slots) * COLUMNS;
    for (int64_t slot = columns * t.thread / t.threads; slot < columns * (t.thread + 1) / t.threads; slot++)
        for (int64_t i = 0; i < width; i++)
            s->x[place_of(slot, width) + i * COLUMNS] = slot < slots ? m->embedding[ids[slot] * width + i] : 0.0f;
    meet(t);
    for (int64_t n = 0; n < m->depth; n++) {
        const layer *l = m->layers + n;
        norm_slots(s->x, l->norm_1, s->normed, width, slots, m->eps);
        product(&l->qkv, s->normed, s->qkv, slots, t, s->own, STORED);
        meet(t);
        attend_share(m, b, mine, n, fed, s->qkv, s->mixed);
        meet(t);
        product(&l->out, s->mixed, s->x, slots, t, s->own, ADDED);
        meet(t);
        norm_slots(s->x, l->norm_2, s->normed, width, slots, m->eps);
        product(&l->gate_up, s->normed, s->inner, slots, t, s->own, GATED);
        meet(t);
        product(&l->down, s->inner, s->x, slots, t, s->own, ADDED);
        meet(t);
    }
    norm_slots(s->x, m->norm, s->normed, width, slots, m->eps);
}

static int has_room(const batch *b, int64_t steps) {
    for (int64_t slot = 0; slot < b->slots; slot++)
        if (b->lengths[slot] < 0 || b->lengths[slot] + steps > b->capacity) return 0;
    return 1;
}

/* Unused columns of what attention writes into: they are multiplied along with the others. */
static void clear(const decoder *m, int64_t slots, float *scratch) {
    states s = states_in(m, slots, scratch, (team){0, 1}, 0);
    memset(s.mixed, 0, sizeof(float) * m->heads * m->dim * panels_for(slots) * COLUMNS);
}

/* Writes the normed states [slots][width]. Returns 0, or 1 if a slot is full: then nothing was written. */
int decode(const decoder *m, const batch *b, const int64_t *ids, float *scratch, float *hidden, int threads) {
    if (!has_room(b, 1)) return 1;
    clear(m, b->slots, scratch);
#pragma omp parallel num_threads(threads)
    {
        const team all = {thread_number(), team_size()};
        const states s = states_in(m, b->slots, scratch, all, b->slots <= FEW);
        step(m, b, all, share_of(m, b, all), ids, 0, &s);
#pragma omp for
        for (int64_t slot = 0; slot < b->slots; slot++)
            for (int64_t i = 0; i < m->width; i++)
                hidden[slot * m->width + i] = s.normed[place_of(slot, m->width) + i * COLUMNS];
    }
    return 0;
}

static int is_one_of(int64_t token, const int64_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] == token) return 1;
    return 0;
}

#define NEAR (1 << 21) /* weights that stay in the cache which cores share, so that each of them may read them all */

/* Whether every thread had better decode slots of its own, where no one waits for another within a step: with weights
 * that are near, and as many vectors of slots for each. */
static int decodes_apart(const decoder *m, int64_t slots, int threads) {
    int64_t weights = m->head.outputs * m->head.inputs;
    for (int64_t n = 0; n < m->depth; n++) {
        const layer *l = m->layers + n;
        const linear *parts[] = {&l->qkv, &l->out, &l->gate_up, &l->down};
        for (int i = 0; i < 4; i++) weights += parts[i]->outputs * parts[i]->inputs;
    }
    return threads > 1 && weights <= NEAR && (slots + WIDE - 1) / WIDE % threads == 0;
}

/* A thread's own part of a batch. */
static batch part_of(const batch *b, int thread, int threads) {
    int64_t size = even_share(b->slots, threads), first = smaller(thread * size, b->slots);
    batch part = *b;
    part.first = b->first + first;
    part.slots = smaller(size, b->slots - first);
    part.lengths += first;
    part.stem_slots += first;
    part.stem_lengths += first;
    return part;
}

/* Where tokens come from and go to: [steps][slots], a row after the other. */
typedef struct {
    const int64_t *ids, *positions, *stops;
    const uint64_t *seeds;
    int64_t stop_count, slots, *tokens;
    float *logits, *logprobs;
} drawing;

/* One more token for every slot of a part of the batch; whether one of them is a stop. */
static int step_and_sample(const decoder *m, const batch *b, team t, share mine, const states *s, int64_t fed,
                           const drawing *d) {
    int64_t vocabulary = m->head.outputs, first = b->first, row = fed * d->slots + first;
    float *logits = d->logits + first * vocabulary;
    step(m, b, t, mine, fed ? d->tokens + row - d->slots : d->ids + first, fed, s);
    product(&m->head, s->normed, logits, b->slots, t, s->own, BY_SLOT);
    meet(t);
    int stopped = 0;
    for (int64_t slot = b->slots * t.thread / t.threads; slot < b->slots * (t.thread + 1) / t.threads; slot++) {
        double uniform = uniform_number(d->seeds[first + slot], (uint64_t)(d->positions[first + slot] + fed));
        int64_t token = sample_row(logits + slot * vocabulary, vocabulary, uniform, d->logprobs + row + slot);
        d->tokens[row + slot] = token;
        stopped |= is_one_of(token, d->stops, d->stop_count);
    }
    return stopped;
}

/* Up to `most` steps, each with the tokens that the last one sampled, until one of them is a `stop`. Slot b's next token
 * is the one at `positions[b]` of what its seed gives. Writes tokens and log-probabilities [steps][slots]; `logits` is
 * scratch for a row for each slot. Returns the number of steps, or -1 if a slot has no room for them all. */
int64_t decode_and_sample(const decoder *m, const batch *b, const int64_t *ids, const uint64_t *seeds,
                          const int64_t *positions, const int64_t *stops, int64_t stop_count, int64_t most,
                          float *scratch, float *logits, int64_t *tokens, float *logprobs, int threads) {
    if (!has_room(b, most)) return -1;
    const drawing d = {ids, positions, stops, seeds, stop_count, b->slots, tokens, logits, logprobs};
    int64_t last = most;
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team_threads = team_size(), apart = decodes_apart(m, b->slots, team_threads);
        const team t = apart ? (team){0, 1} : (team){thread, team_threads};
        const batch part = apart ? part_of(b, thread, team_threads) : *b;
        float *own = apart ? scratch + thread * scratch_for(m, even_share(b->slots, team_threads), 1) : scratch;
        const states s = states_in(m, part.slots, own, t, b->slots <= FEW);
        const share mine = share_of(m, &part, t);
        if (t.thread == 0) clear(m, part.slots, own);
#pragma omp barrier
        for (int64_t fed = 0, end = most; fed < end; fed++) {
            if (step_and_sample(m, &part, t, mine, &s, fed, &d)) {
#pragma omp atomic write
                last = fed + 1; /* not a mere flag: others may be about to look whether the step before was the last */
            }
#pragma omp barrier
#pragma omp atomic read
            end = last;
        }
    }
    return last;
}

/* out [slots][outputs] of x [slots][inputs]. `scratch` has a padded copy of x for each thread. */
void few_rows(const float *weight, const float *bias, int64_t outputs, int64_t inputs, const float *x, float *out,
              int64_t slots, float *scratch, int threads) {
    const linear l = {(float *)weight, bias, outputs, inputs, 0, 0, 0};
#pragma omp parallel num_threads(threads)
    {
        const team all = {thread_number(), team_size()};
        float *y = scratch + all.thread * inputs * panels_for(slots) * COLUMNS;
        stand_up(x, y, slots, inputs);
        product(&l, y, out, slots, all, 0, BY_SLOT);
    }
}

/* Logits [slots][vocabulary] of normed states [slots][width], as `decode` writes them. */
void head_logits(const decoder *m, const float *hidden, float *logits, int64_t slots, float *scratch, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const team all = {thread_number(), team_size()};
        const states s = states_in(m, slots, scratch, all, slots <= FEW);
        stand_up(hidden, s.normed, slots, m->width);
        product(&m->head, s.normed, logits, slots, all, s.own, BY_SLOT);
    }
}

static void shrink_linear(const linear *l) {
#pragma omp for nowait
    for (int64_t row = 0; row < l->outputs; row++) {
        int64_t at = row * l->inputs;
        shrink_row(l->original + at, row, l->inputs, l->small, l->scales, l->weight + at);
    }
}

/* Rounds all weights anew, from what the originals are now. */
void shrink(const decoder *m, int threads) {
#pragma omp parallel num_threads(threads)
    {
        for (int64_t n = 0; n < m->depth; n++) {
            const layer *l = m->layers + n;
            shrink_linear(&l->qkv);
            shrink_linear(&l->out);
            shrink_linear(&l->gate_up);
            shrink_linear(&l->down);
        }
        shrink_linear(&m->head);
    }
}
