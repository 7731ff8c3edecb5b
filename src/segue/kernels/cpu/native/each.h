/* Element-wise operators over tensors, for one instruction set. Each rounds once, like torch's own: the results are
 * bit-identical. (x - 0 is x, for -0 as well; x + 0 is not.) */

#define EACH_OF(expression)                                                                                            \
    {                                                                                                                  \
        for (; vectors && i + LANES <= count; i += LANES) {                                                            \
            const VEC a = p_step ? LOAD(p + i) : *p - (VEC){0}, b = q_step ? LOAD(q + i) : *q - (VEC){0};              \
            STORE(y + i, expression);                                                                                  \
            (void)b;                                                                                                   \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            const float a = p[i * p_step], b = q[i * q_step];                                                          \
            y[i * y_step] = expression;                                                                                \
            (void)b;                                                                                                   \
        }                                                                                                              \
        break;                                                                                                         \
    }

static void NAME(row)(int64_t what, float *y, int64_t y_step, const float *p, int64_t p_step, const float *q,
                      int64_t q_step, int64_t count)
{
    const int vectors = y_step == 1 && (p_step == 0 || p_step == 1) && (q_step == 0 || q_step == 1);
    int64_t i = 0;
    switch (what) {
    case COPY:
        EACH_OF(a)
    case NEGATE:
        EACH_OF(-a)
    case ADD:
        EACH_OF(a + b)
    case SUBTRACT:
        EACH_OF(a - b)
    case MULTIPLY:
        EACH_OF(a *b)
    case DIVIDE:
        EACH_OF(a / b)
    }
}
#undef EACH_OF

#undef EACH
#undef VEC
#undef BITS
#undef LOAD
#undef STORE
#undef PANEL
#undef THIRD
#undef FETCH
