/* The kernels of one instruction set. Included by kernels.c once for each, which defines
 *   NAME(x)  the name of a function in this set
 *   LANES    floats in a vector
 *   COLUMNS  adjacent vectors in a panel of a weight
 *   ROWS     rows of activations in a tile of a GEMM: ROWS * COLUMNS sums stay in registers
 *   TOGETHER query heads that are computed together
 */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef float NAME(loose) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int NAME(bits) __attribute__((vector_size(4 * LANES)));
typedef int NAME(words) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define VEC NAME(vec)
#define BITS NAME(bits)
#define LOAD(p) ((VEC)*(const NAME(loose) *)(p))
#define STORE(p, v) (*(NAME(loose) *)(p) = (v))
#define PANEL (LANES * COLUMNS)

static inline float NAME(sum)(VEC v)
{
    union {
        VEC whole;
        four parts[LANES / 4];
    } of = {v};
    four sum = of.parts[0] + of.parts[1];
#if LANES == 16
    sum += of.parts[2] + of.parts[3];
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

#if LANES == 16
#define EACH(a, b, c, d) {a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a, 12 + b, 12 + c, 12 + d}
#else
#define EACH(a, b, c, d) {a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d}
#endif

/* The sums of four vectors: transposes groups of four lanes, then adds them. */
static inline four NAME(sums)(VEC a, VEC b, VEC c, VEC d)
{
    const BITS low = EACH(0, LANES, 1, LANES + 1), high = EACH(2, LANES + 2, 3, LANES + 3);
    const BITS first = EACH(0, 1, LANES, LANES + 1), second = EACH(2, 3, LANES + 2, LANES + 3);
    const VEC ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const VEC cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    union {
        VEC whole;
        four parts[LANES / 4];
    } of = {__builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, second)};
    four sum = of.parts[0] + of.parts[1];
#if LANES == 16
    sum += of.parts[2] + of.parts[3];
#endif
    return sum;
}

/* e^x to a few units in the last place; 0 below -87, e^88 above 88; NaN stays NaN. 2^n is written into the exponent's bits. */
static inline VEC NAME(exponential)(VEC x)
{
    const VEC low = (VEC){0} - 87.0f, high = (VEC){0} + 88.0f;
    const BITS small = x < low, large = x > high, unknown = x != x;
    x = (VEC)((large & (BITS)high) | (~large & (BITS)x));
    const VEC magic = (VEC){0} + 12582912.0f; /* adding it rounds to whole numbers */
    const VEC shifted = x * 1.44269504f + magic;
    const VEC n = shifted - magic;
    VEC r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    VEC p = r * 1.9875691500e-4f + 1.3981999507e-3f; /* Cephes, expf */
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const BITS scaled = (BITS)p + (((BITS)shifted - (BITS)magic) << 23);
    return (VEC)((scaled & ~small) | (unknown & (BITS)x));
}

/* 2^x to a few units in the last place for x up to 127; 0 below -126; NaN stays NaN. */
static inline VEC NAME(power)(VEC x)
{
    const VEC low = (VEC){0} - 126.0f, magic = (VEC){0} + 12582912.0f; /* 1.5 * 2^23, as in `exponential` */
    const BITS small = x < low;
    const VEC shifted = x + magic;
    const VEC r = x - (shifted - magic);
    VEC p = r * 1.535336188e-4f + 1.339887440e-3f; /* Cephes, exp2f */
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332548e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    const VEC whole = (VEC)((((BITS)shifted) << 23) + (127 << 23));
    return (VEC)((BITS)(p * whole) & ~small);
}

/* The larger of each; `b` if one of them is NaN. */
static inline VEC NAME(larger)(VEC a, VEC b)
{
#if LANES == 16
    return (VEC)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (VEC)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

static inline float NAME(largest)(VEC v)
{
    union {
        VEC whole;
        __m128 parts[LANES / 4];
    } of = {v};
    __m128 best = _mm_max_ps(of.parts[0], of.parts[1]);
#if LANES == 16
    best = _mm_max_ps(best, _mm_max_ps(of.parts[2], of.parts[3]));
#endif
    best = _mm_max_ps(best, _mm_movehl_ps(best, best));
    return _mm_cvtss_f32(_mm_max_ss(best, _mm_shuffle_ps(best, best, 1)));
}

/* --- GEMMs ------------------------------------------------------------------------------------------------------- */

#define ROWS1(F) F(0)
#define ROWS2(F) ROWS1(F) F(1)
#define ROWS3(F) ROWS2(F) F(2)
#define ROWS4(F) ROWS3(F) F(3)
#define ROWS5(F) ROWS4(F) F(4)
#define ROWS6(F) ROWS5(F) F(5)
#define ROWS7(F) ROWS6(F) F(6)
#define ROWS8(F) ROWS7(F) F(7)

#if COLUMNS == 3
#define THIRD(statement) statement
#else
#define THIRD(statement)
#endif

#define START(m) VEC s##m##0 = {0}, s##m##1 = {0}; THIRD(VEC s##m##2 = {0};)
#define ADD(m)                                                                                                         \
    {                                                                                                                  \
        const float given = x[m * x_row + k];                                                                          \
        s##m##0 += given * w0;                                                                                         \
        s##m##1 += given * w1;                                                                                         \
        THIRD(s##m##2 += given * w2;)                                                                                  \
    }
#define PUT(m)                                                                                                         \
    {                                                                                                                  \
        float *to = y + m * y_row;                                                                                     \
        STORE(to, LOAD(on + m * on_row) + s##m##0);                                                                    \
        STORE(to + LANES, LOAD(on + m * on_row + LANES) + s##m##1);                                                    \
        THIRD(STORE(to + 2 * LANES, LOAD(on + m * on_row + 2 * LANES) + s##m##2);)                                     \
    }

#define FETCH(p)                                                                                                       \
    __builtin_prefetch(p);                                                                                             \
    __builtin_prefetch((p) + 16);                                                                                      \
    THIRD(__builtin_prefetch((p) + 32);)

/* y = on + x w: COUNT rows of one panel, `depth` of its inputs; `on` is the bias or the previous sums. Meanwhile
 * prefetches lines from `ahead` on, `step` floats further for each row of the panel. */
#define TILE(COUNT)                                                                                                    \
    static void NAME(tile##COUNT)(const float *x, size_t x_row, const float *w, size_t depth, const float *on,         \
                                  size_t on_row, float *y, size_t y_row, const float *ahead, size_t step)              \
    {                                                                                                                  \
        ROWS##COUNT(START)                                                                                             \
        for (size_t k = 0; k < depth; k++) {                                                                           \
            const float *from = w + k * PANEL;                                                                         \
            FETCH(ahead + k * step)                                                                                    \
            const VEC w0 = LOAD(from), w1 = LOAD(from + LANES);                                                        \
            THIRD(const VEC w2 = LOAD(from + 2 * LANES);)                                                              \
            ROWS##COUNT(ADD)                                                                                           \
        }                                                                                                              \
        ROWS##COUNT(PUT)                                                                                               \
    }

/* bfloat16 weights, two per word: inputs k and k + 1 of one output, k in the lower half. */
#define LOW(p) ((VEC)(*(const NAME(words) *)(p) << 16))
#define HIGH(p) ((VEC)(*(const NAME(words) *)(p) & -65536))
#define HALF_TILE(COUNT)                                                                                               \
    static void NAME(half_tile##COUNT)(const float *x, size_t x_row, const float *w, size_t depth, const float *on,    \
                                       size_t on_row, float *y, size_t y_row, const float *ahead, size_t step)         \
    {                                                                                                                  \
        ROWS##COUNT(START)                                                                                             \
        for (size_t k = 0; k < depth; k++) {                                                                           \
            const float *from = w + k / 2 * PANEL;                                                                     \
            FETCH(ahead + k / 2 * step)                                                                                \
            {                                                                                                          \
                const VEC w0 = LOW(from), w1 = LOW(from + LANES);                                                      \
                THIRD(const VEC w2 = LOW(from + 2 * LANES);)                                                           \
                ROWS##COUNT(ADD)                                                                                       \
            }                                                                                                          \
            k++;                                                                                                       \
            {                                                                                                          \
                const VEC w0 = HIGH(from), w1 = HIGH(from + LANES);                                                    \
                THIRD(const VEC w2 = HIGH(from + 2 * LANES);)                                                          \
                ROWS##COUNT(ADD)                                                                                       \
            }                                                                                                          \
        }                                                                                                              \
        ROWS##COUNT(PUT)                                                                                               \
    }

#define TILES(COUNT) TILE(COUNT) HALF_TILE(COUNT)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if ROWS == 8
TILES(7) TILES(8)
#endif

typedef void (*NAME(tile))(const float *, size_t, const float *, size_t, const float *, size_t, float *, size_t,
                           const float *, size_t);
static const NAME(tile) NAME(tiles)[] = {
    NULL, NAME(tile1), NAME(tile2), NAME(tile3), NAME(tile4), NAME(tile5), NAME(tile6),
#if ROWS == 8
    NAME(tile7), NAME(tile8),
#endif
};
static const NAME(tile) NAME(half_tiles)[] = {
    NULL, NAME(half_tile1), NAME(half_tile2), NAME(half_tile3), NAME(half_tile4), NAME(half_tile5), NAME(half_tile6),
#if ROWS == 8
    NAME(half_tile7), NAME(half_tile8),
#endif
};

/* Convert `depth` inputs of a bfloat16 panel to floats. */
static void NAME(spread)(const float *w, size_t depth, float *to)
{
    for (size_t k = 0; k < depth; k += 2)
        for (size_t column = 0; column < PANEL; column += LANES) {
            const float *from = w + k / 2 * PANEL + column;
            __builtin_prefetch(from + AHEAD * PANEL);
            STORE(to + k * PANEL + column, LOW(from));
            STORE(to + (k + 1) * PANEL + column, HIGH(from));
        }
}

/* One panel: y[rows, PANEL] = bias + x[rows, inputs] w[inputs, PANEL]. Partial sums over STRETCH inputs are added in
 * order, whatever the number of rows, so a row's result does not depend on the other rows. */
static void NAME(panel)(const float *x, size_t rows, size_t inputs, const float *w, int halves, const float *bias,
                        float *y, size_t y_row)
{
    const size_t blocks = (rows + ROWS - 1) / ROWS, least = rows / blocks, more = rows % blocks;
    const size_t lines = PANEL / 16, each = lines_each(blocks, lines);
    float whole[STRETCH * PANEL] __attribute__((aligned(64)));
    for (size_t first = 0; first < inputs; first += STRETCH) {
        const size_t depth = inputs - first < STRETCH ? inputs - first : STRETCH;
        const float *stretch = w + (halves ? first / 2 : first) * PANEL;
        const size_t words = halves ? depth / 2 : depth;
        const float *const next = stretch + words * PANEL;
        const NAME(tile) *tiles = halves ? NAME(half_tiles) : NAME(tiles);
        if (halves && blocks > IN_PLACE) {
            NAME(spread)(stretch, depth, whole);
            stretch = whole;
            tiles = NAME(tiles);
        }
        size_t row = 0;
        for (size_t block = 0; block < blocks; block++) {
            const size_t count = least + (block < more);
            float *to = y + row * y_row;
            /* the first rows read weights from memory; some of the others prefetch the next ones */
            const int fetches = block && (block - 1) * each < lines;
            tiles[count](x + row * inputs + first, inputs, stretch, depth, first ? to : bias, first ? y_row : 0, to,
                         y_row, fetches ? next + (block - 1) * words * each * 16 : stretch + AHEAD * PANEL,
                         fetches ? each * 16 : PANEL);
            row += count;
        }
    }
}

/* --- attention of single queries ---------------------------------------------------------------------------------- */

#define HEADS1(F) F(0)
#define HEADS2(F) HEADS1(F) F(1)
#define HEADS3(F) HEADS2(F) F(2)
#define HEADS4(F) HEADS3(F) F(3)

#define DOT_START(g) VEC a##g = {0}, b##g = {0}, c##g = {0}, d##g = {0};
#define DOT_ADD(g)                                                                                                     \
    {                                                                                                                  \
        const VEC asked = LOAD(q + g * q_row + i);                                                                     \
        a##g += asked * key0;                                                                                          \
        b##g += asked * key1;                                                                                          \
        c##g += asked * key2;                                                                                          \
        d##g += asked * key3;                                                                                          \
    }
#define DOT_PUT(g) *(four *)(scores + g * CHUNK + t) = NAME(sums)(a##g, b##g, c##g, d##g) * scale;

/* scores[COUNT, CHUNK]: COUNT queries with `count` keys, four at a time; scores after the last key are undefined.
 * A key starts `from` floats after its pointer. Meanwhile prefetches `lines` cache lines from as many pointers of
 * `soon`. */
#define DOTS(COUNT)                                                                                                    \
    static void NAME(dots##COUNT)(const float *q, size_t q_row, size_t dim, const float *const *keys, size_t from,     \
                                  size_t count, float scale, float *scores, const float *const *soon,                  \
                                  size_t soon_from, size_t lines)                                                      \
    {                                                                                                                  \
        const size_t last = count - 1;                                                                                 \
        for (size_t t = 0; t < count; t += 4) {                                                                        \
            const size_t t1 = t + 1 < last ? t + 1 : last, t2 = t + 2 < last ? t + 2 : last;                           \
            const size_t t3 = t + 3 < last ? t + 3 : last;                                                             \
            const float *const k0 = keys[t] + from, *const k1 = keys[t1] + from;                                       \
            const float *const k2 = keys[t2] + from, *const k3 = keys[t3] + from;                                      \
            HEADS##COUNT(DOT_START)                                                                                    \
            for (size_t line = 0; line < lines; line++) {                                                              \
                __builtin_prefetch(soon[t] + soon_from + line * 16, 0, 2);                                             \
                __builtin_prefetch(soon[t1] + soon_from + line * 16, 0, 2);                                            \
                __builtin_prefetch(soon[t2] + soon_from + line * 16, 0, 2);                                            \
                __builtin_prefetch(soon[t3] + soon_from + line * 16, 0, 2);                                            \
            }                                                                                                          \
            for (size_t i = 0; i < dim; i += LANES) {                                                                  \
                const VEC key0 = LOAD(k0 + i), key1 = LOAD(k1 + i), key2 = LOAD(k2 + i), key3 = LOAD(k3 + i);          \
                HEADS##COUNT(DOT_ADD)                                                                                  \
            }                                                                                                          \
            HEADS##COUNT(DOT_PUT)                                                                                      \
        }                                                                                                              \
    }
DOTS(1) DOTS(2)
#if TOGETHER == 4
DOTS(3) DOTS(4)
#endif

#define MIX_START(g)                                                                                                   \
    VEC m##g##0 = LOAD(out + g * dim);                                                                                 \
    VEC m##g##1 = {0};                                                                                                 \
    if (wide)                                                                                                          \
        m##g##1 = LOAD(out + g * dim + LANES);
#define MIX_ADD(g)                                                                                                     \
    {                                                                                                                  \
        const float share = shares[g * CHUNK + t];                                                                     \
        m##g##0 += share * v0;                                                                                         \
        m##g##1 += share * v1;                                                                                         \
    }
#define MIX_PUT(g)                                                                                                     \
    STORE(out + g * dim, m##g##0);                                                                                     \
    if (wide)                                                                                                          \
        STORE(out + g * dim + LANES, m##g##1);

/* mixed[COUNT, dim] += shares[COUNT, count] values[count, dim], two vectors of a value at a time; a value starts `from`
 * floats after its pointer. Meanwhile prefetches from the first `fetches` pointers of `soon`. */
#define MIXES(COUNT)                                                                                                   \
    static void NAME(mixes##COUNT)(const float *shares, const float *const *values, size_t from, size_t count,         \
                                   size_t dim, float *mixed, const float *const *soon, size_t soon_from,               \
                                   size_t fetches)                                                                     \
    {                                                                                                                  \
        for (size_t d = 0; d < dim; d += 2 * LANES) {                                                                  \
            const int wide = d + LANES < dim;                                                                          \
            const size_t next = wide ? LANES : 0;                                                                      \
            float *out = mixed + d;                                                                                    \
            HEADS##COUNT(MIX_START)                                                                                    \
            for (size_t t = 0; t < count; t++) {                                                                       \
                const float *const value = values[t] + from + d;                                                       \
                if (t < fetches) {                                                                                     \
                    __builtin_prefetch(soon[t] + soon_from + d, 0, 2);                                                 \
                    __builtin_prefetch(soon[t] + soon_from + d + next, 0, 2);                                          \
                }                                                                                                      \
                const VEC v0 = LOAD(value), v1 = LOAD(value + next);                                                   \
                HEADS##COUNT(MIX_ADD)                                                                                  \
            }                                                                                                          \
            HEADS##COUNT(MIX_PUT)                                                                                      \
        }                                                                                                              \
    }
MIXES(1) MIXES(2)
#if TOGETHER == 4
MIXES(3) MIXES(4)
#endif

static void (*const NAME(dots)[])(const float *, size_t, size_t, const float *const *, size_t, size_t, float, float *,
                                  const float *const *, size_t, size_t) = {
    NULL, NAME(dots1), NAME(dots2),
#if TOGETHER == 4
    NAME(dots3), NAME(dots4),
#endif
};
static void (*const NAME(mixes)[])(const float *, const float *const *, size_t, size_t, size_t, float *,
                                   const float *const *, size_t, size_t) = {
    NULL, NAME(mixes1), NAME(mixes2),
#if TOGETHER == 4
    NAME(mixes3), NAME(mixes4),
#endif
};

/* The softmax of a stretch of keys, merged with earlier ones (Milakov & Gimelshein, 2018): scores become weights
 * 2^(score - highest); updates `highest` and `total`, and rescales `mixed`. */
static void NAME(soften)(float *scores, size_t count, float *highest, float *total, float *mixed, size_t dim)
{
    for (size_t t = count; t % LANES; t++)
        scores[t] = -INFINITY;
    VEC best = LOAD(scores);
    for (size_t t = LANES; t < count; t += LANES)
        best = NAME(larger)(LOAD(scores + t), best);
    const float here = NAME(largest)(best), before = *highest, most = here > before ? here : before;
    VEC sums = {0};
    for (size_t t = 0; t < count; t += LANES) {
        const VEC shares = NAME(power)(LOAD(scores + t) - most);
        STORE(scores + t, shares);
        sums += shares;
    }
    const float rescale = before == most ? 1.0f : exp2f(before - most);
    *total = *total * rescale + NAME(sum)(sums);
    *highest = most;
    if (rescale != 1.0f)
        for (size_t d = 0; d < dim; d += LANES)
            STORE(mixed + d, LOAD(mixed + d) * rescale);
}

/* Collect the locations of tokens from `first` on, before `end`, at most a chunk; returns their number. */
static size_t NAME(places)(const struct attention *of, const int32_t *blocks, size_t first, size_t end,
                           const float **key, const float **value)
{
    const size_t block_size = of->block_size, count = first >= end ? 0 : end - first < CHUNK ? end - first : CHUNK;
    size_t block = first / block_size, within = first % block_size;
    for (size_t t = 0; t < count; t++) {
        const size_t slot = (size_t)blocks[block] * block_size + within;
        key[t] = of->keys + slot * of->key_slot;
        value[t] = of->values + slot * of->value_slot;
        if (++within == block_size) {
            within = 0;
            block++;
        }
    }
    return count;
}

/* The query heads of a sequence over its tokens [begin, end): sums `mixed` [heads, value_dim] unnormalised, with the
 * `highest` score and the `total` of each head. All heads process a chunk of tokens before the next one, because keys
 * and values of a token are adjacent; each computation prefetches the data of the next. */
static void NAME(span)(const struct attention *of, const float *q, const int32_t *blocks, size_t begin, size_t end,
                       float *mixed, float *highest, float *total)
{
    const size_t kv_heads = of->kv_heads, heads = of->heads / kv_heads, dim = of->dim, value_dim = of->value_dim;
    const float scale = of->scale * 1.44269504f; /* log2(e) */
    float scores[TOGETHER * CHUNK] __attribute__((aligned(64)));
    const float *key[2][CHUNK], *value[2][CHUNK]; /* of a chunk, and of the next one */
    size_t count = NAME(places)(of, blocks, begin, end, key[0], value[0]);
    for (size_t head = 0; head < kv_heads * heads; head++) {
        highest[head] = -INFINITY;
        total[head] = 0;
    }
    memset(mixed, 0, kv_heads * heads * value_dim * sizeof(float));
    for (size_t first = begin, now = 0; first < end; first += CHUNK, now = !now) {
        const size_t next = NAME(places)(of, blocks, first + CHUNK, end, key[!now], value[!now]);
        for (size_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int last = kv_head + 1 == kv_heads;
            const size_t from = kv_head * of->value_head, soon_from = last ? 0 : (kv_head + 1) * of->key_head;
            for (size_t g = 0; g < heads; g += TOGETHER) {
                const size_t together = heads - g < TOGETHER ? heads - g : TOGETHER, head = kv_head * heads + g;
                NAME(dots)[together](q + head * of->q_head, of->q_head, dim, key[now], kv_head * of->key_head, count,
                                     scale, scores, value[now], from, g ? 0 : (value_dim + 15) / 16);
                for (size_t i = 0; i < together; i++)
                    NAME(soften)(scores + i * CHUNK, count, highest + head + i, total + head + i,
                                 mixed + (head + i) * value_dim, value_dim);
                NAME(mixes)[together](scores, value[now], from, count, value_dim, mixed + head * value_dim,
                                      last ? key[!now] : key[now], soon_from, g ? 0 : last ? next : count);
            }
        }
        count = next;
    }
}

/* --- small operators ---------------------------------------------------------------------------------------------- */

/* RMSNorm of one row: y = x / sqrt(mean(x^2) + eps) * weight. */
static void NAME(norm)(const float *x, const float *weight, float eps, float *y, size_t width)
{
    VEC squares = {0};
    float rest = 0;
    const size_t whole = width - width % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        squares += LOAD(x + i) * LOAD(x + i);
    for (size_t i = whole; i < width; i++)
        rest += x[i] * x[i];
    const float scale = 1.0f / sqrtf((NAME(sum)(squares) + rest) / (float)width + eps);
    for (size_t i = 0; i < whole; i += LANES)
        STORE(y + i, LOAD(x + i) * scale * LOAD(weight + i));
    for (size_t i = whole; i < width; i++)
        y[i] = x[i] * scale * weight[i];
}

/* RMSNorm and RoPE of one row, in place: x = x / sqrt(mean(x^2) + eps) * weight; with `turns`, neighbours are the parts
 * of a complex number, which is multiplied by one of them. */
static void NAME(turned)(float *x, const float *weight, float eps, const float *turns, size_t width)
{
    const BITS real = EACH(0, 0, 2, 2), imaginary = EACH(1, 1, 3, 3), other = EACH(1, 0, 3, 2);
    const BITS negative = (real == other - 1) & INT32_MIN; /* the first of each pair */
    NAME(norm)(x, weight, eps, x, width);
    if (!turns)
        return;
    const size_t whole = width - width % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        const VEC given = LOAD(x + i), by = LOAD(turns + i);
        const VEC across = __builtin_shuffle(given, other) * __builtin_shuffle(by, imaginary);
        STORE(x + i, given * __builtin_shuffle(by, real) + (VEC)((BITS)across ^ negative));
    }
    for (size_t i = whole; i < width; i += 2) {
        const float first = x[i], second = x[i + 1];
        x[i] = first * turns[i] - second * turns[i + 1];
        x[i + 1] = second * turns[i] + first * turns[i + 1];
    }
}

/* adaLN modulation of one row: y = (x - mean(x)) / sqrt(variance(x) + eps) * (1 + scale) + shift. */
static void NAME(modulate)(const float *x, const float *scale, const float *shift, float eps, float *y, size_t width)
{
    VEC sums = {0}, squares = {0};
    float rest = 0, rest_squares = 0;
    const size_t whole = width - width % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        sums += LOAD(x + i);
    for (size_t i = whole; i < width; i++)
        rest += x[i];
    const float mean = (NAME(sum)(sums) + rest) / (float)width;
    for (size_t i = 0; i < whole; i += LANES) {
        const VEC from = LOAD(x + i) - mean;
        squares += from * from;
    }
    for (size_t i = whole; i < width; i++)
        rest_squares += (x[i] - mean) * (x[i] - mean);
    const float by = 1.0f / sqrtf((NAME(sum)(squares) + rest_squares) / (float)width + eps);
    for (size_t i = 0; i < whole; i += LANES)
        STORE(y + i, (LOAD(x + i) - mean) * by * (LOAD(scale + i) + 1.0f) + LOAD(shift + i));
    for (size_t i = whole; i < width; i++)
        y[i] = (x[i] - mean) * by * (scale[i] + 1.0f) + shift[i];
}

/* SwiGLU gate: y = gate / (1 + e^-gate) * up. */
static void NAME(gate)(const float *gate, const float *up, float *y, size_t width)
{
    const size_t whole = width - width % LANES;
    for (size_t i = 0; i < whole; i += LANES) {
        const VEC g = LOAD(gate + i);
        STORE(y + i, g / (NAME(exponential)(-g) + 1.0f) * LOAD(up + i));
    }
    for (size_t i = whole; i < width; i++)
        y[i] = gate[i] / (expf(-gate[i]) + 1.0f) * up[i];
}

/* Snake: y = x + sin(frequency x)^2 * share. The square has period pi, so that the rest of x / pi is enough; its sine is
 * a polynomial of degree 11. Exact to a few units in the last place up to angles of some thousands. */
static void NAME(snake)(const float *x, float frequency, float share, float *y, size_t count)
{
    const VEC magic = (VEC){0} + 12582912.0f; /* 1.5 * 2^23, as in `exponential` */
    float rest[LANES] = {0}, made[LANES];
    for (size_t i = 0; i < count; i += LANES) {
        const int whole = i + LANES <= count;
        if (!whole)
            memcpy(rest, x + i, (count - i) * sizeof(float));
        const VEC given = LOAD(whole ? x + i : rest), angle = given * frequency;
        const VEC n = (angle * 0.318309886f + magic) - magic;
        VEC r = angle - n * 3.140625f;
        r = r - n * 9.67025756835937500e-4f;
        r = r - n * 6.2771141529083251953e-7f;
        const VEC square = r * r;
        VEC p = square * -2.3889859e-8f + 2.7525562e-6f;
        p = p * square - 1.9840874e-4f;
        p = p * square + 8.3333310e-3f;
        p = p * square - 1.6666667e-1f;
        const VEC sine = p * square * r + r;
        STORE(whole ? y + i : made, given + sine * sine * share);
        if (!whole)
            memcpy(y + i, made, (count - i) * sizeof(float));
    }
}

/* x = gelu(x) with the tanh approximation, over whole vectors: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u). */
static void NAME(gelu)(float *x, size_t width)
{
    for (size_t i = 0; i < width; i += LANES) {
        const VEC given = LOAD(x + i);
        const VEC u = given * (given * given * 0.044715f + 1.0f) * -1.5957691216f;
        STORE(x + i, given / (NAME(exponential)(u) + 1.0f));
    }
}

/* y = x, rounded to bfloat16: replaces bfloat16 pairs if the CPU cannot multiply them. */
static void NAME(halved)(const float *x, size_t count, float *y)
{
    const word *const from = (const word *)x;
    for (size_t i = 0; i < count; i++) {
        const uint32_t nearest = (from[i] + 0x7fff + (from[i] >> 16 & 1)) & 0xffff0000;
        ((word *)y)[i] = (from[i] & 0x7fffffff) > 0x7f800000 ? from[i] | 0x400000 : nearest;
    }
}
