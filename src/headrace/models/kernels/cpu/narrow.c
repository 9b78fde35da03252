/* Layers whose weights stay in the second-level cache of a core, forward and backward.
 *
 * A thread takes a block of tokens through all that follows each other without looking at other tokens, so that what is
 * in between never leaves its cache either; a library's matrix product would write and read all of it for each step.
 * Of the weights' gradients every thread has sums of its own, which are added up at the end: for a given number of
 * threads they are the same to the bit.
 */

#include "tiles.h"

#include <math.h>
#include <string.h>

#define BLOCK 48         /* tokens */
#define APART (2 * WIDE) /* floats between scratch rows, lest they all fall on the same places of the cache */

typedef struct {
    const float *weight; /* [outputs][inputs] */
    int64_t outputs, inputs;
} linear;

static int64_t floats_of(const linear *l) { return l->outputs * l->inputs; }

/* Floats that a weight may take when it is packed: the last panel may be filled up. */
static int64_t packed_floats(const linear *l) { return floats_of(l) + COLUMNS * (l->outputs + l->inputs); }

/* A weight as panels of COLUMNS columns: of the weight (to multiply gradients by), or of its transpose. All threads. */
static void pack(const linear *l, int transposed, float *to) {
    int64_t rows = transposed ? l->inputs : l->outputs, columns = transposed ? l->outputs : l->inputs;
#pragma omp for
    for (int64_t first = 0; first < columns; first += COLUMNS) {
        int64_t count = smaller(COLUMNS, columns - first);
        float *panel = to + first * rows;
        if (transposed)
            for (int64_t r = 0; r < rows; r += WIDE)
                for (int64_t c = 0; c < count; c++)
                    for (int64_t i = r; i < smaller(r + WIDE, rows); i++)
                        panel[i * COLUMNS + c] = l->weight[(first + c) * l->inputs + i];
        else
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < count; c++) panel[r * COLUMNS + c] = l->weight[r * l->inputs + first + c];
    }
}

static int64_t round_up(int64_t count, int64_t grain) { return (count + grain - 1) / grain * grain; }

/* out [rows][outputs] = (or +=) x times the transposed weight, as packed. Rows of `out` are a multiple of WIDE apart; what
 * is between them is written to. */
static void forward(const linear *l, const float *packed, const float *x, int64_t x_row, int64_t rows, float *out,
                    int add) {
    int64_t columns = round_up(l->outputs, WIDE);
    if (add)
        times(x, x_row, 1, rows, l->inputs, packed, COLUMNS, l->inputs * COLUMNS, columns, out, columns, 1);
    else
        times(x, x_row, 1, rows, l->inputs, packed, COLUMNS, l->inputs * COLUMNS, columns, out, columns, 0);
}

/* back [rows][inputs] = grad times the weight, as packed. */
static void backward(const linear *l, const float *packed, const float *grad, int64_t grad_row, int64_t rows,
                     float *back, int64_t back_row) {
    times(grad, grad_row, 1, rows, l->outputs, packed, COLUMNS, l->outputs * COLUMNS, l->inputs, back, back_row, 0);
}

/* The gradient of the weight, of some rows more; `begun`: it has some already. */
static void weight_gradient(const linear *l, const float *grad, int64_t grad_row, const float *x, int64_t x_row,
                            int64_t rows, float *sum, int begun) {
    if (begun)
        times(grad, 1, grad_row, l->outputs, rows, x, x_row, COLUMNS, l->inputs, sum, l->inputs, 1);
    else
        times(grad, 1, grad_row, l->outputs, rows, x, x_row, COLUMNS, l->inputs, sum, l->inputs, 0);
}

/* Adds the other threads' sums, which stand `apart`, to the first one's. All threads. */
static void add_up(float *sum, const float *sums, int64_t apart, int64_t count, int team) {
#pragma omp for
    for (int64_t from = 0; from < count; from += 1024)
        for (int thread = 1; thread < team; thread++) {
            const float *other = sums + thread * apart;
#pragma omp simd
            for (int64_t i = from; i < smaller(from + 1024, count); i++) sum[i] += other[i];
        }
}

typedef struct {
    const float *weight;
    float eps;
} norm;

static void norm_rows(const norm *n, const float *x, int64_t rows, int64_t width, float *to, float *inverse) {
    for (int64_t r = 0; r < rows; r++, x += width, to += width) {
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
        float scale = 1.0f / sqrtf(squares / (float)width + n->eps);
        for (int64_t i = 0; i < width; i++) to[i] = x[i] * scale * n->weight[i];
        inverse[r] = scale;
    }
}

/* The norm again, as it was. */
static void norm_rows_again(const norm *n, const float *x, const float *inverse, int64_t rows, int64_t width,
                            float *to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i++) to[r * width + i] = x[r * width + i] * inverse[r] * n->weight[i];
}

/* `more` is added to what x gets back. */
static void norm_rows_backward(const norm *n, const float *grad, const float *x, const float *inverse,
                               const float *more, int64_t rows, int64_t width, float *back, float *weight_sum) {
    const float *restrict weight = n->weight;
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict from = grad + r * width, *restrict input = x + r * width;
        float *restrict to = back + r * width, *restrict sum = weight_sum, dot = 0.0f, scale = inverse[r];
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < width; i++) {
            dot += from[i] * weight[i] * input[i];
            sum[i] += from[i] * input[i] * scale;
        }
        float along = dot * scale * scale / (float)width;
        for (int64_t i = 0; i < width; i++)
            to[i] = (from[i] * weight[i] - input[i] * along) * scale + more[r * width + i];
    }
}

/* Blocks are of nearly the same size: none has fewer than TRIPLE tokens as long as there are so many at all. */
static int64_t blocks_for(int64_t tokens) { return (tokens + BLOCK - 1) / BLOCK; }
static int64_t begin_of(int64_t block, int64_t tokens) { return tokens * block / blocks_for(tokens); }

/* Floats of scratch for layers of so many weights, whose inputs and outputs are so many `features` together. */
int64_t narrow_scratch(int64_t weights, int64_t features, int threads) {
    return weights + COLUMNS * features + threads * (weights + features + BLOCK * (2 * features + 2 * APART));
}

/* out = linear(norm(x)) */
void narrow_normed_linear(const float *x, const float *norm_weight, float eps, const float *weight, int64_t outputs,
                          int64_t inputs, int64_t tokens, float *out, float *inverse, float *scratch, int threads) {
    const linear l = {weight, outputs, inputs};
    const norm n = {norm_weight, eps};
    float *packed = scratch, *own = packed + packed_floats(&l);
#pragma omp parallel num_threads(threads)
    {
        float *normed = own + thread_number() * BLOCK * inputs;
        pack(&l, 1, packed);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            norm_rows(&n, x + from * inputs, rows, inputs, normed, inverse + from);
            forward(&l, packed, normed, inputs, rows, out + from * outputs, 0);
        }
    }
}

/* What x gets back, and `more`. */
void narrow_normed_linear_backward(const float *grad, const float *more, const float *x, const float *inverse,
                                   const float *norm_weight, const float *weight, int64_t outputs, int64_t inputs,
                                   int64_t tokens, float *back, float *grad_norm, float *grad_weight, float *scratch,
                                   int threads) {
    const linear l = {weight, outputs, inputs};
    const norm n = {norm_weight, 0.0f};
    int64_t sums = floats_of(&l) + inputs, apart = sums + 2 * BLOCK * inputs;
    float *packed = scratch, *owned = packed + packed_floats(&l);
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size(), begun = 0;
        float *own = owned + thread * apart, *normed = own + sums, *grad_normed = normed + BLOCK * inputs;
        float *sum = thread ? own : grad_weight, *norm_sum = thread ? own + floats_of(&l) : grad_norm;
        memset(norm_sum, 0, sizeof(float) * inputs);
        pack(&l, 0, packed);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            const float *some = grad + from * outputs, *input = x + from * inputs;
            norm_rows_again(&n, input, inverse + from, rows, inputs, normed);
            weight_gradient(&l, some, outputs, normed, inputs, rows, sum, begun);
            backward(&l, packed, some, outputs, rows, grad_normed, inputs);
            norm_rows_backward(&n, grad_normed, input, inverse + from, more + from * inputs, rows, inputs,
                               back + from * inputs, norm_sum);
            begun = 1;
        }
        if (!begun) memset(sum, 0, sizeof(float) * floats_of(&l));
#pragma omp barrier
        add_up(grad_weight, owned, apart, floats_of(&l), team);
        add_up(grad_norm, owned + floats_of(&l), apart, inputs, team);
    }
}

/* out = x + linear(y) */
void narrow_linear_added(const float *x, const float *y, const float *weight, int64_t outputs, int64_t inputs,
                         int64_t tokens, float *out, float *scratch, int threads) {
    const linear l = {weight, outputs, inputs};
#pragma omp parallel num_threads(threads)
    {
        pack(&l, 1, scratch);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            memcpy(out + from * outputs, x + from * outputs, sizeof(float) * rows * outputs);
            forward(&l, scratch, y + from * inputs, inputs, rows, out + from * outputs, 1);
        }
    }
}

/* What y gets back; x gets `grad` itself. */
void narrow_linear_added_backward(const float *grad, const float *y, const float *weight, int64_t outputs,
                                  int64_t inputs, int64_t tokens, float *back, float *grad_weight, float *scratch,
                                  int threads) {
    const linear l = {weight, outputs, inputs};
    float *packed = scratch, *owned = packed + packed_floats(&l);
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size(), begun = 0;
        float *sum = thread ? owned + thread * floats_of(&l) : grad_weight;
        pack(&l, 0, packed);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            const float *some = grad + from * outputs;
            weight_gradient(&l, some, outputs, y + from * inputs, inputs, rows, sum, begun);
            backward(&l, packed, some, outputs, rows, back + from * inputs, inputs);
            begun = 1;
        }
        if (!begun) memset(sum, 0, sizeof(float) * floats_of(&l));
#pragma omp barrier
        add_up(grad_weight, owned, floats_of(&l), floats_of(&l), team);
    }
}

/* out = x + down(silu(gate) * up) of norm(x); `opened` [tokens][2 * inner] keeps gate and up. */
void narrow_feed_forward(const float *x, const float *norm_weight, float eps, const float *gate_up, const float *down,
                         int64_t width, int64_t inner, int64_t tokens, float *out, float *inverse, float *opened,
                         float *scratch, int threads) {
    const linear opening = {gate_up, 2 * inner, width}, closing = {down, width, inner};
    const norm n = {norm_weight, eps};
    float *packed_opening = scratch, *packed_closing = packed_opening + packed_floats(&opening);
    float *own = packed_closing + packed_floats(&closing);
#pragma omp parallel num_threads(threads)
    {
        float *normed = own + thread_number() * BLOCK * (width + inner), *mixed = normed + BLOCK * width;
        pack(&opening, 1, packed_opening);
        pack(&closing, 1, packed_closing);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            float *both = opened + from * 2 * inner, *to = out + from * width;
            norm_rows(&n, x + from * width, rows, width, normed, inverse + from);
            forward(&opening, packed_opening, normed, width, rows, both, 0);
            for (int64_t r = 0; r < rows; r++) {
                const float *restrict gate = both + r * 2 * inner, *restrict up = gate + inner;
                float *restrict into = mixed + r * inner;
#pragma omp simd
                for (int64_t i = 0; i < inner; i++) into[i] = gate[i] * sigmoid(gate[i]) * up[i];
            }
            memcpy(to, x + from * width, sizeof(float) * rows * width);
            forward(&closing, packed_closing, mixed, inner, rows, to, 1);
        }
    }
}

void narrow_feed_forward_backward(const float *grad, const float *x, const float *inverse, const float *opened,
                                  const float *norm_weight, const float *gate_up, const float *down, int64_t width,
                                  int64_t inner, int64_t tokens, float *back, float *grad_norm, float *grad_gate_up,
                                  float *grad_down, float *scratch, int threads) {
    const linear opening = {gate_up, 2 * inner, width}, closing = {down, width, inner};
    const norm n = {norm_weight, 0.0f};
    int64_t both_row = 2 * inner + APART, mixed_row = inner + APART, all = floats_of(&opening) + floats_of(&closing);
    int64_t sums = all + width, apart = sums + BLOCK * (2 * width + both_row + mixed_row);
    float *packed_opening = scratch, *packed_closing = packed_opening + packed_floats(&opening);
    float *owned = packed_closing + packed_floats(&closing);
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size(), begun = 0;
        float *own = owned + thread * apart, *normed = own + sums, *grad_normed = normed + BLOCK * width;
        float *both = grad_normed + BLOCK * width, *mixed = both + BLOCK * both_row;
        float *opening_sum = thread ? own : grad_gate_up;
        float *closing_sum = thread ? own + floats_of(&opening) : grad_down;
        float *norm_sum = thread ? own + all : grad_norm;
        memset(norm_sum, 0, sizeof(float) * width);
        pack(&opening, 0, packed_opening);
        pack(&closing, 0, packed_closing);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            const float *some = grad + from * width, *input = x + from * width;
            backward(&closing, packed_closing, some, width, rows, mixed, mixed_row);
            for (int64_t r = 0; r < rows; r++) {
                const float *restrict gate = opened + (from + r) * 2 * inner, *restrict up = gate + inner;
                float *restrict to_gate = both + r * both_row, *restrict to_up = to_gate + inner;
                float *restrict pull = mixed + r * mixed_row;
#pragma omp simd
                for (int64_t i = 0; i < inner; i++) {
                    float share = sigmoid(gate[i]), silu = gate[i] * share, from_above = pull[i];
                    to_up[i] = from_above * silu;
                    to_gate[i] = from_above * up[i] * (share * (1.0f + gate[i] * (1.0f - share)));
                    pull[i] = silu * up[i]; /* what `closing` was given */
                }
            }
            weight_gradient(&closing, some, width, mixed, mixed_row, rows, closing_sum, begun);
            norm_rows_again(&n, input, inverse + from, rows, width, normed);
            weight_gradient(&opening, both, both_row, normed, width, rows, opening_sum, begun);
            backward(&opening, packed_opening, both, both_row, rows, grad_normed, width);
            norm_rows_backward(&n, grad_normed, input, inverse + from, some, rows, width, back + from * width, norm_sum);
            begun = 1;
        }
        if (!begun) {
            memset(opening_sum, 0, sizeof(float) * floats_of(&opening));
            memset(closing_sum, 0, sizeof(float) * floats_of(&closing));
        }
#pragma omp barrier
        add_up(grad_gate_up, owned, apart, floats_of(&opening), team);
        add_up(grad_down, owned + floats_of(&opening), apart, floats_of(&closing), team);
        add_up(grad_norm, owned + all, apart, width, team);
    }
}

/* Floats between rows of `probs`: how many stand in a vector depends on the processor. */
int64_t narrow_probs_row(int64_t outputs) { return round_up(outputs, WIDE); }

/* Log-probabilities of targets, with their distributions' entropies. `probs` [tokens][outputs, rounded up to WIDE] keeps
 * the probabilities. */
void narrow_chosen_logprobs(const float *x, const float *weight, int64_t outputs, int64_t inputs, int64_t tokens,
                            const int64_t *targets, const float *temperatures, float *probs, float *logprobs,
                            float *entropies, float *scratch, int threads) {
    const linear l = {weight, outputs, inputs};
    int64_t probs_row = round_up(outputs, WIDE);
#pragma omp parallel num_threads(threads)
    {
        pack(&l, 1, scratch);
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            forward(&l, scratch, x + from * inputs, inputs, rows, probs + from * probs_row, 0);
            for (int64_t n = from; n < from + rows; n++)
                chosen_logprob(probs + n * probs_row, outputs, targets[n], temperatures[n], logprobs + n, entropies + n);
        }
    }
}

/* What x gets back; `grad` [tokens] is that of the log-probabilities, over the temperatures. */
void narrow_chosen_logprobs_backward(const float *grad, const float *x, const float *probs, const int64_t *targets,
                                     const float *weight, int64_t outputs, int64_t inputs, int64_t tokens, float *back,
                                     float *grad_weight, float *scratch, int threads) {
    const linear l = {weight, outputs, inputs};
    int64_t probs_row = round_up(outputs, WIDE), row = outputs + APART, apart = floats_of(&l) + BLOCK * row;
    float *packed = scratch, *owned = packed + packed_floats(&l);
#pragma omp parallel num_threads(threads)
    {
        int thread = thread_number(), team = team_size(), begun = 0;
        float *own = owned + thread * apart, *logits = own + floats_of(&l), *sum = thread ? own : grad_weight;
        pack(&l, 0, packed);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks_for(tokens); block++) {
            int64_t from = begin_of(block, tokens), rows = begin_of(block + 1, tokens) - from;
            for (int64_t r = 0; r < rows; r++) {
                const float *restrict share = probs + (from + r) * probs_row;
                const float pull = -grad[from + r];
                float *restrict to = logits + r * row;
                for (int64_t i = 0; i < outputs; i++) to[i] = share[i] * pull;
                to[targets[from + r]] -= pull;
            }
            weight_gradient(&l, logits, row, x + from * inputs, inputs, rows, sum, begun);
            backward(&l, packed, logits, row, rows, back + from * inputs, inputs);
            begun = 1;
        }
        if (!begun) memset(sum, 0, sizeof(float) * floats_of(&l));
#pragma omp barrier
        add_up(grad_weight, owned, apart, floats_of(&l), team);
    }
}
