/* GEMMs on a CPU with tiles (AMX), for bfloat16 weights.
 *
 * A float is the exact sum of three bfloat16: each has 8 of the 24 bits of its mantissa. So a GEMM of floats with
 * bfloat16 weights is three GEMMs that tiles support; each of their products is exact, and sums are kept in float32.
 * (Henry, Tang and Heinecke, 2019, split both sides into two or three such parts.) Unlike float32 arithmetic, tiles
 * treat numbers below 2^-126 as 0. */

#define STEP 32         /* inputs of a row in a tile */
#define GROUP 16        /* rows of a tile */
#define PARTS 3         /* bfloat16 parts of a float */
#define TILE_PANEL 48   /* outputs of a panel: three tiles */
#define TILE_BLOCK 128  /* rows whose parts are laid out together */
#define TILE_STRETCH 256 /* inputs of a panel that all rows are multiplied with before the next: they stay in the first
                            cache */
#define TILE_PARTS (1400 << 10) /* bytes of parts that all panels are multiplied with before the next: they stay in the
                                   second */
#define TILE_FEW 4       /* tiles of rows; where there are no more, weights are read once, in their order */
#define TILE_LARGE (1 << 20) /* bytes of sums that would not stay in a cache anyway */
#define TILE_AHEAD 9    /* lines of the next weights that are fetched with each step */

struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Tiles 0 to 2: sums of `rows` rows; 3 to 5: weights; 6 and 7: parts of `rows` rows. */
static void shape_tiles(int rows)
{
    struct tile_shapes shapes __attribute__((aligned(64))) = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = tile >= 3 && tile <= 5 ? 16 : (uint8_t)rows;
    }
    _tile_loadconfig(&shapes);
}

/* Split `count` rows into `parts`, with zeros after them: x[count, inputs] as [inputs / STEP, parts, rows, STEP]. A
 * single part is the float rounded to bfloat16; of several, each has the digits that the previous ones lack. */
static void part_rows(const float *x, size_t x_row, size_t count, size_t rows, size_t inputs, size_t parts, uint16_t *to)
{
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000), quiet = _mm512_set1_epi32(0x00400000);
    for (size_t row = 0; row < rows; row++)
        for (size_t k = 0; k < inputs; k += STEP) {
            uint16_t *const tile = to + (k / STEP * parts * rows + row) * STEP;
            if (row >= count) {
                for (size_t part = 0; part < parts; part++)
                    _mm512_storeu_si512(tile + part * rows * STEP, _mm512_setzero_si512());
                continue;
            }
            __m512 a = _mm512_loadu_ps(x + row * x_row + k), b = _mm512_loadu_ps(x + row * x_row + k + 16);
            if (parts == 1) {
                _mm512_storeu_si512(tile, (__m512i)_mm512_cvtne2ps_pbh(b, a));
                continue;
            }
            for (size_t part = 0; part < parts; part++) {
                __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), mask);
                __m512i high_b = _mm512_and_si512(_mm512_castps_si512(b), mask);
                /* a NaN stays NaN, whatever its bits; NaN and infinity leave no remainder */
                high_a = _mm512_mask_or_epi32(high_a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high_a, quiet);
                high_b = _mm512_mask_or_epi32(high_b, _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), high_b, quiet);
                _mm512_storeu_si512(tile + part * rows * STEP, _mm512_permutex2var_epi16(high_a, upper, high_b));
                const __m512 rest_a = _mm512_sub_ps(a, _mm512_castsi512_ps(high_a));
                const __m512 rest_b = _mm512_sub_ps(b, _mm512_castsi512_ps(high_b));
                a = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest_a, rest_a, _CMP_ORD_Q), rest_a);
                b = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(rest_b, rest_b, _CMP_ORD_Q), rest_b);
            }
        }
}

#define PART(part, tile)                                                                                               \
    _tile_loadd(tile, x + part * rows * STEP, STEP * sizeof(uint16_t));                                                \
    for (size_t line = 0; line < lines / parts; line++, ahead += 16)                                                   \
        __builtin_prefetch(ahead);                                                                                     \
    _tile_dpbf16ps(0, tile, 3);                                                                                        \
    _tile_dpbf16ps(1, tile, 4);                                                                                        \
    _tile_dpbf16ps(2, tile, 5);

/* y = on + x w: rows of one tile with `steps` of a panel. Prefetches `lines` cache lines from `ahead` on with each
 * step. `parts` and `lines` are constants. */
static inline __attribute__((always_inline)) void tile_panel(const uint16_t *x, size_t rows, size_t steps, size_t parts,
                                                             const float *w, const float *on, size_t on_row, float *y,
                                                             size_t lines, const float *ahead)
{
    _tile_loadd(0, on, on_row * sizeof(float));
    _tile_loadd(1, on + 16, on_row * sizeof(float));
    _tile_loadd(2, on + 32, on_row * sizeof(float));
    for (size_t step = 0; step < steps; step++, w += STEP / 2 * TILE_PANEL, x += parts * rows * STEP) {
        _tile_loadd(3, w, TILE_PANEL * sizeof(float));
        _tile_loadd(4, w + 16, TILE_PANEL * sizeof(float));
        _tile_loadd(5, w + 32, TILE_PANEL * sizeof(float));
        PART(0, 6)
        if (parts == PARTS) {
            PART(1, 7)
            PART(2, 6)
        }
    }
    _tile_stored(0, y, TILE_PANEL * sizeof(float));
    _tile_stored(1, y + 16, TILE_PANEL * sizeof(float));
    _tile_stored(2, y + 32, TILE_PANEL * sizeof(float));
}

/* `cold`: the weights are in memory, and each step prefetches another. Else they are in a cache, and the weights from
 * `ahead` on are prefetched. */
static void some_panel(const uint16_t *x, size_t rows, size_t steps, size_t parts, int cold, const float *w,
                       const float *on, size_t on_row, float *y, const float *ahead)
{
    const size_t words = STEP / 2 * TILE_PANEL;
    if (parts == 1 && cold)
        tile_panel(x, rows, steps, 1, w, on, on_row, y, words / 16, w + words);
    else if (parts == 1)
        tile_panel(x, rows, steps, 1, w, on, on_row, y, TILE_AHEAD, ahead);
    else if (cold)
        tile_panel(x, rows, steps, PARTS, w, on, on_row, y, words / 16, w + words);
    else
        tile_panel(x, rows, steps, PARTS, w, on, on_row, y, TILE_AHEAD, ahead);
}

/* Write the sums of a panel's rows to y; `stream`: bypass the caches. */
static void put_sums(const float *sums, size_t rows, size_t wide, float *y, size_t y_row, int stream)
{
    for (size_t row = 0; row < rows; row++, sums += TILE_PANEL, y += y_row)
        if (stream)
            for (size_t column = 0; column < wide; column += 16)
                _mm512_stream_ps(y + column, _mm512_load_ps(sums + column));
        else
            memcpy(y, sums, wide * sizeof(float));
}

/* Memory of this thread for the parts of a block of rows; NULL if allocation fails. */
static uint16_t *parts_of(size_t bytes)
{
    static __thread uint16_t *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        memory = aligned_alloc(64, bytes);
        size = memory ? bytes : 0;
    }
    return memory;
}

/* Like segue_product, with bfloat16 weights, if STEP divides `inputs`; `round`: round activations to bfloat16. A row's
 * result does not depend on the other rows. Returns 0 if there is no memory. */
static int tiled_product(const float *x, size_t rows, size_t inputs, const float *w, const float *bias, int round, int gelu,
                         float *y, size_t outputs, int threads)
{
    const int stream = rows * outputs * sizeof(float) > TILE_LARGE && outputs % 16 == 0 && (uintptr_t)y % 64 == 0;
    const size_t parts = round ? 1 : PARTS;
    const size_t panels = (outputs + TILE_PANEL - 1) / TILE_PANEL;
    const size_t most = rows < TILE_BLOCK ? (rows + GROUP - 1) / GROUP * GROUP : TILE_BLOCK;
    const size_t bytes = most * inputs * parts * sizeof(uint16_t);
    uint16_t *const given = parts_of(most > GROUP && bytes > TILE_PARTS ? TILE_PARTS : bytes);
    if (!given)
        return 0;
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > 1 << 15)
    for (size_t begin = 0; begin < rows; begin += TILE_BLOCK) {
        const size_t here = rows - begin < TILE_BLOCK ? rows - begin : TILE_BLOCK;
        const size_t groups = (here + GROUP - 1) / GROUP, each = (here + groups - 1) / groups;
        const size_t fit = TILE_PARTS / (groups * each * parts * sizeof(uint16_t)) / TILE_STRETCH * TILE_STRETCH;
        const size_t deep = groups == 1 || fit >= inputs ? inputs : fit;
        const size_t stretch = groups <= TILE_FEW ? deep : TILE_STRETCH;
        shape_tiles((int)each);
        for (size_t from = 0, some; from < inputs; from += some) {
            some = inputs - from < deep ? inputs - from : deep;
#pragma omp for schedule(static)
            for (size_t group = 0; group < groups; group++) {
                const size_t first = group * each, count = here - first < each ? here - first : each;
                part_rows(x + (begin + first) * inputs + from, inputs, count, each, some, parts,
                          given + first * some * parts);
            }
#pragma omp for schedule(dynamic, 1)
            for (size_t panel = 0; panel < panels; panel++) {
                const size_t column = panel * TILE_PANEL;
                const size_t wide = outputs - column < TILE_PANEL ? outputs - column : TILE_PANEL;
                float *const to = y + begin * outputs + column;
                float sums[TILE_BLOCK * TILE_PANEL] __attribute__((aligned(64)));
                for (size_t row = 0; from && row < groups * each; row++)
                    memcpy(sums + row * TILE_PANEL, to + (row < here ? row : 0) * outputs, wide * sizeof(float));
                for (size_t k = 0, depth; k < some; k += depth) {
                    depth = some - k < stretch ? some - k : stretch;
                    const float *const weight = w + (column * inputs + (from + k) * TILE_PANEL) / 2;
                    for (size_t group = 0; group < groups; group++) {
                        float *const sum = sums + group * each * TILE_PANEL;
                        const float *const next = weight + depth / 2 * TILE_PANEL;
                        some_panel(given + (group * some + k) * each * parts, each, depth / STEP, parts, !group, weight,
                                   from + k ? sum : bias + column, from + k ? TILE_PANEL : 0, sum,
                                   next + (group - 1) * (depth / STEP) * TILE_AHEAD * 16);
                    }
                }
                for (size_t sum = 0; gelu && from + some == inputs && sum < here * TILE_PANEL; sum += TILE_PANEL)
                    gelu_wide(sums + sum, TILE_PANEL);
                put_sums(sums, here, wide, to, outputs, stream && from + some == inputs);
            }
        }
        _mm_sfence();
        _tile_release();
    }
    return 1;
}

/* Whether this CPU has tiles of bfloat16, and the system lets this process use them. */
static int tiles_allowed(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (1u << 22 | 1u << 24))
        return 0;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* what tiles keep */);
}
