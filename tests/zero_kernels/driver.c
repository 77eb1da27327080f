/* Runs every kernel on every given path over odd sizes and offsets, in buffers of exactly the needed size,
 * and compares the bytes with the portable path's.  Built by test_kernel_checkers.py with sanitizers, for
 * valgrind, and for other machines; prints a checksum of all results, which must be the same everywhere.
 *
 * driver PATH...   (numbers of enum lk_path; 0 is the reference) */
#define _POSIX_C_SOURCE 200809L
#include "crc32c.h"
#include "kernels.h"
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t state = 88172645463325252u, checksum = 14695981039346656037u;

static uint32_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static void fail(const char *what, long a, long b) {
    fprintf(stderr, "driver: %s (%ld, %ld)\n", what, a, b);
    exit(1);
}

static void mix(const void *data, size_t bytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        checksum = (checksum ^ p[i]) * 1099511628211u;
}

static size_t width(int dtype) {
    return dtype == LK_FP32 ? 4 : 2;
}

/* A finite value with an exponent in a middle range, of either sign, sometimes zero or subnormal. */
static void fill(void *out, int dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t r = next(), sign = r >> 31;
        if (dtype == LK_FP32) {
            uint32_t exponent = r % 16 == 0 ? 0 : 90 + (r >> 8) % 60;
            uint32_t x = sign << 31 | exponent << 23 | (r % 32 == 0 ? 0 : next() & 0x7fffff);
            memcpy((char *)out + 4 * i, &x, 4);
        } else {
            uint32_t bits = dtype == LK_BF16 ? sign << 15 | (90 + (r >> 8) % 60) << 7 | (next() & 0x7f)
                                             : sign << 15 | ((r >> 8) % 31) << 10 | (next() & 0x3ff);
            uint16_t x = (uint16_t)(r % 32 == 0 ? 0 : bits);
            memcpy((char *)out + 2 * i, &x, 2);
        }
    }
}

typedef struct {
    char *room, *at;
    size_t bytes;
} plane;

/* Exactly offset + n elements, so that a checker sees a read or write beyond them. */
static plane make(int dtype, int64_t n, int offset) {
    plane p;
    p.bytes = (size_t)n * width(dtype);
    p.room = malloc((size_t)offset * width(dtype) + p.bytes + (n + offset == 0));
    if (p.room == NULL)
        fail("out of memory", n, offset);
    p.at = p.room + (size_t)offset * width(dtype);
    return p;
}

static plane twin(const plane *of, int dtype, int64_t n, int offset) {
    plane p = make(dtype, n, offset);
    memcpy(p.at, of->at, p.bytes);
    return p;
}

static void must_equal(const plane *a, const plane *b, const char *what, long n, long path) {
    if (a->bytes && memcmp(a->at, b->at, a->bytes))
        fail(what, n, path);
    mix(a->at, a->bytes);
}

static void must(int rc, const char *what, int path) {
    if (rc)
        fail(what, rc, path);
}

typedef struct {
    int param, master_kind, adopt;
} kind;

/* n is at most two pieces. */
static void check_sums(const plane *param, const plane *m, const plane *v, const plane *other, kind k,
                       int64_t n, const uint32_t *sums) {
    const plane *planes[] = {param, m, v, other};
    int64_t pieces = (n + LK_SUM_PIECE - 1) / LK_SUM_PIECE;
    for (int i = 0; i < (k.master_kind == LK_IN_PARAM ? 3 : 4); i++) {
        size_t whole = planes[i]->bytes, size = n ? whole / (size_t)n * LK_SUM_PIECE : 1;
        for (int64_t piece = 0; piece < pieces; piece++) {
            size_t begin = (size_t)piece * size, end = begin + size < whole ? begin + size : whole;
            if (sums[i * pieces + piece] != lamina_crc32c_plain(0, planes[i]->at + begin, end - begin))
                fail("a checksum is wrong", i, piece);
        }
    }
}

static void one_adam(lk_pool *ours, lk_pool *reference, kind k, int grad_dtype, int64_t n, int offset,
                     int path) {
    enum { PARAM, GRAD, M, V, MASTER, REMAINDER, COUNT };
    const int dtypes[COUNT] = {k.param, grad_dtype, LK_FP32, LK_FP32, LK_FP32, LK_BF16};
    plane a[COUNT], b[COUNT];
    for (int i = 0; i < COUNT; i++) {
        a[i] = make(dtypes[i], n, offset);
        fill(a[i].at, dtypes[i], n);
        if (i == V)
            for (int64_t j = 0; j < n; j++)
                a[i].at[4 * j + 3] &= 0x7f;
        b[i] = twin(&a[i], dtypes[i], n, 0);
    }
    for (int variant = 0; variant < 6; variant++) {
        lk_adam_scalars scalars = {.l2 = variant & 1,
                                   .grad_multiplier = variant & 2 ? -0.5f : 1.0f,
                                   .decay = variant & 1 ? 1.0f : 0.999f,
                                   .weight_decay = 0.01f,
                                   .beta2 = 0.99f,
                                   .one_minus_beta1 = variant < 3 ? 0.1f : 0.7f,
                                   .one_minus_beta2 = 0.01f,
                                   .bias_correction2_sqrt = variant == 5 ? 1.0f : 0.3162f,
                                   .eps = variant == 4 ? 0.0f : 1e-8f,
                                   .neg_step_size = -0.001f,
                                   .step = 1.0f};
        float counters[2] = {0.0f, 0.0f};
        lk_adam_args args = {.n = n,
                             .param_dtype = k.param,
                             .grad_dtype = grad_dtype,
                             .master_kind = k.master_kind,
                             .adopt_param = k.adopt,
                             .scalars = &scalars};
        for (int side = 0; side < 2; side++) {
            plane *p = side ? b : a;
            args.param = (uintptr_t)p[PARAM].at;
            args.grad = (uintptr_t)p[GRAD].at;
            args.exp_avg = (uintptr_t)p[M].at;
            args.exp_avg_sq = (uintptr_t)p[V].at;
            args.master = (uintptr_t)p[MASTER].at;
            args.remainder = (uintptr_t)p[REMAINDER].at;
            uint32_t sums[4][2];
            args.sums = (uintptr_t)sums;
            args.counter = (uintptr_t)&counters[side];
            if (!lk_counters_agree(&args, 1))
                fail("a counter is not at 0", variant, path);
            must(lk_adam(side ? reference : ours, &args, 1), "lk_adam", path);
            if (counters[side] != 1.0f || lk_counters_agree(&args, 1))
                fail("a counter is not at 1", variant, path);
            check_sums(&p[PARAM], &p[M], &p[V], k.master_kind == LK_SPLIT ? &p[REMAINDER] : &p[MASTER], k, n,
                       &sums[0][0]);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        /* Infinities may meet: which NaN comes of it is open, so planes with one are compared but not added
         * up. */
        if (a[i].bytes && lk_has_nonfinite(reference, n, (uintptr_t)b[i].at, dtypes[i]) && i != REMAINDER) {
            if (!lk_has_nonfinite(ours, n, (uintptr_t)a[i].at, dtypes[i]))
                fail("nonfinite on one side", n, path);
        } else if (i != REMAINDER || k.master_kind == LK_SPLIT) {
            must_equal(&a[i], &b[i], "adam differs", n, path);
        }
        free(a[i].room);
        free(b[i].room);
    }
}

static void companions(lk_pool *ours, lk_pool *reference, int dtype, int64_t n, int offset, int path) {
    plane src = make(dtype, n, offset);
    fill(src.at, dtype, n);
    uintptr_t s = (uintptr_t)src.at;
    int64_t blocks = (n + 4095) / 4096;
    double *x = malloc(sizeof(double) * (size_t)blocks + 1), *y = malloc(sizeof(double) * (size_t)blocks + 1);
    if (x == NULL || y == NULL)
        fail("out of memory", n, offset);
    must(lk_squared_norm(ours, n, s, dtype, (uintptr_t)x), "norm", path);
    must(lk_squared_norm(reference, n, s, dtype, (uintptr_t)y), "norm", 0);
    if (blocks && memcmp(x, y, sizeof(double) * (size_t)blocks))
        fail("norm differs", n, path);
    mix(x, sizeof(double) * (size_t)blocks);
    if (lk_has_nonfinite(ours, n, s, dtype) != 0)
        fail("nonfinite", n, path);
    for (int other = 0; other < 3; other++) {
        plane p = make(other, n, offset), q = make(other, n, 0);
        must(lk_convert(ours, n, s, dtype, (uintptr_t)p.at, other), "convert", path);
        must(lk_convert(reference, n, s, dtype, (uintptr_t)q.at, other), "convert", 0);
        must_equal(&p, &q, "convert differs", n, path);
        free(p.room);
        free(q.room);
    }
    plane p = make(LK_FP32, n, offset), q;
    fill(p.at, LK_FP32, n);
    q = twin(&p, LK_FP32, n, 0);
    for (int add = 0; add < 2; add++) {
        must(lk_accumulate(ours, n, (uintptr_t)p.at, s, dtype, 0.3f, add), "accumulate", path);
        must(lk_accumulate(reference, n, (uintptr_t)q.at, s, dtype, 0.3f, add), "accumulate", 0);
        must_equal(&p, &q, "accumulate differs", n, path);
    }
    if (dtype == LK_FP32) {
        plane high = make(LK_BF16, n, offset), low = make(LK_BF16, n, offset),
              again = make(LK_FP32, n, offset);
        must(lk_split_bf16(ours, n, s, (uintptr_t)high.at, (uintptr_t)low.at), "split", path);
        must(lk_merge_bf16(ours, n, (uintptr_t)again.at, (uintptr_t)high.at, (uintptr_t)low.at), "merge",
             path);
        must_equal(&again, &src, "split and merge differ", n, path);
        mix(high.at, high.bytes);
        uintptr_t from[3] = {s, s, s}, to[3] = {(uintptr_t)again.at, (uintptr_t)p.at, (uintptr_t)q.at};
        must(lk_stream(ours, n, from, to, 0), "stream", path);
        must_equal(&q, &src, "stream differs", n, path);
        free(high.room);
        free(low.room);
        free(again.room);
    }
    free(p.room);
    free(q.room);
    free(src.room);
    free(x);
    free(y);
}

static void *caller(void *pool) {
    enum { N = 200000 };
    float *x = calloc(N, sizeof *x), *y = calloc(N, sizeof *y);
    if (x == NULL || y == NULL)
        fail("out of memory", N, 0);
    for (int i = 0; i < N; i++)
        y[i] = 1.0f;
    for (int round = 0; round < 20; round++) {
        if (round % 4 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 10000 << round / 2},
                      NULL); /* 10 us to 3 ms: awake and asleep */
        must(lk_accumulate(pool, N, (uintptr_t)x, (uintptr_t)y, LK_FP32, 1.0f, 1), "accumulate", round);
    }
    for (int i = 0; i < N; i++)
        if (x[i] != 20.0f)
            fail("a chunk was lost or done twice", i, (long)x[i]);
    free(x);
    free(y);
    return NULL;
}

static void callers_at_once(int threads) {
    lk_pool *pool;
    pthread_t made[4];
    must(lk_open(&pool, threads, NULL, 0, LK_PORTABLE), "open", threads);
    for (int i = 0; i < 4; i++)
        must(pthread_create(&made[i], NULL, caller, pool), "pthread_create", i);
    for (int i = 0; i < 4; i++)
        must(pthread_join(made[i], NULL), "pthread_join", i);
    must(lk_stop(pool), "stop", threads);
    if (lk_has_nonfinite(pool, 0, 0, LK_FP32) != -EBADF)
        fail("a stopped pool works", 0, 0);
    lk_free(pool);
}

int main(int argc, char **argv) {
    static const kind kinds[] = {{LK_FP32, LK_IN_PARAM, 0}, {LK_BF16, LK_SPLIT, 0}, {LK_BF16, LK_COPY, 0},
                                 {LK_FP16, LK_COPY, 0},     {LK_BF16, LK_COPY, 1},  {LK_FP16, LK_COPY, 1}};
    static const int64_t sizes[] = {0,  1,  2,  3,  7,   8,    15,   16,   17,   31,
                                    33, 47, 64, 65, 127, 1000, 4096, 4099, 20001};
    lk_pool *reference;
    must(lk_open(&reference, 1, NULL, 0, LK_PORTABLE), "open", 0);
    for (int arg = 1; arg < argc; arg++) {
        int path = atoi(argv[arg]);
        lk_pool *ours;
        must(lk_open(&ours, 2, NULL, 0, path), "open", path);
        state = 88172645463325252u;
        checksum = 14695981039346656037u;
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int dtype = 0; dtype < 3; dtype++) {
                int offset = (int)(s * 3 + (size_t)dtype) % 19;
                companions(ours, reference, dtype, sizes[s], offset, path);
                for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
                    one_adam(ours, reference, kinds[k], dtype, sizes[s], offset, path);
            }
        lk_free(ours);
        printf("checksum %016llx\n", (unsigned long long)checksum);
    }
    lk_free(reference);
    callers_at_once(1);
    callers_at_once(3);
    return 0;
}
