/* What one dispatch path offers: plain loops over [0, n) on the calling thread.  All paths give the same
 * bits. */
#ifndef LAMINA_OPS_H
#define LAMINA_OPS_H
#include "kernels.h"
#include <stddef.h>

enum { LK_NORM_BLOCK = 4096, LK_NORM_LANES = 32 };

typedef struct {
    void (*adam)(const lk_adam_args *args, int64_t begin, int64_t end);
    double (*squared_norm)(const void *src, int dtype, int64_t n); /* n <= LK_NORM_BLOCK */
    int (*has_nonfinite)(const void *src, int dtype, int64_t n);
    void (*accumulate)(float *dst, const void *src, int dtype, float scale, int add, int64_t n);
    void (*split)(const float *master, uint16_t *param, int16_t *remainder, int64_t n);
    void (*merge)(float *master, const uint16_t *param, const int16_t *remainder, int64_t n);
    void (*convert)(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n);
    void (*stream)(const float *const *from, float *const *to, int non_temporal, int64_t n);
} lk_ops;

/* NULL where the machine the library was built for has no such path. */
extern const lk_ops *const lk_ops_portable;
extern const lk_ops *const lk_ops_avx2;
extern const lk_ops *const lk_ops_avx512;
extern const lk_ops *const lk_ops_neon;

static inline size_t lk_itemsize(int dtype) {
    return dtype == LK_FP32 ? 4 : 2;
}
#endif
