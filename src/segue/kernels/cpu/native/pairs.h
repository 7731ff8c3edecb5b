/* GEMMs on a CPU that multiplies pairs of bfloat16 (AVX512-BF16) and sums them in float32, for bfloat16 weights and
 * activations rounded to bfloat16: twice as fast as floats, unless they are memory-bound. */

#define PAIRS_PANEL 48
#define PAIRS_ROWS 8

/* y = on + x w: `rows`, a constant, of one panel; `depth` pairs of inputs. `ahead` and `each` as in bytes.h. */
static inline __attribute__((always_inline)) void pairs_tile(const size_t rows, const word *x, size_t x_row,
                                                             const float *w, size_t depth, const float *on,
                                                             size_t on_row, float *y, size_t y_row,
                                                             const float *ahead, size_t each)
{
    __m512 sum[PAIRS_ROWS][3];
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (size_t column = 0; column < 3; column++)
            sum[row][column] = _mm512_setzero_ps();
    for (size_t k = 0; k < depth; k++, w += PAIRS_PANEL) {
        __m512bh weights[3];
#pragma GCC unroll 3
        for (size_t column = 0; column < 3; column++) {
            if (!ahead)
                __builtin_prefetch(w + AHEAD * PAIRS_PANEL + column * 16);
            else if (column < each)
                __builtin_prefetch(ahead + (k * each + column) * 16);
            weights[column] = (__m512bh)_mm512_loadu_ps(w + column * 16);
        }
#pragma GCC unroll 8
        for (size_t row = 0; row < rows; row++) {
            const __m512bh given = (__m512bh)_mm512_set1_epi32((int)x[row * x_row + k]);
#pragma GCC unroll 3
            for (size_t column = 0; column < 3; column++)
                sum[row][column] = _mm512_dpbf16_ps(sum[row][column], given, weights[column]);
        }
    }
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; row++)
#pragma GCC unroll 3
        for (size_t column = 0; column < 3; column++)
            _mm512_storeu_ps(y + row * y_row + column * 16,
                             _mm512_add_ps(sum[row][column], _mm512_loadu_ps(on + row * on_row + column * 16)));
}

/* One panel: y[rows, 48] = bias + x[rows, pairs] w[pairs, 48], in stretches like those of floats. */
static void pairs_panel(const word *x, size_t rows, size_t pairs, const float *w, const float *bias, float *y, size_t y_row)
{
    const size_t blocks = (rows + PAIRS_ROWS - 1) / PAIRS_ROWS, least = rows / blocks, more = rows % blocks;
    const size_t each = lines_each(blocks, 3);
    for (size_t first = 0, depth; first < pairs; first += depth) {
        depth = pairs - first < STRETCH / 2 ? pairs - first : STRETCH / 2;
        for (size_t block = 0, row = 0, count; block < blocks; block++, row += count) {
            const float *const next = w + (first + depth) * PAIRS_PANEL;
            const float *const ahead = block ? next + (block - 1) * depth * each * 16 : NULL;
            float *const to = y + row * y_row;
            count = least + (block < more);
#define CASE(rows)                                                                                                     \
    case rows:                                                                                                         \
        pairs_tile(rows, x + row * pairs + first, pairs, w + first * PAIRS_PANEL, depth, first ? to : bias,            \
                   first ? y_row : 0, to, y_row, ahead, block > LINES ? 0 : each);                                     \
        break;
            switch (count) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
            }
#undef CASE
        }
    }
}

/* Round a row to bfloat16, two per word, the first in the lower half. Numbers below 2^-126 become 0. */
static void to_pairs(const float *x, size_t inputs, word *to)
{
    for (size_t i = 0; i < inputs; i += 32) {
        const size_t left = inputs - i;
        const __mmask16 first = left < 16 ? (__mmask16)((1u << left) - 1) : 0xffff;
        const __mmask16 second = left < 16 ? 0 : left < 32 ? (__mmask16)((1u << (left - 16)) - 1) : 0xffff;
        const __m512 low = _mm512_maskz_loadu_ps(first, x + i), high = _mm512_maskz_loadu_ps(second, x + i + 16);
        const __mmask16 pairs = left < 32 ? (__mmask16)((1u << left / 2) - 1) : 0xffff;
        _mm512_mask_storeu_epi32(to + i / 2, pairs, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}
