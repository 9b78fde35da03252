/* The small operations between matrix products, in float32 on the CPU.
 *
 * Every row (or slot) is worked out by one thread and in one order, so a result never depends on the number of threads
 * or on what else is in the batch. Strides count floats. No header of torch is needed: the caller passes pointers.
 */

#include "kernels.h"

#include <math.h>
#include <string.h>

#define BLOCK 256    /* tokens whose exponentials are summed in float before they are added up in double */
#define POSITIONS 64 /* keys and values that attention looks at in one go: they stay in the first-level cache */

static float largest(const float *x, int64_t size) {
    float best[16];
    for (int j = 0; j < 16; j++) best[j] = -INFINITY;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
    float top = -INFINITY;
    for (; i < size; i++) top = x[i] > top ? x[i] : top;
    for (int j = 0; j < 16; j++) top = best[j] > top ? best[j] : top;
    return top;
}

void rms_norm(const float *x, int64_t x_stride, const float *restrict weight, float *out, float *inverse, int64_t rows,
              int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > 32768)
    for (int64_t n = 0; n < rows; n++) {
        const float *restrict from = x + n * x_stride;
        float *restrict to = out + n * size;
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += from[i] * from[i];
        float scale = 1.0f / sqrtf(squares / (float)size + eps);
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale * weight[i];
        inverse[n] = scale;
    }
}

static void rms_norm_backward_row(const float *restrict grad, const float *restrict x, float inverse,
                                  const float *restrict weight, const float *restrict add, float *restrict to,
                                  float *restrict weight_sum, int64_t size) {
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < size; i++) {
        dot += grad[i] * weight[i] * x[i];
        weight_sum[i] += grad[i] * x[i] * inverse;
    }
    float back = dot * inverse * inverse / (float)size;
    if (add)
        for (int64_t i = 0; i < size; i++) to[i] = (grad[i] * weight[i] - x[i] * back) * inverse + add[i];
    else
        for (int64_t i = 0; i < size; i++) to[i] = (grad[i] * weight[i] - x[i] * back) * inverse;
}

/* `partial` is scratch for the weight's gradient: one row for each chunk of `chunk_rows` rows. */
void rms_norm_backward(const float *grad, int64_t grad_stride, const float *x, int64_t x_stride, const float *inverse,
                       const float *weight, const float *add, int64_t add_stride, float *grad_x, float *partial,
                       float *restrict grad_weight, int64_t rows, int64_t size, int64_t chunk_rows, int threads) {
    int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
#pragma omp parallel for num_threads(threads) if (chunks > 1 && rows * size > 16384)
    for (int64_t c = 0; c < chunks; c++) {
        float *sum = partial + c * size;
        for (int64_t i = 0; i < size; i++) sum[i] = 0.0f;
        for (int64_t n = c * chunk_rows; n < smaller(rows, (c + 1) * chunk_rows); n++)
            rms_norm_backward_row(grad + n * grad_stride, x + n * x_stride, inverse[n], weight,
                                  add ? add + n * add_stride : 0, grad_x + n * size, sum, size);
    }
    for (int64_t i = 0; i < size; i++) grad_weight[i] = 0.0f;
    for (int64_t c = 0; c < chunks; c++) {
        const float *restrict sum = partial + c * size;
        for (int64_t i = 0; i < size; i++) grad_weight[i] += sum[i];
    }
}

void swiglu(const float *gate_up, int64_t stride, float *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > 8192)
    for (int64_t n = 0; n < rows; n++) {
        const float *restrict gate = gate_up + n * stride, *restrict up = gate + width;
        float *restrict to = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}

void swiglu_backward(const float *grad, int64_t grad_stride, const float *gate_up, int64_t stride, float *grad_gate_up,
                     float *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > 8192)
    for (int64_t n = 0; n < rows; n++) {
        const float *restrict gate = gate_up + n * stride, *restrict up = gate + width;
        const float *restrict from = grad + n * grad_stride;
        float *restrict to_gate = grad_gate_up + n * 2 * width, *restrict to_up = to_gate + width;
        float *restrict to = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float share = sigmoid(gate[i]);
            float silu = gate[i] * share;
            to[i] = silu * up[i];
            to_up[i] = from[i] * silu;
            to_gate[i] = from[i] * up[i] * (share * (1.0f + gate[i] * (1.0f - share)));
        }
    }
}

static inline void rotate(const float *from, const float *restrict cosine, const float *restrict sine, float sign,
                          float scale, float *to, int64_t dim) {
    int64_t half = dim / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = from[i], high = from[i + half];
        to[i] = (low * cosine[i] - high * (sign * sine[i])) * scale;
        to[i + half] = (high * cosine[i + half] + low * (sign * sine[i + half])) * scale;
    }
}

void rope(float *x, int64_t stride, const float *cosine, const float *sine, int64_t angle_stride, int64_t rows,
          int64_t heads, int64_t dim, float sign, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * heads * dim > 32768)
    for (int64_t n = 0; n < rows; n++)
        for (int64_t h = 0; h < heads; h++) {
            float *head = x + n * stride + h * dim;
            rotate(head, cosine + n * angle_stride, sine + n * angle_stride, sign, 1.0f, head, dim);
        }
}

/* The sum of each of eight vectors, as one vector. */
static inline lanes sums(const lanes *v) {
    lanes pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   SHUFFLE(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

static inline lanes folded(wide v) {
    const lanes *parts = (const lanes *)&v;
    lanes sum = parts[0];
    if (WIDE > LANES) sum += parts[WIDE / LANES - 1];
    return sum;
}

/* scores[t] = query . keys[t]; what follows `count`, up to the next multiple of WIDE, becomes -inf. */
static inline void score(const float *query, const float *keys, int64_t count, int64_t dim, float *scores) {
    for (int64_t t = 0; t < count; t += LANES) {
        const float *key[LANES];
        wide total[LANES] = {{0}};
        lanes narrow[LANES];
        int64_t i = 0;
        for (int j = 0; j < LANES; j++) key[j] = keys + smaller(t + j, count - 1) * dim;
        for (; i + WIDE <= dim; i += WIDE) {
            wide q = *(const wide *)(query + i);
            for (int j = 0; j < LANES; j++) total[j] += q * *(const wide *)(key[j] + i);
        }
        for (int j = 0; j < LANES; j++) narrow[j] = folded(total[j]);
        if (i < dim)
            for (int j = 0; j < LANES; j++) narrow[j] += *(const lanes *)(query + i) * *(const lanes *)(key[j] + i);
        *(lanes *)(scores + t) = sums(narrow);
    }
    for (int64_t t = count; t % WIDE; t++) scores[t] = -INFINITY;
}

/* out = out * keep + sum over t of shares[t] * values[t], for some `vectors` of the head: 1, 2 or 4. */
static inline __attribute__((always_inline)) void mix(const float *shares, const float *values, int64_t count,
                                                      int64_t dim, float keep, float *out, const int vectors) {
    const int chains = 8 / vectors; /* sums that do not wait for each other */
    wide total[8] = {{0}};
    int64_t t = 0;
    for (; t + chains <= count; t += chains)
        for (int c = 0; c < chains; c++)
            for (int j = 0; j < vectors; j++)
                total[c * vectors + j] += shares[t + c] * *(const wide *)(values + (t + c) * dim + j * WIDE);
    for (; t < count; t++)
        for (int j = 0; j < vectors; j++) total[j] += shares[t] * *(const wide *)(values + t * dim + j * WIDE);
    for (int half = 4; half >= vectors; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    for (int j = 0; j < vectors; j++) *(wide *)(out + j * WIDE) = *(wide *)(out + j * WIDE) * keep + total[j];
}

static void mix_narrow(const float *shares, const float *values, int64_t count, int64_t dim, float keep, float *out) {
    lanes total = *(lanes *)out * keep;
    for (int64_t t = 0; t < count; t++) total += shares[t] * *(const lanes *)(values + t * dim);
    *(lanes *)out = total;
}

/* By halves: compilers add or compare the numbers of a vector one after the other. */
static inline float sum_of(const float *numbers) {
    float half[WIDE / 2];
    for (int i = 0; i < WIDE / 2; i++) half[i] = numbers[i] + numbers[i + WIDE / 2];
    for (int size = WIDE / 4; size; size /= 2)
        for (int i = 0; i < size; i++) half[i] += half[i + size];
    return half[0];
}

static inline float largest_of(const float *numbers) {
    float half[WIDE / 2];
    for (int i = 0; i < WIDE / 2; i++)
        half[i] = numbers[i] > numbers[i + WIDE / 2] ? numbers[i] : numbers[i + WIDE / 2];
    for (int size = WIDE / 4; size; size /= 2)
        for (int i = 0; i < size; i++) half[i] = half[i] > half[i + size] ? half[i] : half[i + size];
    return half[0];
}

/* One query over `count` more positions: `top` and `mass` carry the running maximum and sum of the softmax. */
static void attend(const float *query, const float *keys, const float *values, int64_t count, int64_t dim, float *top,
                   float *mass, float *out) {
    float shares[POSITIONS], tops[WIDE], masses[WIDE] = {0};
    score(query, keys, count, dim, shares);
    for (int j = 0; j < WIDE; j++) tops[j] = shares[j];
    for (int64_t t = WIDE; t < count; t += WIDE)
        for (int j = 0; j < WIDE; j++) tops[j] = shares[t + j] > tops[j] ? shares[t + j] : tops[j];
    float best = largest_of(tops);
    best = best > *top ? best : *top;
    for (int64_t t = 0; t < count; t += WIDE)
        for (int j = 0; j < WIDE; j++) {
            shares[t + j] = exponential(shares[t + j] - best);
            masses[j] += shares[t + j];
        }
    float keep = exponential(*top - best);
    *mass = *mass * keep + sum_of(masses);
    *top = best;
    int64_t i = 0;
    for (; i + 4 * WIDE <= dim; i += 4 * WIDE) mix(shares, values + i, count, dim, keep, out + i, 4);
    for (; i + 2 * WIDE <= dim; i += 2 * WIDE) mix(shares, values + i, count, dim, keep, out + i, 2);
    for (; i + WIDE <= dim; i += WIDE) mix(shares, values + i, count, dim, keep, out + i, 1);
    if (i < dim) mix_narrow(shares, values + i, count, dim, keep, out + i);
}

void decode_group(const float *query, const float *key, const float *value, const float *cosine, const float *sine,
                  float *keys, float *values, const float *stem_keys, const float *stem_values, int64_t stem_length,
                  int64_t length, int64_t group, int64_t dim, float *out) {
    float rotated[group * dim], top[group], mass[group], scale = 1.0f / sqrtf((float)dim);
    rotate(key, cosine, sine, 1.0f, 1.0f, keys + length * dim, dim);
    for (int64_t i = 0; i < dim; i++) values[length * dim + i] = value[i];
    for (int64_t h = 0; h < group; h++) {
        rotate(query + h * dim, cosine, sine, 1.0f, scale, rotated + h * dim, dim);
        top[h] = -INFINITY;
        mass[h] = 0.0f;
    }
    memset(out, 0, sizeof(float) * group * dim);
    for (int64_t from = 0, count; from <= length; from += count) {
        int in_stem = from < stem_length;
        count = smaller(POSITIONS, (in_stem ? stem_length : length + 1) - from);
        for (int64_t h = 0; h < group; h++)
            attend(rotated + h * dim, (in_stem ? stem_keys : keys) + from * dim,
                   (in_stem ? stem_values : values) + from * dim, count, dim, top + h, mass + h, out + h * dim);
    }
    for (int64_t h = 0; h < group; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] /= mass[h];
}

/* Returns 0, or 1 if a slot is full: then nothing was written. */
int decode_attention(const float *qkv, int64_t qkv_stride, const float *cosine, const float *sine,
                     int64_t angle_stride, float *keys, float *values, const int64_t *lengths, float *out,
                     int64_t slots, int64_t heads, int64_t kv_heads, int64_t capacity, int64_t dim, int threads) {
    int64_t group = heads / kv_heads, work = 0;
    for (int64_t b = 0; b < slots; b++) {
        if (lengths[b] < 0 || lengths[b] >= capacity) return 1;
        work += (lengths[b] + 1) * heads * dim;
    }
    /* dynamic: slots are of different lengths, and each is done by one thread from end to end all the same */
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (slots * kv_heads > 1 && work > 16384)
    for (int64_t task = 0; task < slots * kv_heads; task++) {
        int64_t b = task / kv_heads, h = task % kv_heads;
        const float *row = qkv + b * qkv_stride;
        decode_group(row + h * group * dim, row + (heads + h) * dim, row + (heads + kv_heads + h) * dim,
                     cosine + b * angle_stride, sine + b * angle_stride, keys + task * capacity * dim,
                     values + task * capacity * dim, 0, 0, 0, lengths[b], group, dim,
                     out + (b * heads + h * group) * dim);
    }
    return 0;
}

void chosen_logprob(float *restrict row, int64_t size, int64_t target, float temperature, float *logprob,
                    float *entropy) {
    if (temperature != 1.0f)
        for (int64_t i = 0; i < size; i++) row[i] /= temperature;
    float top = largest(row, size);
    float chosen = target >= 0 && target < size ? row[target] : NAN;
    double mass = 0.0, weighted = 0.0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        float sum = 0.0f, product = 0.0f;
        int64_t end = smaller(size, from + BLOCK);
#pragma omp simd reduction(+ : sum, product)
        for (int64_t i = from; i < end; i++) {
            float below = row[i] - top;
            float e = exponential(below);
            row[i] = e;
            sum += e;
            product += e * (below < -104.0f ? -104.0f : below); /* not 0 * inf for a token that is ruled out */
        }
        mass += sum;
        weighted += product;
    }
    float scale = (float)(1.0 / mass);
    for (int64_t i = 0; i < size; i++) row[i] *= scale;
    *logprob = (float)((double)chosen - top - log(mass));
    *entropy = (float)(log(mass) - weighted / mass);
}

void chosen_logprobs(float *logits, int64_t stride, const int64_t *targets, const float *temperatures, float *logprobs,
                     float *entropies, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > 8192)
    for (int64_t n = 0; n < rows; n++)
        chosen_logprob(logits + n * stride, size, targets[n], temperatures[n], logprobs + n, entropies + n);
}

/* The first of `ends` above `draw`; rounding may leave none, and then it is the last that rises at all. */
static int64_t falls_on(const double *ends, int64_t count, double draw) {
    for (int64_t i = 0; i < count; i++)
        if (ends[i] > draw) return i;
    int64_t last = count - 1;
    while (last > 0 && !(ends[last] > ends[last - 1])) last--;
    return last;
}

static uint64_t scrambled(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* SplitMix64 */
double uniform_number(uint64_t seed, uint64_t position) {
    const uint64_t stride = 0x9E3779B97F4A7C15u;
    uint64_t state = scrambled(seed + stride) + (position + 1) * stride;
    return (double)(scrambled(state) >> 11) * 0x1p-53;
}

int64_t sample_row(const float *row, int64_t size, double uniform, float *logprob) {
    float top = largest(row, size);
    int64_t blocks = (size + BLOCK - 1) / BLOCK;
    double mass = 0.0, ends[blocks];
    for (int64_t k = 0; k < blocks; k++) {
        float sum = 0.0f;
        int64_t end = smaller(size, (k + 1) * BLOCK);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = k * BLOCK; i < end; i++) sum += exponential(row[i] - top);
        mass += sum;
        ends[k] = mass;
    }
    double draw = uniform * mass;
    int64_t block = falls_on(ends, blocks, draw), first = block * BLOCK, count = smaller(BLOCK, size - first);
    double before = block ? ends[block - 1] : 0.0, share = (draw - before) / (ends[block] - before);
    share = share < 0.0 ? 0.0 : share > 1.0 - 1e-12 ? 1.0 - 1e-12 : share;
    float shares[BLOCK];
    double inside[BLOCK], sum = 0.0;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) shares[i] = exponential(row[first + i] - top);
    for (int64_t i = 0; i < count; i++) inside[i] = sum += (double)shares[i];
    int64_t token = first + falls_on(inside, count, share * sum);
    *logprob = (float)((double)row[token] - top - log(mass));
    return token;
}

void sample(const float *logits, int64_t stride, const double *uniforms, int64_t *tokens, float *logprobs, int64_t rows,
            int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > 8192)
    for (int64_t n = 0; n < rows; n++)
        tokens[n] = sample_row(logits + n * stride, size, uniforms[n], logprobs + n);
}
