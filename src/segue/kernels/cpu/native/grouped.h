/* GEMMs with 4- or 8-bit weights, `(number - zero) * scale`, with a scale and zero per group of inputs.
 * Included by kernels.c after body.h, once for each instruction set. Weights are dequantised while loading a register,
 * or, for many rows, once for all of them: sums equal those of a GEMM with the same floats.
 *
 * A panel has, group by group, its scales and then its numbers: 8 or 4 inputs of an output per word, the first in the
 * low bits, each as its distance from the middle (8 or 128) in two's complement. Scales are a row of words, whose
 * upper 20 bits are those of the scale (the rest of it is 0) and whose lower 12 are `zero - middle` in sixteenths; or
 * two rows of floats, scales and zeros. */

/* Location of the scales of an input's group; its numbers follow. */
static inline const float *NAME(group_of)(const float *w, size_t input, const struct grouped *as)
{
    return w + input / as->group * (as->scales + as->group / as->inputs) * PANEL;
}

/* For a group, by column: a weight is `number * scale + shift`, with its number counted from the middle. */
static inline __attribute__((always_inline)) void NAME(group_scales)(const float *from, size_t rows, const int bits,
                                                                     VEC *scale, VEC *shift)
{
    const float middle = (float)(1 << (bits - 1));
#pragma GCC unroll 3
    for (size_t column = 0; column < COLUMNS; column++) {
        const VEC first = LOAD(from + column * LANES);
        if (rows == 2) {
            scale[column] = first;
            shift[column] = (middle - LOAD(from + PANEL + column * LANES)) * first;
            continue;
        }
        scale[column] = (VEC)((BITS)first & -4096);
        shift[column] = __builtin_convertvector(((BITS)first << 20) >> 20, VEC) * -0.0625f * scale[column];
    }
}

/* Location of the numbers from `input` on, up to `end` or the end of its group, whose scales are read. */
static inline __attribute__((always_inline)) const float *NAME(group_from)(const float *w, size_t input, size_t *end,
                                                                           const struct grouped *as, const int bits,
                                                                           VEC *scale, VEC *shift)
{
    const float *const from = NAME(group_of)(w, input, as);
    const size_t within = input % as->group, behind = input + as->group - within;
    *end = behind < *end ? behind : *end;
    NAME(group_scales)(from, as->scales, bits, scale, shift);
    return from + (as->scales + within / as->inputs) * PANEL;
}

/* Number `place` of each word, as a float. */
static inline __attribute__((always_inline)) VEC NAME(number)(BITS words, const int bits, const size_t place)
{
#if LANES == 16
    const VEC four = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    if (bits == 4) /* the lookup uses the lower four bits of a word and ignores the others */
        return (VEC)_mm512_permutexvar_ps((__m512i)(words >> (int)(4 * place)), (__m512)four);
#endif
    const int above = 32 - bits - bits * (int)place;
    return __builtin_convertvector((words << above) >> (32 - bits), VEC);
}

/* y = on + x w: `rows` of x, a constant, and `depth` inputs of a panel from input `first` on. */
static inline __attribute__((always_inline)) void NAME(grouped_tile)(const size_t rows, const int bits, const float *x,
                                                                     size_t x_row, const float *w, size_t first,
                                                                     size_t depth, const struct grouped *as,
                                                                     const float *on, size_t on_row, float *y,
                                                                     size_t y_row)
{
    VEC sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (size_t column = 0; column < COLUMNS; column++)
            sum[row][column] = (VEC){0};
    const size_t inputs = 32 / bits;
    for (size_t k = 0; k < depth;) {
        VEC scale[COLUMNS], shift[COLUMNS];
        size_t end = first + depth;
        const float *from = NAME(group_from)(w, first + k, &end, as, bits, scale, shift);
        for (end -= first; k < end; k += inputs, from += PANEL) {
            BITS words[COLUMNS];
#pragma GCC unroll 3
            for (size_t column = 0; column < COLUMNS; column++) {
                __builtin_prefetch(from + GROUPED_AHEAD * PANEL + column * LANES);
                words[column] = (BITS)LOAD(from + column * LANES);
            }
#pragma GCC unroll 8
            for (size_t place = 0; place < inputs; place++) {
                if (rows > ROWS - 2) /* sums use all registers, so these are read from memory */
                    __asm__ volatile("" : : "r"(scale), "r"(shift), "r"(words) : "memory");
                VEC weight[COLUMNS];
#pragma GCC unroll 3
                for (size_t column = 0; column < COLUMNS; column++)
                    weight[column] = NAME(number)(words[column], bits, place) * scale[column] + shift[column];
#pragma GCC unroll 8
                for (size_t row = 0; row < rows; row++) {
                    if (rows > ROWS - 2) /* and x only when it is needed */
                        __asm__ volatile("" : : : "memory");
                    const float given = x[row * x_row + k + place];
#pragma GCC unroll 3
                    for (size_t column = 0; column < COLUMNS; column++)
                        sum[row][column] += given * weight[column];
                }
            }
        }
    }
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (size_t column = 0; column < COLUMNS; column++)
            STORE(y + row * y_row + column * LANES, LOAD(on + row * on_row + column * LANES) + sum[row][column]);
}

/* Dequantise the same inputs of a panel to floats. */
static inline __attribute__((always_inline)) void NAME(widen)(const int bits, const float *w, size_t first, size_t depth,
                                                              const struct grouped *as, float *to)
{
    const size_t inputs = 32 / bits;
    for (size_t k = 0; k < depth;) {
        VEC scale[COLUMNS], shift[COLUMNS];
        size_t end = first + depth;
        const float *from = NAME(group_from)(w, first + k, &end, as, bits, scale, shift);
        for (end -= first; k < end; k += inputs, from += PANEL)
#pragma GCC unroll 3
            for (size_t column = 0; column < COLUMNS; column++) {
                __builtin_prefetch(from + GROUPED_AHEAD * PANEL + column * LANES);
                const BITS words = (BITS)LOAD(from + column * LANES);
#pragma GCC unroll 8
                for (size_t place = 0; place < inputs; place++)
                    STORE(to + (k + place) * PANEL + column * LANES,
                          NAME(number)(words, bits, place) * scale[column] + shift[column]);
            }
    }
}

/* One panel: y[rows, PANEL] = bias + x[rows, inputs] w[inputs, PANEL], in stretches like those of floats: a row's
 * result does not depend on the other rows. */
static inline __attribute__((always_inline)) void NAME(grouped_bits)(const int bits, const float *x, size_t rows,
                                                                     size_t inputs, const float *w,
                                                                     const struct grouped *as, const float *bias,
                                                                     float *y, size_t y_row)
{
    const size_t blocks = (rows + ROWS - 1) / ROWS, least = rows / blocks, more = rows % blocks;
    float whole[STRETCH * PANEL] __attribute__((aligned(64)));
    for (size_t first = 0, depth; first < inputs; first += depth) {
        depth = inputs - first < STRETCH ? inputs - first : STRETCH;
        const float *const on = first ? y : bias;
        const size_t on_row = first ? y_row : 0;
#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        NAME(grouped_tile)(rows, bits, x + first, inputs, w, first, depth, as, on, on_row, y, y_row);                  \
        continue;
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 8
            CASE(7) CASE(8)
#endif
        }
#undef CASE
        NAME(widen)(bits, w, first, depth, as, whole);
        /* the second block prefetches the next numbers, a line per input */
        const size_t within = (first + depth) % as->group / as->inputs;
        const float *const next = NAME(group_of)(w, first + depth, as) + within * PANEL;
        for (size_t block = 0, row = 0, count; block < blocks; block++, row += count) {
            count = least + (block < more);
            NAME(tiles)[count](x + row * inputs + first, inputs, whole, depth, on + row * on_row, on_row,
                               y + row * y_row, y_row, block == 1 ? next : whole, block == 1 ? 16 : PANEL);
        }
    }
}

static void NAME(grouped)(const float *x, size_t rows, size_t inputs, const float *w, const struct grouped *as,
                          const float *bias, float *y, size_t y_row)
{
    if (as->inputs == 8)
        NAME(grouped_bits)(4, x, rows, inputs, w, as, bias, y, y_row);
    else
        NAME(grouped_bits)(8, x, rows, inputs, w, as, bias, y, y_row);
}
