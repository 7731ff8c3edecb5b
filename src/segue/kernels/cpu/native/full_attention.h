/* Attention of many queries, of one instruction set. Included by body.h, whose names it uses.
 *
 * Queries are processed in tiles of QUERIES rows over blocks of KEYS keys (Dao et al., FlashAttention, 2022): the
 * scores of a tile with a block stay in a cache, become softmax weights there, and weight the block's values. Keys of a
 * block are laid out in panels of LOOK, transposed, and values row by row, once for all rows of a task.
 */

#define LOOK (LANES * MOST_COLUMNS)

#if MOST_COLUMNS == 4
#define LATER(...) __VA_ARGS__
#else
#define LATER(...)
#endif

#define WIDE1(F, m) F(m, 0)
#define WIDE2(F, m) WIDE1(F, m) F(m, 1)
#define WIDE3(F, m) WIDE2(F, m) F(m, 2)
#define WIDE4(F, m) WIDE3(F, m) F(m, 3)

#define ROW_START(m, c) VEC s##m##c = {0};
#define ROW_LOAD(m, c) VEC s##m##c = LOAD(y + m * y_row + c * LANES) * factors[m];
#define ROW_ADD(m, c) s##m##c += given * w##c;
#define ROW_PUT(m, c) STORE(y + m * y_row + c * LANES, s##m##c);
#define ROW_MOST(m, c) best = NAME(larger)(s##m##c, best);
#define FROM(m, c) const VEC w##c = LOAD(from + c * LANES);

#define EACH_ROW(F, WIDE) F(0, WIDE) F(1, WIDE) F(2, WIDE) F(3, WIDE) F(4, WIDE) F(5, WIDE)
#define TILE_START(m, WIDE) WIDE(ROW_START, m)
#define TILE_LOAD(m, WIDE) WIDE(ROW_LOAD, m)
#define TILE_ADD(m, WIDE)                                                                                              \
    {                                                                                                                  \
        const float given = x[m * x_row + k];                                                                          \
        WIDE(ROW_ADD, m)                                                                                               \
    }
#define TILE_PUT(m, WIDE) WIDE(ROW_PUT, m)
#define TILE_MOST(m, WIDE)                                                                                             \
    {                                                                                                                  \
        VEC best = most[m];                                                                                            \
        WIDE(ROW_MOST, m)                                                                                              \
        most[m] = best;                                                                                                \
    }

/* y[QUERIES, columns] = x[QUERIES, depth] w[depth, LOOK], and each row's largest value so far. */
#define SCORES(COLS)                                                                                                   \
    static void NAME(scores##COLS)(const float *x, size_t x_row, const float *w, size_t depth, float *y, size_t y_row, \
                                   VEC *most)                                                                          \
    {                                                                                                                  \
        EACH_ROW(TILE_START, WIDE##COLS)                                                                               \
        for (size_t k = 0; k < depth; k++) {                                                                           \
            const float *const from = w + k * LOOK;                                                                    \
            WIDE##COLS(FROM, 0)                                                                                        \
            EACH_ROW(TILE_ADD, WIDE##COLS)                                                                             \
        }                                                                                                              \
        EACH_ROW(TILE_PUT, WIDE##COLS)                                                                                 \
        EACH_ROW(TILE_MOST, WIDE##COLS)                                                                                \
    }
SCORES(1) SCORES(2)
LATER(SCORES(3) SCORES(4))

/* y[QUERIES, columns] = y * factors + x[QUERIES, depth] w[depth, columns]. */
#define BLENDS(COLS)                                                                                                   \
    static void NAME(blend##COLS)(const float *x, size_t x_row, const float *w, size_t w_row, size_t depth, float *y,  \
                                  size_t y_row, const float *factors)                                                  \
    {                                                                                                                  \
        EACH_ROW(TILE_LOAD, WIDE##COLS)                                                                                \
        for (size_t k = 0; k < depth; k++) {                                                                           \
            const float *const from = w + k * w_row;                                                                   \
            WIDE##COLS(FROM, 0)                                                                                        \
            EACH_ROW(TILE_ADD, WIDE##COLS)                                                                             \
        }                                                                                                              \
        EACH_ROW(TILE_PUT, WIDE##COLS)                                                                                 \
    }
BLENDS(1) BLENDS(2)
LATER(BLENDS(3) BLENDS(4))

static void (*const NAME(scores)[])(const float *, size_t, const float *, size_t, float *, size_t, VEC *) = {
    NULL, NAME(scores1), NAME(scores2), LATER(NAME(scores3),) LATER(NAME(scores4),)};
static void (*const NAME(blends)[])(const float *, size_t, const float *, size_t, size_t, float *, size_t,
                                    const float *) = {
    NULL, NAME(blend1), NAME(blend2), LATER(NAME(blend3),) LATER(NAME(blend4),)};

/* Transpose keys: to[dim, LOOK], `count` of them, with the last one repeated up to a whole vector. */
static void NAME(lay_keys)(const float *const *keys, size_t count, size_t dim, float *to)
{
    const four_bits low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const size_t last = count - 1, whole = dim - dim % 4;
    for (size_t t = 0; t < (count + LANES - 1) / LANES * LANES; t += 4) {
        const float *const k0 = keys[t < last ? t : last], *const k1 = keys[t + 1 < last ? t + 1 : last];
        const float *const k2 = keys[t + 2 < last ? t + 2 : last], *const k3 = keys[t + 3 < last ? t + 3 : last];
        for (size_t d = 0; d < whole; d += 4) {
            const four a = FOUR(k0 + d), b = FOUR(k1 + d), c = FOUR(k2 + d), e = FOUR(k3 + d);
            const four ab = __builtin_shuffle(a, b, low), ab2 = __builtin_shuffle(a, b, high);
            const four ce = __builtin_shuffle(c, e, low), ce2 = __builtin_shuffle(c, e, high);
            float *const at = to + d * LOOK + t;
            FOUR(at) = __builtin_shuffle(ab, ce, first);
            FOUR(at + LOOK) = __builtin_shuffle(ab, ce, second);
            FOUR(at + 2 * LOOK) = __builtin_shuffle(ab2, ce2, first);
            FOUR(at + 3 * LOOK) = __builtin_shuffle(ab2, ce2, second);
        }
        for (size_t d = whole; d < dim; d++) {
            float *const at = to + d * LOOK + t;
            at[0] = k0[d], at[1] = k1[d], at[2] = k2[d], at[3] = k3[d];
        }
    }
}

/* Scores of one query with `count` keys (whole vectors) become weights 2^(score * scale - highest), and 0 outside
 * [low, high); returns the factor that rescales earlier sums. `most`: the largest scores, unless they include `others`,
 * scores of keys that the query does not see. */
static inline float NAME(share)(float *scores, size_t count, size_t low, size_t high, VEC most, int others,
                                float scale, float *highest, float *total)
{
    if (low >= high) {
        memset(scores, 0, count * sizeof(float));
        return 1.0f;
    }
    for (size_t t = 0; t < low; t++)
        scores[t] = -INFINITY;
    for (size_t t = high; t < count; t++)
        scores[t] = -INFINITY;
    if (others) {
        most = LOAD(scores);
        for (size_t t = LANES; t < count; t += LANES)
            most = NAME(larger)(LOAD(scores + t), most);
    }
    const float here = NAME(largest)(most) * scale, before = *highest;
    const float now = here > before ? here : before;
    VEC sums = {0};
    for (size_t t = 0; t < count; t += LANES) {
        const VEC shares = NAME(power)(LOAD(scores + t) * scale - now);
        STORE(scores + t, shares);
        sums += shares;
    }
    const float factor = now == before ? 1.0f : before == -INFINITY ? 0.0f : exp2f(before - now);
    *total = *total * factor + NAME(sum)(sums);
    *highest = now;
    return factor;
}

/* The rows [begin, end) of one sequence and K/V head; row = query * heads + head, of the heads that share it. */
static void NAME(rows)(const struct full_attention *of, size_t sequence, size_t kv_head, size_t begin, size_t end,
                       float *scratch)
{
    const size_t heads = of->heads / of->kv_heads, dim = of->dim, value_dim = of->value_dim;
    const size_t padded = (value_dim + LANES - 1) / LANES * LANES;
    const size_t tiles = (end - begin + QUERIES - 1) / QUERIES;
    const float scale = of->scale * 1.44269504f; /* log2(e) */
    const float *const keys = of->keys + sequence * of->key_sequence + kv_head * of->key_head;
    const float *const values = of->values + sequence * of->value_sequence + kv_head * of->value_head;
    const float *const q = of->q + sequence * of->q_sequence + kv_head * heads * of->q_head;
    const uint8_t *const seen = of->seen ? of->seen + sequence * of->seen_row : NULL;
    const int32_t *const blocks = of->blocks ? of->blocks + sequence * of->blocks_row : NULL;
    float *const out = of->out + sequence * of->out_sequence + kv_head * heads * of->out_head;
    float *const laid = scratch, *const below = laid + KEYS * dim, *const mixed = below + KEYS * padded;
    float *const asked = mixed + MOST_ROWS * padded, *const scores = asked + MOST_ROWS * dim;
    float *const highest = scores + QUERIES * KEYS, *const total = highest + MOST_ROWS;
    const float *key[KEYS];
    size_t token = 0, stop = of->tokens; /* keys that any of the rows sees */

    memset(mixed, 0, tiles * QUERIES * padded * sizeof(float));
    for (size_t row = 0; row < tiles * QUERIES; row++) {
        const size_t real = begin + row < end ? begin + row : end - 1;
        memcpy(asked + row * dim, q + real / heads * of->q_token + real % heads * of->q_head, dim * sizeof(float));
        highest[row] = -INFINITY;
        total[row] = 0;
    }
    if (of->spans) {
        size_t least = stop, most = 0;
        for (size_t query = begin / heads; query <= (end - 1) / heads; query++) {
            least = (size_t)of->spans[2 * query] < least ? (size_t)of->spans[2 * query] : least;
            most = (size_t)of->spans[2 * query + 1] > most ? (size_t)of->spans[2 * query + 1] : most;
        }
        token = least / KEYS * KEYS;
        stop = most < stop ? most : stop;
    }
    while (token < stop) {
        const size_t first = token; /* with spans, no key is skipped: `first + t` is the position of key `t` */
        size_t count = 0;
        for (; token < stop && count < KEYS; token++) {
            if (seen && !seen[token])
                continue;
            const size_t slot =
                blocks ? (size_t)blocks[token / of->block_size] * of->block_size + token % of->block_size : token;
            key[count] = keys + slot * of->key_token;
            memcpy(below + count * padded, values + slot * of->value_token, value_dim * sizeof(float));
            for (size_t d = value_dim; d < padded; d++)
                below[count * padded + d] = 0;
            count++;
        }
        for (size_t t = 0; t < count; t += LOOK)
            NAME(lay_keys)(key + t, count - t < LOOK ? count - t : LOOK, dim, laid + t * dim);
        for (size_t row = 0; row < tiles * QUERIES; row += QUERIES) {
            size_t low[QUERIES], high[QUERIES], skipped = count, here = 0; /* keys [skipped, here) of the block */
            for (size_t m = 0; m < QUERIES; m++) {
                low[m] = 0;
                high[m] = count;
                if (of->spans) {
                    const size_t query = (begin + row + m < end ? begin + row + m : end - 1) / heads;
                    const size_t from = of->spans[2 * query], until = of->spans[2 * query + 1];
                    low[m] = from <= first ? 0 : from - first < count ? from - first : count;
                    high[m] = until <= first ? 0 : until - first < count ? until - first : count;
                }
                skipped = low[m] < skipped ? low[m] : skipped;
                here = high[m] > here ? high[m] : here;
            }
            if (skipped >= here)
                continue;
            skipped = skipped / LOOK * LOOK;
            const size_t whole = (here + LANES - 1) / LANES * LANES;
            VEC most[QUERIES];
            float factors[QUERIES];
            for (size_t m = 0; m < QUERIES; m++)
                most[m] = (VEC){0} - INFINITY;
            for (size_t t = skipped; t < whole; t += LOOK)
                NAME(scores)[whole - t < LOOK ? (whole - t) / LANES : MOST_COLUMNS](
                    asked + row * dim, dim, laid + t * dim, dim, scores + t, KEYS, most);
            for (size_t m = 0; m < QUERIES; m++)
                factors[m] = NAME(share)(scores + m * KEYS + skipped, whole - skipped,
                                         low[m] < skipped ? 0 : low[m] - skipped,
                                         high[m] < skipped ? 0 : high[m] - skipped, most[m],
                                         low[m] > skipped || high[m] < count, scale, highest + row + m,
                                         total + row + m);
            for (size_t d = 0; d < padded; d += LOOK)
                NAME(blends)[padded - d < LOOK ? (padded - d) / LANES : MOST_COLUMNS](
                    scores + skipped, KEYS, below + skipped * padded + d, padded, here - skipped,
                    mixed + row * padded + d, padded, factors);
        }
    }
    for (size_t row = begin; row < end; row++) {
        const float *const from = mixed + (row - begin) * padded;
        float *const to = out + row / heads * of->out_token + row % heads * of->out_head;
        const float all = total[row - begin], share = all == 0 ? 0 : 1 / all; /* 0: it sees no key */
        for (size_t d = 0; d < value_dim; d++)
            to[d] = from[d] * share;
    }
}

#undef LOOK
#undef LATER
