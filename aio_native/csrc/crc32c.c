#include "crc32c.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* reflected */

static uint32_t table[256]; /* constant once made */
static pthread_once_t table_made = PTHREAD_ONCE_INIT;

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[i] = crc;
    }
}

uint32_t lamina_crc32c_plain(uint32_t crc, const void *data, uint64_t nbytes) {
    const unsigned char *p = data;
    pthread_once(&table_made, make_table);
    crc = ~crc;
    for (uint64_t i = 0; i < nbytes; i++)
        crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
    return ~crc;
}

/* a * b modulo the polynomial; reflected, so bit 31 is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; a; bit >>= 1) {
        if (a & bit) {
            product ^= b;
            a ^= bit;
        }
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

/* x^(8 * nbytes) modulo the polynomial: what appending so many bytes multiplies a checksum by. */
static uint32_t appended(uint64_t nbytes) {
    uint32_t power = 0x80000000u, square = 0x00800000u;
    for (; nbytes; nbytes >>= 1) {
        if (nbytes & 1)
            power = multiply(square, power);
        square = multiply(square, square);
    }
    return power;
}

uint32_t lamina_crc32c_join(uint32_t crc, const uint32_t *crcs, uint64_t count, uint64_t piece,
                            uint64_t last) {
    uint32_t shift = appended(piece);
    for (uint64_t i = 0; i + 1 < count; i++)
        crc = multiply(shift, crc) ^ crcs[i];
    return count ? multiply(appended(last), crc) ^ crcs[count - 1] : crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* The instruction has a latency of three cycles and a throughput of one, so three lanes run side by side.
 * Moving a lane's remainder past the bytes behind it is a multiplication by x^(8 * bytes) mod P: one
 * carry-less product with a constant, reduced by the crc instruction itself (which multiplies by x^32;
 * reflection makes up for one bit more, hence x^(8 * bytes - 33)). */
#define LANE_WORDS 256 /* 2 KiB to a lane */

static uint32_t power(uint64_t exponent) { /* x^exponent mod P, reflected */
    uint32_t value = 0x80000000u;
    while (exponent--)
        value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
    return value;
}

static uint32_t skip_one, skip_two;
static pthread_once_t skips_made = PTHREAD_ONCE_INIT;

static void make_skips(void) {
    skip_one = power(64 * LANE_WORDS - 33);
    skip_two = power(128 * LANE_WORDS - 33);
}

__attribute__((target("sse4.2,pclmul"))) static uint64_t move(uint64_t crc, uint32_t constant) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc), _mm_cvtsi64_si128(constant), 0);
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

static uint64_t word(const unsigned char *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_fast(uint32_t crc, const unsigned char *p,
                                                                  uint64_t n) {
    uint64_t a = (uint32_t)~crc;
    pthread_once(&skips_made, make_skips);
    for (; n >= 24 * LANE_WORDS; n -= 24 * LANE_WORDS, p += 24 * LANE_WORDS) {
        uint64_t b = 0, c = 0;
        for (int i = 0; i < LANE_WORDS; i++) {
            a = _mm_crc32_u64(a, word(p + 8 * i));
            b = _mm_crc32_u64(b, word(p + 8 * (i + LANE_WORDS)));
            c = _mm_crc32_u64(c, word(p + 8 * (i + 2 * LANE_WORDS)));
        }
        a = move(a, skip_two) ^ move(b, skip_one) ^ c;
    }
    for (; n >= 8; n -= 8, p += 8)
        a = _mm_crc32_u64(a, word(p));
    for (; n; n--)
        a = _mm_crc32_u8((uint32_t)a, *p++);
    return ~(uint32_t)a;
}

static int have_fast(void) {
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}
#define FAST_NAME "sse4.2+pclmul"

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

/* The instructions are written out so that no compiler flag is needed for the file. */
static uint32_t crc_word(uint32_t crc, uint64_t value) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(value));
    return crc;
}

static uint32_t crc_byte(uint32_t crc, uint32_t value) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(value));
    return crc;
}

static uint32_t crc_fast(uint32_t crc, const unsigned char *p, uint64_t n) {
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t value;
        memcpy(&value, p, sizeof value);
        crc = crc_word(crc, value);
    }
    for (; n; n--)
        crc = crc_byte(crc, *p++);
    return ~crc;
}

static int have_fast(void) {
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#define FAST_NAME "armv8-crc"

#else
static uint32_t crc_fast(uint32_t crc, const unsigned char *p, uint64_t n) {
    return lamina_crc32c_plain(crc, p, n);
}

static int have_fast(void) {
    return 0;
}
#define FAST_NAME "table"
#endif

uint32_t lamina_crc32c(uint32_t crc, const void *data, uint64_t nbytes) {
    return have_fast() ? crc_fast(crc, data, nbytes) : lamina_crc32c_plain(crc, data, nbytes);
}

const char *lamina_crc32c_path(void) {
    return have_fast() ? FAST_NAME : "table";
}
