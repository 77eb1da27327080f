/* Round to nearest, subnormals kept, no traps: whatever mode the calling thread is in
 * (torch.set_flush_denormal, a library built with -ffast-math), every chunk computes in this one, so that
 * threads cannot differ. */
#ifndef LAMINA_FPENV_H
#define LAMINA_FPENV_H
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned lk_fpenv;
static inline lk_fpenv lk_fpenv_default(void) {
    lk_fpenv saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return saved;
}
static inline void lk_fpenv_restore(lk_fpenv saved) {
    _mm_setcsr(saved);
}
#elif defined(__aarch64__)
typedef uint64_t lk_fpenv;
static inline lk_fpenv lk_fpenv_default(void) {
    lk_fpenv saved;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved));
    __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)0));
    return saved;
}
static inline void lk_fpenv_restore(lk_fpenv saved) {
    __asm__ __volatile__("msr fpcr, %0" ::"r"(saved));
}
#else
#include <fenv.h>
typedef fenv_t lk_fpenv;
static inline lk_fpenv lk_fpenv_default(void) {
    fenv_t saved;
    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}
static inline void lk_fpenv_restore(lk_fpenv saved) {
    fesetenv(&saved);
}
#endif
#endif
