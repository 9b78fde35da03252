/* One step of decoding a Llama-like model: every slot's next token through all layers, in a single parallel region.
 *
 * Activations stand in panels of COLUMNS slots side by side, feature by feature ([panels][features][COLUMNS], padded with
 * zeros), so that a product multiplies vectors of slots by single weights: rows of a weight are read as they lie in
 * memory, once, and nothing is laid out beforehand. A slot's numbers never depend on the other slots or on the number
 * of threads: each is summed up by one thread, in one order.
 */

#include "tiles.h"

#include <math.h>
#include <string.h>

typedef struct {
    const float *weight, *bias; /* [outputs][inputs]; no bias: null */
    int64_t outputs, inputs;
} linear;

typedef struct {
    linear qkv, out, gate_up, down;
    const float *norm_1, *norm_2, *q_norm, *k_norm; /* of the last two: null where heads are not normed */
} layer;

typedef struct {
    const layer *layers;
    int64_t depth, width, heads, kv_heads, dim;
    const float *embedding, *norm;
    float eps;
} decoder;

typedef enum { STORED, ADDED, GATED, BY_SLOT } ending;

static int64_t panels_for(int64_t slots) { return (slots + COLUMNS - 1) / COLUMNS; }

/* Where a slot's first feature stands; the next is COLUMNS further on. */
static int64_t place_of(int64_t slot, int64_t features) { return slot / COLUMNS * features * COLUMNS + slot % COLUMNS; }

INLINE float bias_of(const linear *l, int64_t output) { return l->bias ? l->bias[output] : 0.0f; }

/* This thread's share of the outputs of a product. GATED: silu(first half) * second half. BY_SLOT: to
 * [slots][outputs]; else to panels. */
INLINE void product(const linear *l, const float *x, float *to, int64_t slots, int thread, int threads,
                    const ending how) {
    int64_t outputs = how == GATED ? l->outputs / 2 : l->outputs, step = how == GATED ? TILE / 2 : TILE;
    int64_t tiles = (outputs + step - 1) / step;
    for (int64_t tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; tile++) {
        const float *rows[GROUPS];
        int64_t wanted[GROUPS], first[GROUPS]; /* the last triple may begin earlier than wanted, so as not to overrun */
        for (int g = 0; g < GROUPS; g++) {
            int second = how == GATED && g >= GROUPS / 2;
            wanted[g] = tile * step + TRIPLE * (second ? g - GROUPS / 2 : g);
            first[g] = smaller(wanted[g], outputs - TRIPLE);
            rows[g] = l->weight + (second * outputs + first[g]) * l->inputs;
        }
        for (int64_t c = 0; c < slots; c += COLUMNS) {
            wide sums[TILE][2];
            int vectors = slots - c > WIDE ? 2 : 1;
            int64_t ahead = c ? 0 : step * l->inputs;
            const float *panel = x + c * l->inputs;
            if (vectors == 2)
                tile_sums(rows, l->inputs, 1, l->inputs, panel, COLUMNS, ahead, sums, 2);
            else
                tile_sums(rows, l->inputs, 1, l->inputs, panel, COLUMNS, ahead, sums, 1);
            if (how == BY_SLOT) {
                for (int64_t i = 0; i < smaller(vectors * WIDE, slots - c); i++)
                    for (int j = 0; j < TILE; j++) {
                        int64_t o = first[j / TRIPLE] + j % TRIPLE;
                        to[(c + i) * outputs + o] = ((const float *)sums[j])[i] + bias_of(l, o);
                    }
                continue;
            }
            for (int j = 0; j < (how == GATED ? TILE / 2 : TILE); j++) {
                int64_t o = first[j / TRIPLE] + j % TRIPLE;
                if (o < wanted[j / TRIPLE]) continue; /* another triple's */
                const float *sum = (const float *)sums[j], *second = (const float *)sums[j + TILE / 2];
                float *row = to + c * outputs + o * COLUMNS, bias = bias_of(l, o);
                float second_bias = how == GATED ? bias_of(l, outputs + o) : 0.0f;
#pragma omp simd
                for (int i = 0; i < vectors * WIDE; i++) {
                    float value = sum[i] + bias;
                    if (how == STORED) row[i] = value;
                    if (how == ADDED) row[i] += value;
                    if (how == GATED) row[i] = value / (1.0f + exponential(-value)) * (second[i] + second_bias);
                }
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

/* Heads of one slot, normed if they are to be. */
static void take_heads(const float *column, int64_t count, int64_t dim, const float *norm, float eps, float *to) {
    for (int64_t i = 0; i < count * dim; i++) to[i] = column[i * COLUMNS];
    for (int64_t h = 0; norm && h < count; h++) {
        float squares = 0.0f, *head = to + h * dim;
        for (int64_t i = 0; i < dim; i++) squares += head[i] * head[i];
        float scale = 1.0f / sqrtf(squares / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) head[i] *= scale * norm[i];
    }
}

/* Of one layer: [slots][kv heads][capacity][dim]; a slot's first positions may be in another, its stem. */
typedef struct {
    float *keys, *values;
    int64_t capacity;
    const int64_t *stem_slots, *stem_lengths;
} cache;

static void attention_of(const decoder *m, const layer *l, const float *qkv, int64_t slot, int64_t head,
                         const float *cosine, const float *sine, const cache *held, int64_t length, float *mixed) {
    int64_t group = m->heads / m->kv_heads, dim = m->dim, size = held->capacity * dim;
    int64_t own = (slot * m->kv_heads + head) * size, stem = (held->stem_slots[slot] * m->kv_heads + head) * size;
    float query[group * dim], key[dim], value[dim];
    const float *column = qkv + place_of(slot, l->qkv.outputs);
    take_heads(column + head * group * dim * COLUMNS, group, dim, l->q_norm, m->eps, query);
    take_heads(column + (m->heads + head) * dim * COLUMNS, 1, dim, l->k_norm, m->eps, key);
    take_heads(column + (m->heads + m->kv_heads + head) * dim * COLUMNS, 1, dim, 0, 0.0f, value);
    decode_group(query, key, value, cosine, sine, held->keys + own, held->values + own, held->keys + stem,
                 held->values + stem, held->stem_lengths[slot], length, group, dim,
                 mixed + (slot * m->heads + head * group) * dim);
}

static int64_t widest(const decoder *m) {
    int64_t inner = m->layers[0].down.inputs, mixed = m->heads * m->dim, most = m->width;
    most = inner > most ? inner : most;
    return mixed > most ? mixed : most;
}

/* Floats of scratch that `decode` needs. */
int64_t decode_scratch(const decoder *m, int64_t slots, int threads) {
    int64_t floats = m->width + m->layers[0].qkv.outputs + m->heads * m->dim + (threads + 1) * widest(m);
    return panels_for(slots) * COLUMNS * floats;
}

/* `cosine` and `sine` have a row for each position; keys and values a pointer for each layer. Writes the normed states
 * [slots][width]. Returns 0, or 1 if a slot is full: then nothing was written. */
int decode(const decoder *m, const int64_t *ids, const int64_t *lengths, const float *cosine, const float *sine,
           float *const *keys, float *const *values, const int64_t *stem_slots, const int64_t *stem_lengths,
           int64_t capacity, int64_t slots, float *scratch, float *hidden, int threads) {
    int64_t columns = panels_for(slots) * COLUMNS, width = m->width, kv_heads = m->kv_heads, dim = m->dim;
    int64_t mixed_width = m->heads * dim;
    for (int64_t b = 0; b < slots; b++)
        if (lengths[b] < 0 || lengths[b] >= capacity) return 1;
    float *x = scratch, *qkv = x + width * columns, *mixed = qkv + m->layers[0].qkv.outputs * columns;
    float *inner = mixed + mixed_width * columns, *own = inner + widest(m) * columns;
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size();
        float *y = own + thread * widest(m) * columns;
#pragma omp for
        for (int64_t b = 0; b < columns; b++)
            for (int64_t i = 0; i < width; i++)
                x[place_of(b, width) + i * COLUMNS] = b < slots ? m->embedding[ids[b] * width + i] : 0.0f;
        for (int64_t n = 0; n < m->depth; n++) {
            const layer *l = m->layers + n;
            norm_slots(x, l->norm_1, y, width, slots, m->eps);
            product(&l->qkv, y, qkv, slots, thread, team, STORED);
#pragma omp barrier
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < slots * kv_heads; task++) { /* slots of one stem stand side by side */
                int64_t b = task % slots, place = lengths[b] * dim;
                const cache held = {keys[n], values[n], capacity, stem_slots, stem_lengths};
                attention_of(m, l, qkv, b, task / slots, cosine + place, sine + place, &held, lengths[b], mixed);
            }
            stand_up(mixed, y, slots, mixed_width);
            product(&l->out, y, x, slots, thread, team, ADDED);
#pragma omp barrier
            norm_slots(x, l->norm_2, y, width, slots, m->eps);
            product(&l->gate_up, y, inner, slots, thread, team, GATED);
#pragma omp barrier
            product(&l->down, inner, x, slots, thread, team, ADDED);
#pragma omp barrier
        }
        norm_slots(x, m->norm, y, width, slots, m->eps);
#pragma omp for
        for (int64_t b = 0; b < slots; b++)
            for (int64_t i = 0; i < width; i++) hidden[b * width + i] = y[place_of(b, width) + i * COLUMNS];
    }
    return 0;
}

/* out [slots][outputs] of x [slots][inputs]. `scratch` has a padded copy of x for each thread. */
void few_rows(const float *weight, const float *bias, int64_t outputs, int64_t inputs, const float *x, float *out,
              int64_t slots, float *scratch, int threads) {
    const linear l = {weight, bias, outputs, inputs};
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size();
        float *y = scratch + thread * inputs * panels_for(slots) * COLUMNS;
        stand_up(x, y, slots, inputs);
        product(&l, y, out, slots, thread, team, BY_SLOT);
    }
}
