/* int8 GEMMs: int8 weights with a scale per output, activations rounded to int8 with a scale per row.
 * Included by kernels.c once for each instruction set, which defines
 *   NAME(x)   the name of a function in this set
 *   LANES     words in a vector
 *   COLUMNS   adjacent vectors in a panel
 *   ROWS      rows of activations in a tile of a GEMM
 *   ADDED(sum, x, w)  sum, plus in each word the products of its four bytes: x from 0 to 255, w from -128 to 127
 *
 * A panel has first the start values of its sums (whole numbers, because x is offset by 128) and its scales, then its
 * weights: four inputs of an output per word. */

typedef float NAME(reals) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(sums) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(weights) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t NAME(small) __attribute__((vector_size(LANES), aligned(1), may_alias));
#define PANEL (LANES * COLUMNS)
#define REALS(p) (*(NAME(reals) *)(p))
#define WEIGHTS(p) ((NAME(sums))*(const NAME(weights) *)(p))

/* `rows`, a constant, of one panel; `words` of a row's inputs. For each of these, prefetches `each` lines from `ahead`
 * on, or, if `ahead` is NULL, the next part of the panel itself. */
static inline __attribute__((always_inline)) void NAME(tile)(const size_t rows, const int32_t *x, size_t x_row,
                                                             const float *sizes, const int32_t *w, size_t words,
                                                             const float *bias, float *y, size_t y_row,
                                                             const int32_t *ahead, size_t each)
{
    NAME(sums) sum[ROWS][COLUMNS];
    const int32_t *const scale = w + PANEL;
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (size_t column = 0; column < COLUMNS; column++)
            sum[row][column] = WEIGHTS(w + column * LANES);
    w += 2 * PANEL;
    for (size_t k = 0; k < words; k++, w += PANEL) {
        NAME(sums) weights[COLUMNS];
#pragma GCC unroll 8
        for (size_t column = 0; column < COLUMNS; column++) {
            if (!ahead)
                __builtin_prefetch(w + AHEAD * PANEL + column * LANES);
            else if (column < each)
                __builtin_prefetch(ahead + (k * each + column) * 16);
            weights[column] = WEIGHTS(w + column * LANES);
        }
#pragma GCC unroll 8
        for (size_t row = 0; row < rows; row++) {
            const NAME(sums) given = (NAME(sums)){0} + x[row * x_row + k];
#pragma GCC unroll 8
            for (size_t column = 0; column < COLUMNS; column++)
                sum[row][column] = ADDED(sum[row][column], given, weights[column]);
        }
    }
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (size_t column = 0; column < COLUMNS; column++) {
            const size_t at = column * LANES;
            REALS(y + row * y_row + at) = __builtin_convertvector(sum[row][column], NAME(reals)) *
                                              (REALS(scale + at) * sizes[row]) + REALS(bias + at);
        }
}

/* One panel: y[rows, PANEL] = x[rows, words] w * scales * sizes + bias. A row's result does not depend on the other
 * rows. */
static void NAME(panel)(const int32_t *x, size_t rows, size_t words, const float *sizes, const int32_t *w,
                        const float *bias, float *y, size_t y_row)
{
    const size_t blocks = (rows + ROWS - 1) / ROWS, least = rows / blocks, more = rows % blocks;
    const size_t each = lines_each(blocks, COLUMNS);
    for (size_t block = 0, row = 0, count; block < blocks; block++, row += count) {
        const int32_t *const ahead = block ? w + (2 + words) * PANEL + (block - 1) * words * each * 16 : NULL;
        count = least + (block < more);
#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        NAME(tile)(rows, x + row * words, words, sizes + row, w, words, bias, y + row * y_row, y_row, ahead,           \
                   block > LINES ? 0 : each);                                                                          \
        break;
        switch (count) {
            CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS == 8
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
#undef CASE
    }
}

/* Quantise a row to numbers from 1 to 255, which cover minus to plus its largest value; 128 is 0. Returns the scale:
 * NaN unless all values are finite. */
static float NAME(rounded)(const float *x, size_t inputs, uint8_t *to)
{
    uint32_t most = 0;
    for (size_t i = 0; i < inputs; i++) { /* without their sign, floats are in the order of their bits */
        const uint32_t bits = ((const word *)x)[i] & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000)
        return NAN;
    const union {
        uint32_t bits;
        float number;
    } largest = {most};
    const float by = largest.number < 1e-30f ? 0.0f : 127.0f / largest.number;
    const float magic = 12582912.0f; /* adding it rounds to whole numbers */
    const size_t whole = inputs - inputs % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        *(NAME(small) *)(to + i) = __builtin_convertvector((NAME(sums))(REALS(x + i) * by + magic), NAME(small)) ^ 0x80;
    for (size_t i = whole; i < inputs; i++) {
        const union {
            float number;
            uint32_t bits;
        } rounded = {x[i] * by + magic};
        to[i] = (uint8_t)rounded.bits ^ 0x80;
    }
    return largest.number / 127.0f;
}

#undef PANEL
#undef REALS
#undef WEIGHTS
