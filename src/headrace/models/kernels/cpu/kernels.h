/* What the sources share. */

#pragma once

#include <stdint.h>

#define LANES 8 /* a head is a multiple of this many floats */

#ifdef __AVX512F__
#define WIDE 16
#else
#define WIDE LANES
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t order __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif

#ifdef _OPENMP
#include <omp.h>
static inline int thread_number(void) { return omp_get_thread_num(); }
static inline int team_size(void) { return omp_get_num_threads(); }
#else
static inline int thread_number(void) { return 0; }
static inline int team_size(void) { return 1; }
#endif

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* e to the x within 2 ulp, in a form that compilers vectorise. NaN for NaN and 0 below -87, where floats lose digits;
 * above 88 it stays at e to the 88, which no caller can tell from infinity. */
static inline float exponential(float x) {
    const float magic = 12582912.0f + 127.0f; /* adding 1.5 * 2^23 rounds; 127 is the bias of a float's exponent */
    float bound = x < -87.3f ? -87.3f : x;
    bound = bound > 88.0f ? 88.0f : bound;
    union { float number; uint32_t bits; } rounded = {bound * 1.44269504088896341f + magic};
    float whole = rounded.number - magic;
    float r = bound - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    union { uint32_t bits; float number; } power = {rounded.bits << 23};
    return x < -87.3f ? 0.0f : p * power.number;
}

/* 1 / (1 + e to the -x) within 4 ulp of 1: a division would take longer than all the rest. */
static inline float sigmoid(float x) {
    float power = exponential(-x), below = 1.0f + (power < 1e36f ? power : 1e36f); /* or the guess would overrun */
    union { float number; uint32_t bits; } guess = {below};
    guess.bits = 0x7EF311C7u - guess.bits; /* the exponent negated: within an eighth of the inverse */
    float inverse = guess.number;
    for (int step = 0; step < 3; step++) inverse *= 2.0f - below * inverse; /* Newton's */
    return inverse;
}

/* Attention of one slot's new token, for the query heads that share one key and value head. The first `stem_length`
 * positions are read from the stem's keys and values. */
void decode_group(const float *query, const float *key, const float *value, const float *cosine, const float *sine,
                  float *keys, float *values, const float *stem_keys, const float *stem_values, int64_t stem_length,
                  int64_t length, int64_t group, int64_t dim, float *out);

/* Logits become the probabilities softmax(logits / temperature); the target's log-probability, and the entropy. */
void chosen_logprob(float *row, int64_t size, int64_t target, float temperature, float *logprob, float *entropy);

/* A number in [0, 1) that depends on seed and position alone. */
double uniform_number(uint64_t seed, uint64_t position);

/* The token that a uniform number falls on, and its log-probability. */
int64_t sample_row(const float *logits, int64_t size, double uniform, float *logprob);
