/* The costly operations of a decode step on a CPU, in float32: GEMMs of few rows with large weights, attention of
 * single queries over a paged KV cache, norms. Each has a plain torch counterpart that tests compare it with.
 *
 * Threads are those of torch: the OpenMP runtime that it has loaded is used, and none is linked here. */

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__GNUC__)
#error "written for x86-64 and compilers that know GNU C"
#endif

#define STRETCH 512 /* inputs of a GEMM that are summed in registers */
#define BLOCK 256   /* rows of a GEMM that pass through a whole weight together */
#define IN_PLACE 8  /* tiles that read bfloat16 directly; for more tiles, weights are converted to floats first */
#define AHEAD 16    /* rows of a panel that are prefetched */
#define GROUPED_AHEAD 16 /* the same, if a word has many inputs */
#define CHUNK 64   /* keys whose scores are kept at a time */
#define TASK_KEYS 64 /* keys that justify one more task */

#define LINES 3         /* cache lines in a row of a panel */
#define ROWS_TOGETHER 8 /* most rows of a GEMM with rounded activations that count as few */
#define FEW_WORDS 8192  /* most words of rounded rows that every thread rounds for itself */

#define KEYS 256      /* keys of a block that many queries share */
#define QUERIES 6     /* queries that share it */
#define MOST_ROWS 384 /* most rows that share its layout; a multiple of QUERIES */

typedef uint32_t word __attribute__((may_alias));
typedef float four __attribute__((vector_size(16)));
typedef float loose_four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int four_bits __attribute__((vector_size(16)));
#define FOUR(p) (*(loose_four *)(p))

/* Attention of single queries: strides count floats. */
struct attention {
    const float *q; /* [sequences, heads, dim] */
    int64_t q_sequence, q_head;
    const float *keys; /* [slots, kv_heads, dim] */
    int64_t key_slot, key_head;
    const float *values; /* [slots, kv_heads, value_dim] */
    int64_t value_slot, value_head;
    const int32_t *blocks; /* [sequences, row of a table] */
    int64_t blocks_row;
    const int32_t *lengths; /* [sequences] keys that each query sees */
    int64_t sequences, heads, kv_heads, dim, value_dim, block_size;
    int64_t window; /* how many of the last keys are seen; 0: all */
    float scale;
    float *out; /* [sequences, heads, value_dim] */
};

enum { COPY, NEGATE, ADD, SUBTRACT, MULTIPLY, DIVIDE };

/* Attention of many queries of each sequence: strides count floats. */
struct full_attention {
    const float *q; /* [sequences, heads, queries, dim] */
    int64_t q_sequence, q_head, q_token;
    const float *keys; /* [sequences, kv_heads, tokens, dim], or [slots, kv_heads, dim] where there are `blocks` */
    int64_t key_sequence, key_head, key_token;
    const float *values; /* as keys, of value_dim */
    int64_t value_sequence, value_head, value_token;
    const int32_t *blocks; /* [sequences, row of a table], or NULL */
    int64_t blocks_row, block_size;
    const uint8_t *seen; /* [sequences, tokens] whether a key is seen, or NULL: all are */
    int64_t seen_row;
    const int32_t *spans; /* [queries, 2]: each query sees the keys from .. until before .., or NULL; not with `seen` */
    int64_t sequences, heads, kv_heads, queries, tokens, dim, value_dim;
    float scale; /* above 0 */
    float *out;  /* [sequences, heads, queries, value_dim] */
    int64_t out_sequence, out_head, out_token;
};

/* A mixture of experts: each token's rows of the chosen experts, gated, and their weighted sum. */
struct experts {
    const float *x;        /* [tokens, hidden] */
    const int64_t *chosen; /* [tokens, each] numbers of experts; one that does not exist adds nothing */
    const float *shares;   /* [tokens, each] */
    const float *both;     /* [experts, gate and up of an expert], as weights of segue_product */
    const float *both_bias;
    const float *down;
    const float *down_bias;
    int64_t both_next, both_bias_next, down_next, down_bias_next; /* from one expert to the next, in floats */
    int64_t both_kind, down_kind;
    int64_t tokens, hidden, inner, each, experts;
    float *rows;    /* [tokens, hidden], scratch, as are those below */
    float *gates;   /* [tokens, 2 * inner] */
    float *gated;   /* [tokens, inner] */
    float *mixed;   /* [tokens * each, hidden] */
    int64_t *order; /* [tokens * each + experts + 1] */
    float *y;       /* [tokens, hidden] */
};

/* Layout of weights with a scale and zero per group. */
struct grouped {
    size_t group;  /* inputs that share them */
    size_t inputs; /* of a word */
    size_t scales; /* rows of a panel that a group's scale and zero take: 1 or 2 */
};

#define PASTE(x, y) x##_##y
#define PASTED(x, y) PASTE(x, y)
#define NAME(x) PASTED(x, SET)

/* The first of several blocks of rows reads weights from memory; meanwhile each of the others prefetches this many
 * lines of the next weights for each row of a panel. */
static inline size_t lines_each(size_t blocks, size_t lines)
{
    return blocks > lines ? 1 : blocks > 1 ? (lines + blocks - 2) / (blocks - 1) : 0;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define SET wide
#define LANES 16
#define COLUMNS 3
#define ROWS 8
#define MOST_COLUMNS 4
#define TOGETHER 4
#include "body.h"
#include "grouped.h"
#include "full_attention.h"
#include "each.h"
#undef SET
#undef LANES
#undef COLUMNS
#undef ROWS
#undef MOST_COLUMNS
#undef TOGETHER
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define SET narrow
#define LANES 8
#define COLUMNS 2
#define ROWS 6
#define MOST_COLUMNS 2
#define TOGETHER 2
#include "body.h"
#include "grouped.h"
#include "full_attention.h"
#include "each.h"
#undef SET
#undef LANES
#undef COLUMNS
#undef ROWS
#undef MOST_COLUMNS
#undef TOGETHER
#pragma GCC pop_options

/* int8 GEMMs, by the instruction that sums their products. */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,prefer-vector-width=512")
#define SET vnni
#define LANES 16
#define COLUMNS 3
#define ROWS 8
#define ADDED(sum, x, w) ((NAME(sums))_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w)))
#include "bytes.h"
#undef ADDED
#undef SET
#pragma GCC pop_options

/* Pairs of products are summed in 16 bits here; weights are quantised so that they fit. */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define SET wide_bytes
#define ADDED(sum, x, w)                                                                                               \
    ((sum) + (NAME(sums))_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(x), (__m512i)(w)), _mm512_set1_epi16(1)))
#include "bytes.h"
#undef ADDED
#undef SET
#undef LANES
#undef COLUMNS
#undef ROWS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define SET narrow_bytes
#define LANES 8
#define COLUMNS 2
#define ROWS 4
#define ADDED(sum, x, w)                                                                                               \
    ((sum) + (NAME(sums))_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(x), (__m256i)(w)), _mm256_set1_epi16(1)))
#include "bytes.h"
#undef ADDED
#undef SET
#undef LANES
#undef COLUMNS
#undef ROWS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#include "pairs.h"
#pragma GCC pop_options

#define AMX (__linux__ && (__clang_major__ >= 12 || (!__clang__ && __GNUC__ >= 11))) /* compilers that support it */
#if AMX
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#include "tiles.h"
#pragma GCC pop_options
#endif

/* Weight and activation formats of a GEMM. */
enum {
    FLOATS,
    HALVES,  /* bfloat16 weights */
    ROUNDED, /* bfloat16 weights; activations are rounded to bfloat16 */
    BYTES,   /* int8 weights, laid out as in bytes.h; activations are rounded to int8 */
    FOURS,   /* 4-bit weights, laid out as in grouped.h, with one word for each group's scale and zero */
    EIGHTS,  /* the same, 8-bit */
    FOURS_BY_FLOATS, /* with two floats instead */
    EIGHTS_BY_FLOATS,
};

/* The instruction set in use. */
struct set {
    size_t panel;
    int tiles; /* whether GEMMs with bfloat16 weights use tiles */
    /* of rounded activations: pairs of halves, or NULL where floats stand for them */
    void (*pairs)(const word *, size_t, size_t, const float *, const float *, float *, size_t);
    void (*bytes)(const int32_t *, size_t, size_t, const float *, const int32_t *, const float *, float *, size_t);
    float (*to_bytes)(const float *, size_t, uint8_t *);
    void (*grouped)(const float *, size_t, size_t, const float *, const struct grouped *, const float *, float *, size_t);
    void (*product)(const float *, size_t, size_t, const float *, int, const float *, float *, size_t);
    void (*span)(const struct attention *, const float *, const int32_t *, size_t, size_t, float *, float *, float *);
    void (*norm)(const float *, const float *, float, float *, size_t);
    void (*gate)(const float *, const float *, float *, size_t);
    void (*gelu)(float *, size_t);
    void (*snake)(const float *, float, float, float *, size_t);
    void (*modulate)(const float *, const float *, const float *, float, float *, size_t);
    void (*turned)(float *, const float *, float, const float *, size_t);
    void (*rows)(const struct full_attention *, size_t, size_t, size_t, size_t, float *);
    void (*row)(int64_t, float *, int64_t, const float *, int64_t, const float *, int64_t, int64_t);
    void (*halved)(const float *, size_t, float *);
};
#define OF(set)                                                                                                        \
    grouped_##set, panel_##set, span_##set, norm_##set, gate_##set, gelu_##set, snake_##set, modulate_##set, turned_##set,          \
        rows_##set, row_##set, halved_##set
#define BYTES_OF(set) panel_##set, rounded_##set
enum { NARROW, WIDE, WIDE_BYTES, WIDE_PAIRS, TILED };
static const struct set sets[] = {
    {16, 0, NULL, BYTES_OF(narrow_bytes), OF(narrow)},
    {48, 0, NULL, BYTES_OF(wide_bytes), OF(wide)},
    {48, 0, NULL, BYTES_OF(vnni), OF(wide)},
    {48, 0, pairs_panel, BYTES_OF(vnni), OF(wide)},
    {48, 1, pairs_panel, BYTES_OF(vnni), OF(wide)},
};

/* Incremented with every change of the exported functions. */
int segue_version(void)
{
    return 13;
}

/* The best instruction set that this machine supports; -1: none. */
int segue_set(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return -1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return NARROW;
    if (!__builtin_cpu_supports("avx512vnni"))
        return WIDE;
    if (!__builtin_cpu_supports("avx512bf16"))
        return WIDE_BYTES;
#if AMX
    if (tiles_allowed())
        return TILED;
#endif
    return WIDE_PAIRS;
}

/* Outputs of a GEMM in one panel of its weight. */
int segue_panel(int set)
{
    return (int)sets[set].panel;
}

/* The arguments of a GEMM. */
struct product {
    const struct set *set;
    int kind, gelu;
    size_t inputs, outputs;
    const float *w, *bias;
    float *y;
    struct grouped grouped; /* for kinds from FOURS on */
};

/* Rows of a panel. */
static size_t deep(const struct product *of)
{
    if (of->kind >= FOURS)
        return of->inputs / of->grouped.inputs + of->inputs / of->grouped.group * of->grouped.scales;
    return of->kind == FLOATS ? of->inputs : of->kind == BYTES ? of->inputs / 4 + 2 : of->inputs / 2;
}

/* Rows of one panel, converted for `kind`: they start at `x`, `words` each, with their scales in `sizes`. */
static void rows_of_panel(const struct product *of, const word *x, size_t rows, size_t words, const float *sizes,
                          const float *w, const float *bias, float *y, size_t y_row)
{
    const struct set *const set = of->set;
    if (of->kind == BYTES)
        set->bytes((const int32_t *)x, rows, words, sizes, (const int32_t *)w, bias, y, y_row);
    else if (of->kind == ROUNDED && set->pairs)
        set->pairs(x, rows, words, w, bias, y, y_row);
    else if (of->kind >= FOURS)
        set->grouped((const float *)x, rows, of->inputs, w, &of->grouped, bias, y, y_row);
    else
        set->product((const float *)x, rows, of->inputs, w, of->kind != FLOATS, bias, y, y_row);
}

/* The same, written to the rows of y from `begin` on, the last panel of which may be narrower. */
static void one_panel(const struct product *of, size_t panel, const word *x, size_t begin, size_t rows, size_t words,
                      const float *sizes)
{
    const size_t width = of->set->panel, first = panel * width;
    const size_t count = of->outputs - first < width ? of->outputs - first : width;
    const float *const w = of->w + first * deep(of), *const bias = of->bias + first;
    float *const y = of->y + begin * of->outputs + first;
    if (count == width) {
        rows_of_panel(of, x, rows, words, sizes, w, bias, y, of->outputs);
        for (size_t row = 0; of->gelu && row < rows; row++)
            of->set->gelu(y + row * of->outputs, width);
        return;
    }
    float whole[8 * 48];
    for (size_t row = 0; row < rows; row += 8) {
        const size_t some = rows - row < 8 ? rows - row : 8;
        rows_of_panel(of, x + row * words, some, words, sizes + row, w, bias, whole, width);
        for (size_t i = 0; i < some; i++) {
            if (of->gelu)
                of->set->gelu(whole + i * width, width);
            memcpy(y + (row + i) * of->outputs, whole + i * width, count * sizeof(float));
        }
    }
}

/* Words of a row with rounded activations. */
static size_t rounded_words(const struct set *set, int kind, size_t inputs)
{
    return kind == BYTES ? inputs / 4 : set->pairs ? inputs / 2 : inputs;
}

/* Floats of scratch memory that a GEMM needs. */
int64_t segue_product_scratch(int number, int kind, int64_t rows, int64_t inputs)
{
    if (kind != ROUNDED && kind != BYTES)
        return 0;
    return (rows < BLOCK ? rows : BLOCK) * (1 + (int64_t)rounded_words(sets + number, kind, inputs));
}

/* Convert row `row` for its kind into `words` words, and write its scale to `size`. */
static void round_row(const struct product *of, const float *x, word *to, float *size)
{
    if (of->kind == BYTES)
        *size = of->set->to_bytes(x, of->inputs, (uint8_t *)to);
    else if (of->set->pairs)
        to_pairs(x, of->inputs, to);
    else
        of->set->halved(x, of->inputs, (float *)to);
}

/* Tasks that a thread takes at a time: each prefetches the weights of the next one, but every thread must get some, and
 * none may wait long for another that took a large share. */
static int64_t at_once(int64_t tasks, int threads)
{
    const int64_t fair = tasks / (4 * threads);
    return fair < 1 ? 1 : fair > 4 ? 4 : fair;
}

/* For few rows, every thread rounds all of them, so that none waits for another. */
static void few_rounded(const struct product *of, const float *x, size_t rows, size_t panels, size_t words, int threads)
{
#pragma omp parallel num_threads(threads) if (rows * of->inputs * of->outputs > 1 << 15)
    {
        word given[FEW_WORDS] __attribute__((aligned(64)));
        float sizes[ROWS_TOGETHER];
        for (size_t row = 0; row < rows; row++)
            round_row(of, x + row * of->inputs, given + row * words, sizes + row);
#pragma omp for schedule(dynamic, 1)
        for (size_t panel = 0; panel < panels; panel++)
            one_panel(of, panel, given, 0, rows, words, sizes);
    }
}

/* Blocks of rows are rounded, and then multiplied with every panel. Each thread has consecutive panels. */
static void rounded_product(const struct product *of, const float *x, size_t rows, float *scratch, int threads)
{
    const struct set *const set = of->set;
    const size_t panels = (of->outputs + set->panel - 1) / set->panel, words = rounded_words(set, of->kind, of->inputs);
    if (rows <= ROWS_TOGETHER && rows * words <= FEW_WORDS) {
        few_rounded(of, x, rows, panels, words, threads);
        return;
    }
    float *const sizes = scratch;
    word *const given = (word *)(scratch + (rows < BLOCK ? rows : BLOCK));
#pragma omp parallel num_threads(threads) if (rows * of->inputs * of->outputs > 1 << 15)
    for (size_t begin = 0; begin < rows; begin += BLOCK) {
        const size_t here = rows - begin < BLOCK ? rows - begin : BLOCK;
#pragma omp for schedule(static)
        for (size_t row = 0; row < here; row++)
            round_row(of, x + (begin + row) * of->inputs, given + row * words, sizes + row);
#pragma omp for schedule(dynamic, at_once(panels, threads))
        for (size_t panel = 0; panel < panels; panel++)
            one_panel(of, panel, given, begin, here, words, sizes);
    }
}

/* y[rows, outputs] = x[rows, inputs] w + bias; w [panels, inputs, panel], zero-padded; for bfloat16 [panels,
 * inputs / 2, panel] words of two, for int8 [panels, 2 + inputs / 4, panel]; bias [panels * panel]; `gelu`: y =
 * gelu(x w + bias), with tanh. Rows are processed in blocks, so that the rows multiplied with every panel stay in a
 * cache. `scratch`: of the length that segue_product_scratch returns. `group`: for kinds from FOURS on, inputs that
 * share a scale, a multiple of those of a word. */
void segue_product(int number, const float *x, int64_t rows, int64_t inputs, const float *w, int kind,
                   const float *bias, float *y, int64_t outputs, int gelu, float *scratch, int64_t group,
                   int threads)
{
    const struct set *const set = sets + number;
#if AMX
    if ((kind == HALVES || kind == ROUNDED) && set->tiles && inputs % STEP == 0 &&
        tiled_product(x, rows, inputs, w, bias, kind == ROUNDED, gelu, y, outputs, threads))
        return;
#endif
    const size_t to_a_word = kind == FOURS || kind == FOURS_BY_FLOATS ? 8 : 4, scales = kind < FOURS_BY_FLOATS ? 1 : 2;
    const struct product of = {set, kind, gelu, inputs, outputs, w, bias, y, {(size_t)group, to_a_word, scales}};
    if (kind == ROUNDED || kind == BYTES) {
        rounded_product(&of, x, rows, scratch, threads);
        return;
    }
    const int64_t panels = (outputs + (int64_t)set->panel - 1) / (int64_t)set->panel;
    const int64_t tasks = (rows + BLOCK - 1) / BLOCK * panels;
#pragma omp parallel for schedule(dynamic, at_once(tasks, threads)) num_threads(threads) if (rows * inputs * outputs > 1 << 15)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t begin = task / panels * BLOCK, here = rows - begin < BLOCK ? rows - begin : BLOCK;
        one_panel(&of, task % panels, (const word *)(x + begin * inputs), begin, here, inputs, NULL);
    }
}

/* Copy `tokens` rows of each head to their slots: from [heads, tokens, dim] to [slots, heads, dim]. */
static void put(const float *from, int64_t from_head, int64_t from_token, float *to, int64_t to_slot, int64_t to_head,
                const int64_t *slots, int64_t tokens, int64_t heads, int64_t dim)
{
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(to + slots[token] * to_slot + head * to_head, from + head * from_head + token * from_token,
                   dim * sizeof(float));
}

/* Write K and V of new tokens to the cache. */
void segue_write(const float *k, int64_t k_head, int64_t k_token, const float *v, int64_t v_head, int64_t v_token,
                 float *keys, int64_t key_slot, int64_t key_head, float *values, int64_t value_slot, int64_t value_head,
                 const int64_t *slots, int64_t tokens, int64_t kv_heads, int64_t dim, int64_t value_dim)
{
    put(k, k_head, k_token, keys, key_slot, key_head, slots, tokens, kv_heads, dim);
    put(v, v_head, v_token, values, value_slot, value_head, slots, tokens, kv_heads, value_dim);
}

/* The first key that a sequence's query sees. */
static int64_t first_seen(const struct attention *of, int64_t sequence)
{
    const int64_t stop = of->lengths[sequence];
    return of->window && stop > of->window ? stop - of->window : 0;
}

/* Attention of single queries. Each sequence is one task, or several if it has more than its share of the keys, with at
 * most `more` tasks beyond one per sequence; partial sums of a sequence are merged at the end (Dao et al.,
 * Flash-Decoding). `scratch`: (sequences + more) * heads * (value_dim + 2) + sequences + 1 floats. */
void segue_attend(int number, const struct attention *of, int64_t more, float *scratch, int threads)
{
    const struct set *const set = sets + number;
    const int64_t heads = of->heads, most = of->sequences + more;
    float *const highest = scratch + most * heads * of->value_dim, *const total = highest + most * heads;
    word *const first = (word *)(total + most * heads); /* the first task of each sequence; last, their number */
    int64_t keys = 0;
    for (int64_t sequence = 0; sequence < of->sequences; sequence++)
        keys += of->lengths[sequence] - first_seen(of, sequence);
    first[0] = 0;
    for (int64_t sequence = 0; sequence < of->sequences; sequence++) {
        const int64_t own = of->lengths[sequence] - first_seen(of, sequence);
        const int64_t share = own * more / (keys ? keys : 1), worth = own / TASK_KEYS;
        const int64_t tasks = share < worth ? share : worth;
        first[sequence + 1] = first[sequence] + (word)(tasks < 1 ? 1 : tasks);
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (first[of->sequences] > 1)
    for (int64_t task = 0; task < first[of->sequences]; task++) {
        int64_t sequence = 0;
        for (int64_t beyond = of->sequences; beyond - sequence > 1;) {
            const int64_t middle = (sequence + beyond) / 2;
            if (first[middle] <= task)
                sequence = middle;
            else
                beyond = middle;
        }
        const int64_t split = task - first[sequence], splits = first[sequence + 1] - first[sequence];
        const int64_t start = first_seen(of, sequence), own = of->lengths[sequence] - start;
        set->span(of, of->q + sequence * of->q_sequence, of->blocks + sequence * of->blocks_row,
                  start + own * split / splits, start + own * (split + 1) / splits,
                  scratch + task * heads * of->value_dim, highest + task * heads, total + task * heads);
    }
    for (int64_t row = 0; row < of->sequences * heads; row++) {
        const int64_t begin = first[row / heads] * heads + row % heads, end = first[row / heads + 1] * heads;
        float *const out = of->out + row * of->value_dim;
        float highest_of_all = -INFINITY, sum = 0;
        for (int64_t place = begin; place < end; place += heads)
            highest_of_all = highest[place] > highest_of_all ? highest[place] : highest_of_all;
        memset(out, 0, of->value_dim * sizeof(float));
        for (int64_t place = begin; place < end; place += heads) {
            const float share = begin + heads >= end ? 1.0f : exp2f(highest[place] - highest_of_all);
            sum += total[place] * share;
            for (int64_t d = 0; d < of->value_dim; d++)
                out[d] += scratch[place * of->value_dim + d] * share;
        }
        for (int64_t d = 0; d < of->value_dim; d++)
            out[d] /= sum;
    }
}

/* y[outer, inner, width] = x / sqrt(mean(x^2) + eps) * weight; y is contiguous. */
void segue_norm(int number, const float *x, int64_t x_outer, int64_t x_inner, const float *weight, float eps, float *y,
                int64_t outer, int64_t inner, int64_t width, int threads)
{
    const struct set *const set = sets + number;
#pragma omp parallel for num_threads(threads) if (outer * inner * width > 1 << 15)
    for (int64_t row = 0; row < outer * inner; row++)
        set->norm(x + row / inner * x_outer + row % inner * x_inner, weight, eps, y + row * width, (size_t)width);
}

/* y[batch, tokens, width] = layer norm of x, without weights, * (1 + scale) + shift (adaLN modulation); the batch's
 * rows of scale and shift are `batch_row` apart; x and y are contiguous. */
void segue_modulate(int number, const float *x, const float *scale, const float *shift, int64_t batch_row, float eps,
                    float *y, int64_t batch, int64_t tokens, int64_t width, int threads)
{
    const struct set *const set = sets + number;
#pragma omp parallel for num_threads(threads) if (batch * tokens * width > 1 << 15)
    for (int64_t row = 0; row < batch * tokens; row++)
        set->modulate(x + row * width, scale + row / tokens * batch_row, shift + row / tokens * batch_row, eps,
                      y + row * width, (size_t)width);
}

/* x[batch, tokens, heads, width], in place: RMSNorm with one weight, then RoPE by `turns` [tokens, width], alternating
 * real and imaginary parts, unless NULL; heads are contiguous. */
void segue_turn(int number, float *x, int64_t batch_row, int64_t token_row, const float *weight, float eps,
                const float *turns, int64_t batch, int64_t tokens, int64_t heads, int64_t width, int threads)
{
    const struct set *const set = sets + number;
#pragma omp parallel for num_threads(threads) if (batch * tokens * heads * width > 1 << 15)
    for (int64_t row = 0; row < batch * tokens; row++) {
        float *const from = x + row / tokens * batch_row + row % tokens * token_row;
        for (int64_t head = 0; head < heads; head++)
            set->turned(from + head * width, weight, eps, turns ? turns + row % tokens * width : NULL, (size_t)width);
    }
}

/* SwiGLU gate: y[rows, width] = silu(x[:, :width]) * x[:, width:]; both are contiguous. */
void segue_gate(int number, const float *x, float *y, int64_t rows, int64_t width, int threads)
{
    const struct set *const set = sets + number;
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 15)
    for (int64_t row = 0; row < rows; row++)
        set->gate(x + row * 2 * width, x + row * 2 * width + width, y + row * width, (size_t)width);
}

/* The slots (tokens * each) of every expert, one expert after the other: those of expert e are order[first[e]] until
 * before order[first[e + 1]], in their order; `first` is the end of `order`. */
static const int64_t *slots_of_experts(const struct experts *of)
{
    const int64_t slots = of->tokens * of->each;
    int64_t *const first = of->order + slots;
    memset(first, 0, (size_t)(of->experts + 1) * sizeof(int64_t));
    for (int64_t slot = 0; slot < slots; slot++)
        if (of->chosen[slot] >= 0 && of->chosen[slot] < of->experts)
            first[of->chosen[slot]]++;
    int64_t before = 0;
    for (int64_t expert = 0; expert <= of->experts; expert++) {
        const int64_t own = first[expert];
        first[expert] = before;
        before += own;
    }
    for (int64_t slot = 0; slot < slots; slot++)
        if (of->chosen[slot] >= 0 && of->chosen[slot] < of->experts)
            of->order[first[of->chosen[slot]]++] = slot;
    for (int64_t expert = of->experts; expert > 0; expert--) /* each has moved to where the next one begins */
        first[expert] = first[expert - 1];
    first[0] = 0;
    return first;
}

/* Every expert computes its rows together; a token's rows are summed in the order in which its experts are given, so
 * that its result does not depend on the other tokens. Weights must be of a kind without scratch memory. */
void segue_experts(int number, const struct experts *of, int threads)
{
    const int64_t hidden = of->hidden, slots = of->tokens * of->each;
    const int64_t *const first = slots_of_experts(of);
    if (first[of->experts] < slots)
        memset(of->mixed, 0, (size_t)(slots * hidden) * sizeof(float));
    for (int64_t expert = 0; expert < of->experts; expert++) {
        const int64_t begin = first[expert], count = first[expert + 1] - begin;
        if (!count)
            continue;
#pragma omp parallel for num_threads(threads) if (count * hidden > 1 << 15)
        for (int64_t row = 0; row < count; row++)
            memcpy(of->rows + row * hidden, of->x + of->order[begin + row] / of->each * hidden, hidden * sizeof(float));
        segue_product(number, of->rows, count, hidden, of->both + expert * of->both_next, (int)of->both_kind,
                      of->both_bias + expert * of->both_bias_next, of->gates, 2 * of->inner, 0, NULL, 0, threads);
        segue_gate(number, of->gates, of->gated, count, of->inner, threads);
        segue_product(number, of->gated, count, of->inner, of->down + expert * of->down_next, (int)of->down_kind,
                      of->down_bias + expert * of->down_bias_next, of->rows, hidden, 0, NULL, 0, threads);
#pragma omp parallel for num_threads(threads) if (count * hidden > 1 << 15)
        for (int64_t row = 0; row < count; row++) {
            const int64_t slot = of->order[begin + row];
            const float share = of->shares[slot];
            for (int64_t i = 0; i < hidden; i++)
                of->mixed[slot * hidden + i] = of->rows[row * hidden + i] * share;
        }
    }
#pragma omp parallel for num_threads(threads) if (slots * hidden > 1 << 15)
    for (int64_t token = 0; token < of->tokens; token++) {
        float *const y = of->y + token * hidden;
        memcpy(y, of->mixed + token * of->each * hidden, hidden * sizeof(float));
        for (int64_t slot = token * of->each + 1; slot < (token + 1) * of->each; slot++)
            for (int64_t i = 0; i < hidden; i++)
                y[i] += of->mixed[slot * hidden + i];
    }
}

#define MOST_CODES 8192 /* of `segue_draw`: kept on the stack */

/* Move the entry at `place` of a heap, whose smallest value is the first, down to where it belongs. */
static void sink(float *heap, int64_t count, int64_t place)
{
    const float value = heap[place];
    for (int64_t child; (child = 2 * place + 1) < count; place = child) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (value <= heap[child])
            break;
        heap[place] = heap[child];
    }
    heap[place] = value;
}

/* Make such a heap of any values. */
static void make_heap(float *heap, int64_t count)
{
    for (int64_t place = count / 2 - 1; place >= 0; place--)
        sink(heap, count, place);
}

/* The `count` largest of the scores, as such a heap. */
static void largest(const float *scores, int64_t width, float *heap, int64_t count)
{
    memcpy(heap, scores, (size_t)count * sizeof(float));
    make_heap(heap, count);
    for (int64_t i = count; i < width; i++)
        if (scores[i] > heap[0]) {
            heap[0] = scores[i];
            sink(heap, count, 0);
        }
}

/* The lowest score that top-k and top-p keep. `best`: [width], scratch. */
static float lowest_kept(const float *scores, int64_t width, float most, int64_t top_k, double top_p, float *best)
{
    const int64_t count = top_k > 0 && top_k < width ? top_k : width;
    if (count == width && top_p >= 1.0)
        return -INFINITY;
    largest(scores, width, best, count);
    const float lowest = best[0];
    if (top_p >= 1.0)
        return lowest;
    double total = 0, before = 0;
    for (int64_t i = 0; i < width; i++)
        if (scores[i] >= lowest)
            total += exp((double)scores[i] - most);
    for (int64_t i = 0; i < count; i++) /* now the largest score is first */
        best[i] = -best[i];
    make_heap(best, count);
    for (int64_t left = count; left > 1; sink(best, left, 0)) {
        before += exp(-(double)best[0] - most);
        if (before >= top_p * total)
            break;
        best[0] = best[--left];
    }
    return -best[0];
}

/* The highest score, or -INFINITY; in lanes, so that compilers make vectors of it. */
static float highest_of(const float *scores, int64_t width)
{
    float lanes[16], most = -INFINITY;
    for (int lane = 0; lane < 16; lane++)
        lanes[lane] = -INFINITY;
    for (int64_t i = 0; i + 16 <= width; i += 16)
        for (int lane = 0; lane < 16; lane++)
            lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
    for (int64_t i = width / 16 * 16; i < width; i++)
        most = scores[i] > most ? scores[i] : most;
    for (int lane = 0; lane < 16; lane++)
        most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

/* One code per row of logits: see `draw_codes` of segue.kernels.operations. Rows are `.._row` apart; `numbers` are in
 * [0, 1); `top_p` has the bits of a double; `width` is at most MOST_CODES. */
void segue_draw(int number, const float *logits, int64_t logits_row, const double *numbers, int64_t numbers_row,
                const uint8_t *greedy, int64_t greedy_row, float temperature, int64_t *codes, uint8_t *finite,
                int64_t rows, int64_t width, int64_t top_k, int64_t top_p, int threads)
{
    (void)number;
    double share;
    memcpy(&share, &top_p, sizeof share);
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 15)
    for (int64_t row = 0; row < rows; row++) {
        float scores[MOST_CODES], weights[MOST_CODES];
        int32_t kept[MOST_CODES];
        const float *const x = logits + row * logits_row;
        int broken = 0;
        for (int64_t i = 0; i < width; i++)
            scores[i] = x[i] / temperature;
        for (int64_t i = 0; i < width; i++)
            broken |= !(scores[i] < INFINITY);
        const float most = highest_of(scores, width);
        int64_t best = 0, count = 0;
        while (best < width - 1 && scores[best] != most)
            best++;
        finite[row] = !broken && most > -INFINITY;
        codes[row] = best;
        if (!finite[row] || greedy[row * greedy_row])
            continue;
        const float lowest = lowest_kept(scores, width, most, top_k, share, weights);
        for (int64_t i = 0; i < width; i++) { /* without a branch */
            kept[count] = (int32_t)i;
            count += scores[i] >= lowest;
        }
        double total = 0, before = 0;
        for (int64_t i = 0; i < count; i++) {
            weights[i] = expf(scores[kept[i]] - most);
            total += weights[i];
        }
        const double target = numbers[row * numbers_row] * total;
        for (int64_t i = 0; i < count && before <= target; i++) {
            before += weights[i];
            if (weights[i] > 0)
                codes[row] = kept[i]; /* the last one of them, where rounding leaves the target at the total */
        }
    }
}

/* y[batch, channels, samples] = x + sin(frequencies x)^2 * shares, both per channel; y is contiguous, and samples of x
 * are. */
void segue_snake(int number, const float *x, int64_t batch_row, int64_t channel_row, const float *frequencies,
                 const float *shares, float *y, int64_t batch, int64_t channels, int64_t samples, int threads)
{
    const struct set *const set = sets + number;
#pragma omp parallel for num_threads(threads) if (batch * channels * samples > 1 << 15)
    for (int64_t row = 0; row < batch * channels; row++)
        set->snake(x + row / channels * batch_row + row % channels * channel_row, frequencies[row % channels],
                   shares[row % channels], y + row * samples, (size_t)samples);
}

/* Floats of scratch memory per thread of `segue_full_attention`. */
int64_t segue_full_scratch(int64_t dim, int64_t value_dim)
{
    const int64_t padded = (value_dim + 15) / 16 * 16;
    return ((KEYS + MOST_ROWS) * (dim + padded) + QUERIES * KEYS + 2 * MOST_ROWS + 15) / 16 * 16;
}

/* Attention of many queries. The rows of a K/V head (queries times the heads that share it) are split into tasks of
 * equal length, several per thread if there are enough. `scratch`: [threads, segue_full_scratch]. */
void segue_full_attention(int number, const struct full_attention *of, float *scratch, int threads)
{
    const struct set *const set = sets + number;
    const int64_t rows = of->queries * (of->heads / of->kv_heads), pairs = of->sequences * of->kv_heads;
    if (!pairs || !rows)
        return;
    int64_t spans = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t wanted = (4 * threads + pairs - 1) / pairs, least = (rows + 95) / 96;
    if (spans < wanted)
        spans = wanted < least ? wanted : least;
    const int64_t span = ((rows + spans - 1) / spans + QUERIES - 1) / QUERIES * QUERIES;
    const int64_t needs = segue_full_scratch(of->dim, of->value_dim);
    spans = (rows + span - 1) / span;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (pairs * spans > 1)
    for (int64_t task = 0; task < pairs * spans; task++) {
        const int64_t pair = task / spans, begin = (spans - 1 - task % spans) * span; /* the longest first */
        set->rows(of, pair / of->kv_heads, pair % of->kv_heads, begin, begin + span < rows ? begin + span : rows,
                  scratch + omp_get_thread_num() * needs);
    }
}

/* One call of a recording: the function, and its arguments without the instruction set and `threads`. */
struct call {
    enum { GEMM, WRITE, ATTEND, NORM, GATE, EACH, FULLY, MODULATE, ROPE, EXPERTS, DRAW, SNAKE } kind;
    float number;
    int64_t of[22];
};

/* y = what(p, q) over four dimensions: of = {what, sizes[4], y, strides[4], p, strides[4], q, strides[4]}; without q,
 * `number` replaces it. Computes the rows (the last dimension) [first, last), and of each the elements
 * [begin, end). */
static void each_part(const struct set *set, const struct call *call, int64_t first, int64_t last, int64_t begin,
                      int64_t end)
{
    const int64_t *const of = call->of, *const size = of + 1, *const y = of + 6, *const p = of + 11, *const q = of + 16;
    float *const to = (float *)of[5] + begin * y[3];
    const float *const left = (const float *)of[10] + begin * p[3];
    const float *const right = of[15] ? (const float *)of[15] + begin * q[3] : &call->number;
    int64_t k = first % size[2], j = first / size[2] % size[1], i = first / size[2] / size[1];
    for (int64_t row = first; row < last; row++) {
        set->row(of[0], to + i * y[0] + j * y[1] + k * y[2], y[3], left + i * p[0] + j * p[1] + k * p[2], p[3],
                 right + i * q[0] + j * q[1] + k * q[2], q[3], end - begin);
        if (++k == size[2]) {
            k = 0;
            if (++j == size[1]) {
                j = 0;
                i++;
            }
        }
    }
}

/* Each thread computes some of the rows; if there are few, a part of each. */
static void each(const struct set *set, const struct call *call, int threads)
{
    const int64_t *const size = call->of + 1, rows = size[0] * size[1] * size[2], width = size[3];
    const int64_t parts = rows * width > 1 << 15 ? threads : 1;
    const int64_t piece = (width + 16 * parts - 1) / (16 * parts) * 16;
#pragma omp parallel for num_threads(threads) if (parts > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t end = (part + 1) * piece;
        if (rows >= parts)
            each_part(set, call, rows * part / parts, rows * (part + 1) / parts, 0, width);
        else if (part * piece < width)
            each_part(set, call, 0, rows, part * piece, end < width ? end : width);
    }
}

#define AT(i) ((void *)of[i])

/* The calls of a recording, one after the other. */
void segue_replay(int number, const struct call *calls, int64_t count, int threads)
{
    const struct set *const set = sets + number;
    for (const struct call *call = calls; call < calls + count; call++) {
        const int64_t *const of = call->of;
        switch (call->kind) {
        case GEMM:
            segue_product(number, AT(0), of[1], of[2], AT(3), (int)of[4], AT(5), AT(6), of[7], (int)of[8], AT(9),
                          of[10], threads);
            break;
        case WRITE:
            segue_write(AT(0), of[1], of[2], AT(3), of[4], of[5], AT(6), of[7], of[8], AT(9), of[10], of[11], AT(12),
                        of[13], of[14], of[15], of[16]);
            break;
        case ATTEND:
            segue_attend(number, AT(0), of[1], AT(2), threads);
            break;
        case NORM:
            segue_norm(number, AT(0), of[1], of[2], AT(3), call->number, AT(4), of[5], of[6], of[7], threads);
            break;
        case GATE:
            segue_gate(number, AT(0), AT(1), of[2], of[3], threads);
            break;
        case EACH:
            each(set, call, threads);
            break;
        case FULLY:
            segue_full_attention(number, AT(0), AT(1), threads);
            break;
        case ROPE:
            segue_turn(number, AT(0), of[1], of[2], AT(3), call->number, AT(4), of[5], of[6], of[7], of[8], threads);
            break;
        case MODULATE:
            segue_modulate(number, AT(0), AT(1), AT(2), of[3], call->number, AT(4), of[5], of[6], of[7], threads);
            break;
        case EXPERTS:
            segue_experts(number, AT(0), threads);
            break;
        case DRAW:
            segue_draw(number, AT(0), of[1], AT(2), of[3], AT(4), of[5], call->number, AT(6), AT(7), of[8], of[9],
                       of[10], of[11], threads);
            break;
        case SNAKE:
            segue_snake(number, AT(0), of[1], of[2], AT(3), AT(4), AT(5), of[6], of[7], of[8], threads);
            break;
        }
    }
}
